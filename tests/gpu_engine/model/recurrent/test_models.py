"""Whole hybrid models: the logits of a token have the same bits however its sequence is cut into forwards."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.loader import LoadedModel, load_model
from gpu_engine.model.states import SequenceStates
from tests.fakes import byte_tokenizer
from tests.gpu_engine.harness import config
from tests.gpu_engine.model.model_logits import some_ids
from tests.gpu_engine.model.recurrent.families import HYBRIDS, tiny

TOKENS, ROWS = 96, 8


@torch.inference_mode()
def logits_in_parts(model: LoadedModel, ids_1N: torch.Tensor, parts: list[int]) -> torch.Tensor:
    """Return [N, V]. A part of at most ROWS tokens is a verification, all drafts of which the next part accepts."""
    pages, table = model.allocate_pages(TOKENS // 16, 16), torch.arange(TOKENS // 16, dtype=torch.int32)[None]
    states, start, found = SequenceStates(model.recurrent, num_slots=1, max_rows=ROWS), 0, []
    for count in parts:
        ctx = AttentionContext(pages, table, torch.arange(start, start + count, dtype=torch.int32)[None])
        ctx.recurrent = states.forward_of([0], [start], [count], [1 if count <= ROWS else count])
        found.append(model.logits(ids_1N[:, start : start + count], ctx).clone())
        start += count
    return torch.cat(found)


@pytest.mark.slow
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_token_has_the_same_bits_however_its_sequence_is_cut(tmp_path: Path, family: str) -> None:
    """In float32, where rounding to 16 bits hides no difference, and with three threads, whose shares of a tensor are
    no whole vectors."""
    tiny(family).save_pretrained(tmp_path)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token="<|end|>", bos_token="<|start|>")
    tokenizer.save_pretrained(tmp_path)
    before = torch.get_num_threads()
    try:
        model = load_model(config(model=str(tmp_path), dtype="float32", num_threads=3))
        ids_1N, draw = some_ids(1, TOKENS), random.Random(7)
        want_NV = logits_in_parts(model, ids_1N, [TOKENS])
        for _ in range(3):
            parts: list[int] = []
            while (left := TOKENS - sum(parts)) > 0:
                parts.append(min(left, draw.choice([1, 2, 5, 8, 21, 40])))
            assert torch.equal(logits_in_parts(model, ids_1N, parts), want_NV), parts
    finally:
        torch.set_num_threads(before)
