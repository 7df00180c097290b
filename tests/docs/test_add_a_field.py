"""The recipe of docs/contributing.md for a field of the API, checked on fields that exist.

At most nine product files name a field: those of the recipe's steps, and the modules that act on the field. The other
wires, which may lack it, are counted for themselves. Generated code and kernels are left out: a kernel computes what a
field asks for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from protos.engine.v1 import engine_pb2 as pb
from tests.docs.pages import ROOT

MAX_FILES = 9
STEPS = (
    "protos/engine/v1/engine.proto",
    "gpu_engine/api/request.py",
    "gpu_engine/front/validation.py",
    "client/lockstep_client/options.py",
    "gpu_engine/cli/request_flags.py",
)
"""Product files that name every field."""
WIRES = {
    "gpu_engine/doors/kserve/": 1,
    "gpu_engine/doors/vllm_wire/": 1,
    "client/lockstep_client/executing/": 1,
}
"""Folder of another wire -> the most files in it that name a field."""
FIELDS = (
    *("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos"),
    *("bad_words", "logit_bias", "include_stop_str_in_output", "draft_index", "omit_text", "priority"),
    *("max_queue_ms", "never_preempt"),
)
"""Fields whose names nothing else has, as settings and other messages have `num_draft_tokens` and `min_tokens`."""


@cache
def product() -> dict[str, str]:
    """Return the text of each product file, by its path."""
    return {str(path.relative_to(ROOT)): path.read_text() for path in _paths()}


def _paths() -> Iterator[Path]:
    yield ROOT / STEPS[0]
    for folder in ("gpu_engine", "client/lockstep_client"):
        yield from (
            path
            for path in sorted((ROOT / folder).rglob("*.py"))
            if path.parent != ROOT / "client/lockstep_client/wire"  # generated
        )


def naming(field: str) -> set[str]:
    """Return the product files that use a field: as an attribute, an argument, or a name in its own text."""
    word = re.compile(rf"\.{field}\b|\b{field}(?==|:| =)|[\"'](?:[a-z_.]+\.)?{field}[\"']")
    return {path for path, text in product().items() if word.search(text)}


def wire_of(path: str) -> str | None:
    return next((wire for wire in WIRES if path.startswith(wire)), None)


def test_the_recipe_names_the_files_that_the_test_looks_at() -> None:
    page = (ROOT / "docs/contributing.md").read_text()
    recipe = page.partition("## How to add a field to the API")[2].partition("\n## ")[0]
    for path in STEPS:
        assert f"`{path}`" in recipe
    named = re.findall(r"`([\w/]+\.(?:py|proto))`", recipe)
    assert all((ROOT / path).is_file() for path in named), named


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_touches_at_most_nine_files(field: str) -> None:
    assert any(
        field in message.fields_by_name
        for message in (
            pb.GenerateRequest.DESCRIPTOR,
            *(each.message_type for each in pb.GenerateRequest.DESCRIPTOR.fields if each.message_type),
        )
    )
    files = naming(field)
    assert not set(STEPS) - files, "the recipe's steps"
    own = {path for path in files if wire_of(path) is None}
    assert len(own) <= MAX_FILES, sorted(own)
    for wire, most in WIRES.items():
        assert sum(path.startswith(wire) for path in files) <= most, wire
