"""Every refused combination of settings is refused by its own row, and the page lists it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpu_engine.api.capabilities import (
    OF_ENGINE,
    OF_FILES,
    OF_RECURRENT,
    OF_SERVER,
    LoadedFiles,
    Refusal,
    Start,
    refuse,
)
from gpu_engine.api.config import EngineConfig
from tools.capabilities import PAGE, message, refusals, start_with, with_table


@pytest.mark.parametrize("refusal", list(refusals()), ids=lambda refusal: f"{refusal.setting}: {refusal.reason}")
def test_a_row_refuses_its_example_and_no_start_without_settings(refusal: Refusal[Any]) -> None:
    before = refusal.reason.partition("{")[0]
    assert message(refusal.example).startswith(f"{refusal.setting}: {before}")
    start = start_with({})
    given: object = start.engine if refusal in OF_ENGINE else start.server if refusal in OF_SERVER else start
    assert isinstance(given, Start) == (refusal not in (*OF_ENGINE, *OF_SERVER))
    assert not refusal.when(given)


def test_the_page_has_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_table(text) == text, "run python -m tools.capabilities --write"


@pytest.mark.parametrize("refusal", OF_RECURRENT, ids=lambda refusal: refusal.setting)
def test_recurrent_layers_refuse_each_setting_of_their_table(refusal: Refusal[LoadedFiles]) -> None:
    given = LoadedFiles(start_with(refusal.example).engine, model_type="lfm2")
    assert [row for row in OF_RECURRENT if row.when(given)] == [refusal]
    assert "lfm2" in refusal.message(given)
    assert not refusal.when(LoadedFiles(start_with({}).engine))


@pytest.mark.parametrize(
    ("facts", "settings", "refused"),
    [
        ({"file": "m.gguf", "exact_file": False}, {"quantization": "auto"}, "tensor_parallel_size: .*m.gguf"),
        ({"file": "m.gguf", "exact_file": False}, {"quantization": "int8"}, ""),
        ({"file": "gptq", "exact_file": True}, {"quantization": "int8"}, "tensor_parallel_size: .*gptq"),
        ({"file": "gptq", "exact_file": True}, {"quantization": "none"}, ""),
        ({"like_layers": False}, {"tensor_parallel_size": 2}, "tensor_parallel_size: .* whose layers differ"),
        ({"like_layers": False}, {}, ""),
        ({"head": "h", "block_size": 8}, {"num_draft_tokens": 7}, ""),
        ({"head": "h", "block_size": 8}, {"num_draft_tokens": 8}, "num_draft_tokens: 8 drafts .* of h"),
        ({"head": "h", "block_size": 8, "embeds_rows": False, "model_type": "x"}, {}, "drafter: .* embedding of x"),
    ],
)
def test_what_files_decide(facts: dict[str, Any], settings: dict[str, Any], refused: str) -> None:
    given = replace(LoadedFiles(EngineConfig(**settings)), **facts)
    if not refused:
        refuse(OF_FILES, given)
        return
    with pytest.raises(ValueError, match=refused):
        refuse(OF_FILES, given)
