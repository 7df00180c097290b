"""The Grafana dashboard: it asks for metrics that exist, with the labels that they have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.docs.pages import ROOT
from tests.metrics_table import engine_families, gateway_families, sidecar_families

DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/lockstep.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ADDED_LABELS = {"instance", "job", "le", "process"}
"""By Prometheus, by a histogram's buckets, and by the engine's metrics page."""
OF_PROCESSES = {"process_resident_memory_bytes", "process_cpu_seconds_total"}
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",), "info": ("_info",)}


@pytest.fixture(scope="module")
def labels() -> dict[str, set[str]]:
    """Return the labels of each sample's name."""
    found: dict[str, set[str]] = {}
    for family in (*engine_families(), *sidecar_families(), *gateway_families()):
        given = {label for sample in family.samples for label in sample.labels}
        found |= {f"{family.name}{suffix}": given for suffix in SUFFIXES[family.type]}
    return found


def expressions() -> Iterator[tuple[str, str, str]]:
    """Yield title, expression and legend of each line."""
    for panel in PANELS:
        for target in panel["targets"]:
            yield panel["title"], target["expr"], target["legendFormat"]


def test_every_metric_exists_with_its_labels(labels: dict[str, set[str]]) -> None:
    asked = set()
    for title, expression, legend in expressions():
        names = set(
            re.findall(
                r"\b((?:lockstep|vllm|process)[a-z0-9_:]*)(?=[{\[)\s]|$)", re.sub(r"by \([^)]*\)", "", expression)
            )
        )
        assert names, (title, expression)
        asked |= names
        assert names - OF_PROCESSES <= set(labels), (title, names - set(labels))
        used = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
        used |= set(re.findall(r"[{,]\s*([a-z_]+)\s*=", expression))
        shown = set(re.findall(r"{{(\w+)}}", legend))
        known = ADDED_LABELS | {label for name in names - OF_PROCESSES for label in labels[name]}
        assert used | shown <= known, (title, (used | shown) - known)
        grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
        assert not grouped - {"le"} or shown <= grouped, (title, "the legend shows a label that the sum drops")
    assert len(asked) > 40


def test_panels_are_apart_and_ask_one_data_source() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    places = [tuple(panel["gridPos"][name] for name in "xywh") for panel in DASHBOARD["panels"]]
    cells = [(x + i, y + j) for x, y, w, h in places for i in range(w) for j in range(h)]
    assert len(set(cells)) == len(cells), "two panels overlap"
    assert max(x for x, _ in cells) < 24
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(DASHBOARD["panels"])))
    assert used == variables == {"datasource", "instance"}
    assert all(target["datasource"]["uid"] == "${datasource}" for panel in PANELS for target in panel["targets"])
