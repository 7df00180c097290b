"""Forwards with rows of prompts next to those of a batch: the bits of logits and pages are those of each alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpu_engine.drafters.nets import ModelNet
from gpu_engine.model.attention import AttentionContext, PromptRows
from gpu_engine.model.loader import load_model
from gpu_engine.step.buffers import SlotBuffers
from gpu_engine.step.prompt_rows import chunks_of
from kernels.blocks import can_multiply_blocks
from tests.gpu_engine.harness import config
from tests.gpu_engine.model.model_logits import context, some_ids

Saved = Callable[[str], Path]
needs_avx2 = pytest.mark.skipif(not can_multiply_blocks(), reason="products over blocks need AVX2")


@torch.inference_mode()
@pytest.mark.parametrize(
    ("family", "dtype", "quantization"),
    [
        pytest.param("llama", "bfloat16", "q4", marks=needs_avx2),
        pytest.param("gemma2", "bfloat16", "q4", marks=needs_avx2),
        pytest.param("gemma4", "bfloat16", "q4", marks=needs_avx2),
        pytest.param("gemma4 small", "bfloat16", "q4", marks=needs_avx2),
        pytest.param("qwen3_moe", "bfloat16", "q4", marks=needs_avx2),
        ("llama", "bfloat16", "none"),
        ("llama", "float32", "none"),
        ("ministral3", "float32", "none"),
        ("gemma2", "bfloat16", "none"),
        ("gemma4 small", "bfloat16", "none"),
        ("qwen3", "float32", "none"),
        ("qwen3_moe", "float32", "none"),
        ("qwen3_moe", "bfloat16", "none"),
    ],
)
@pytest.mark.parametrize(("threads", "decoding", "prompt"), [(1, 1, 7), (2, 3, 50), (2, 12, 50), (2, 40, 50)])
def test_prompts_beside_other_rows_change_neither_logits_nor_pages(
    saved: Saved, family: str, dtype: str, quantization: str, threads: int, decoding: int, prompt: int
) -> None:
    """The batch goes on after the first prompt, which is in the same forward. After the last layer's keys and values
    only rows with logits go on in the native forward: few by outputs, many by rows."""
    model = load_model(config(model=str(saved(family)), dtype=dtype, quantization=quantization))
    assert model.takes_prompts
    ids_BP, before = some_ids(5, 50), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = context(model, 5, 50)
        want_BPV = model.logits(ids_BP, alone).view(5, 50, -1).clone()
        mixed = context(model, 5, 50)
        table, positions_BP = mixed.page_table_BN, mixed.positions_BP
        lanes = [(0, slice(10, 10 + decoding)), (1, slice(decoding)), (2, slice(decoding))]
        prompts = [(0, slice(10)), (3, slice(prompt)), (4, slice(prompt))]
        batch = [torch.stack([part[b, at] for b, at in lanes]) for part in (ids_BP, positions_BP)]
        further = [torch.cat([part[b, at] for b, at in prompts]) for part in (ids_BP, positions_BP)]
        rows = PromptRows(*further, (10, prompt, prompt), table[[0, 3, 4]])
        got_NV = model.logits(batch[0], AttentionContext(mixed.pages, table[:3].contiguous(), batch[1], prompts=rows))
        assert got_NV.shape[0] == 3 * decoding
        for got_PV, (b, at) in zip(got_NV.view(3, decoding, -1), lanes, strict=True):
            assert torch.equal(got_PV, want_BPV[b, at]), b
        for page, want in zip(mixed.pages, alone.pages, strict=True):
            for sequence, tokens in enumerate((10 + decoding, decoding, decoding, prompt, prompt)):
                for place, first in zip(table[sequence].tolist(), range(0, tokens, 16), strict=False):
                    count = min(tokens - first, 16)
                    assert torch.equal(page.k[place, :, :, :count], want.k[place, :, :, :count])
                    assert torch.equal(page.v[place, :, :count], want.v[place, :, :count])
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_one_row_beside_a_prompt_and_prompts_by_themselves(saved: Saved, dtype: str) -> None:
    """A model computes a single row as two."""
    model = load_model(config(model=str(saved("llama")), dtype=dtype, quantization="none"))
    ids_BP, alone, mixed = some_ids(2, 30), context(model, 2, 30), context(model, 2, 30)
    want_BPV = model.logits(ids_BP, alone).view(2, 30, -1)
    table, positions_BP = mixed.page_table_BN, mixed.positions_BP
    whole = PromptRows(ids_BP[1], positions_BP[1], (30,), table[1:])
    nothing = AttentionContext(mixed.pages, table[:0], positions_BP[:0, :1], prompts=whole)
    model.prefill(ids_BP[:0, :1], nothing)
    before = PromptRows(ids_BP[0, :29], positions_BP[0, :29], (29,), table[:1])
    one = AttentionContext(mixed.pages, table[:1], positions_BP[:1, 29:].contiguous(), prompts=before)
    assert torch.equal(model.logits(ids_BP[:1, 29:], one), want_BPV[0, 29:])
    again = AttentionContext(mixed.pages, table[1:], positions_BP[1:, 29:].contiguous())
    assert torch.equal(model.logits(ids_BP[1:, 29:], again), want_BPV[1, 29:])


@torch.inference_mode()
def test_a_draft_model_computes_no_padding_of_chunks_of_several_lengths(saved: Saved) -> None:
    model = load_model(config(model=str(saved("llama")), quantization="none"))
    rows: list[int] = []
    model.net.get_input_embeddings().register_forward_hook(lambda _, args, out: rows.append(args[0].numel()))
    slot = SlotBuffers.allocate(3, 1, 64, 16)
    slot.page_table_SN[:2] = torch.arange(10, dtype=torch.int32).view(2, 5)
    ModelNet(model, model.allocate_pages(10, 16), 1).prefill(chunks_of(slot, [(0, 0, 40), (1, 0, 3)]), {})
    assert rows == [48], "of 43 tokens, and 80 with padding"
