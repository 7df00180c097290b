"""Lints and renders the chart with Helm's own code: cases in on stdin, manifests out on stdout, both as JSON.

Invariant: this is its own process. Helm is a library in Go, whose runtime takes over signals and threads of the
process that loads it.

Not responsible for: the cases, and what must hold for the manifests (see test_chart.py).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import helm_python
from helm_python.errors import HelmError

CHART = Path(__file__).resolve().parents[3] / "deploy/helm/lockstep"


def rendered(chart: helm_python.Chart, values: dict[str, Any]) -> dict[str, str] | str:
    """Return the text of each template, or the reason of the refusal."""
    try:
        chart.validate_schema(values)
        return chart.render(values, name="demo", namespace="prod")
    except HelmError as error:
        return str(error)


def main() -> None:
    """Answer {"lint": messages, "rendered": {case: {template: text} or error}}."""
    with helm_python.Chart.load(CHART) as chart:
        found = {name: rendered(chart, values) for name, values in json.load(sys.stdin).items()}
    json.dump({"lint": helm_python.lint(CHART, strict=True)["messages"], "rendered": found}, sys.stdout)


if __name__ == "__main__":
    main()
