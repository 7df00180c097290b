"""A start on a device says what of it no GPU has run, as the table of docs/gpu.md has it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_engine.core.never_ran import EVERY_START, NEVER_RAN, say_what_never_ran
from tests.gpu_engine.harness import config

SETTINGS: tuple[dict[str, Any], ...] = (
    {"drafter": "eagle3", "draft_model": "m"},
    {"drafter": "mtp"},
    {"drafter": "ngram", "draft_tree": "on"},
    {"drafter": "decoupled", "draft_model": "m", "draft_device": "cuda:1"},
    {"logits_processors": ("a=b:c",)},
    {},
    {"role": "decode"},
)
"""Each uses the part of the same place; none for hybrids, which the model decides."""


def test_each_part_is_a_row_that_says_never_and_a_setting_uses_it(root: Path) -> None:
    lines = (root / "docs/gpu.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    never = [cells[0] for cells in rows if cells[-1].startswith("never")]
    names = [*EVERY_START, *(part.name for part in NEVER_RAN)]
    assert [name for name in names if not any(row.startswith(name) for row in never)] == []
    for part, fields in zip(NEVER_RAN, SETTINGS, strict=True):
        made = config(device="cuda", num_draft_tokens=3, **fields)
        recurrent = part.name == "hybrids"
        assert [other.name for other in NEVER_RAN if other.uses(made, recurrent)] == [part.name]
    plain = config(device="cuda", drafter="ngram", num_draft_tokens=7)
    assert not any(part.uses(plain, False) for part in NEVER_RAN)


@pytest.mark.parametrize(("triton", "ran"), [("3.6.0", True), ("3.7.1", False)])
def test_one_line_names_the_parts(triton: str, ran: bool, caplog: pytest.LogCaptureFixture) -> None:
    cpu = torch.device("cpu")  # whose capability nothing asks for
    with caplog.at_level(logging.WARNING):
        say_what_never_ran(config(), cpu, triton, recurrent=False)
        (record,) = caplog.records
        assert "so far: attention in parts of a head" in record.getMessage()
        assert "hybrids" not in record.getMessage()
        caplog.clear()
        say_what_never_ran(config(device="cuda", **SETTINGS[3], num_draft_tokens=3), cpu, triton, recurrent=True)
    (record,) = caplog.records
    assert "draft_device, hybrids" in record.getMessage()
    assert ("Triton 3.7.1" in record.getMessage()) != ran
