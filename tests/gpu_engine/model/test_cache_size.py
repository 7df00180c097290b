"""The length of sequences and the size of the KV cache, from the settings, the model and the free memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig

from gpu_engine.api.config import EngineConfig
from gpu_engine.model.cache_size import (
    CachedShape,
    StateSize,
    cache_places,
    decide,
    device_bytes,
    file_bytes,
    pool_tokens,
    refuse_wide_heads,
    snapshot_interval,
)
from gpu_engine.model.loaded_model import ModelNotSupported
from kernels.kv_pages import KVHeads
from tests.gpu_engine import tiny

TOKEN_BYTES = 1000


def sizes(positions: int, free_tokens: int | None, **settings: Any) -> tuple[int, int]:
    """Return (length, tokens of the cache) where its share of the free memory has room for `free_tokens`."""
    config = EngineConfig(**{"device": "cpu", **settings})
    free = None if free_tokens is None else int((2 if config.on_cpu else 1.25) * TOKEN_BYTES * free_tokens)
    size = decide(config, CachedShape(1, (KVHeads(1, 16),), positions), TOKEN_BYTES, free)
    return size.max_model_len, pool_tokens(config, size.max_model_len, size.room_tokens)


@pytest.mark.parametrize(
    ("positions", "free_tokens", "settings", "expected"),
    [
        # The model's own length; the cache has 2,048 tokens a slot, and at least one sequence.
        (8192, 10**6, {}, (8192, 16 * 2048)),
        (131_072, 10**6, {}, (131_072, 131_072)),
        (512, 10**6, {}, (512, 16 * 512)),
        (8192, None, {}, (8192, 16 * 2048)),
        # As far as the memory has room.
        (131_072, 50_000, {}, (50_000, 50_000)),
        (8192, 20_000, {}, (8192, 20_000)),
        (0, 20_000, {}, (20_000, 20_000)),
        # On a GPU attention sums longer ones in larger parts, and a draft model keeps tokens of this length a slot.
        (131_072, 10**6, {"device": "cuda"}, (16_384, 16 * 2048)),
        (131_072, 10**6, {"drafter": "decoupled", "draft_model": "m"}, (2048, 16 * 2048)),
        # A length that is set fills its slots where the memory has room.
        (131_072, 10**6, {"max_model_len": 4096}, (4096, 16 * 4096)),
        (131_072, 10_000, {"max_model_len": 4096}, (4096, 10_000)),
        (8192, 10**6, {"max_model_len": 9000}, (8192, 16 * 8192)),
        # A cache that is set bounds the length, and is never looked for in the memory.
        (131_072, 10, {"kv_cache_tokens": 5000}, (5000, 5000)),
        (131_072, 10, {"kv_cache_tokens": 5000, "max_model_len": 4096}, (4096, 5000)),
    ],
)
def test_the_length_and_the_cache(
    positions: int, free_tokens: int | None, settings: dict[str, Any], expected: tuple[int, int]
) -> None:
    assert sizes(positions, free_tokens, **settings) == expected


@pytest.mark.parametrize(
    ("shape", "places", "heads"),
    [
        (tiny.FAMILIES["gemma3"](), [0, 1], [(2, 32)] * 2),
        (tiny.deepseek_v3(), [0, 1], [(4, 32)] * 2),
        (tiny.gemma3n(), [0, 1, 0, 1], [(2, 32)] * 2),
        (tiny.gemma4(), [0, 1, 2], [(2, 32), (2, 32), (1, 64)]),
        (tiny.gemma4_small(), [0, 1, 2, 1, 2, 1], [(2, 32), (2, 64), (2, 32)]),
    ],
)
def test_layers_have_their_own_heads_in_the_cache_or_the_place_of_another_layer(
    shape: PreTrainedConfig, places: list[int], heads: list[tuple[int, int]]
) -> None:
    cached = CachedShape.of(shape)
    assert cache_places(shape) == dict(enumerate(places))
    assert (cached.num_layers, [each[:2] for each in cached.heads]) == (len(places), heads)
    assert cached.like_layers == (len(set(heads)) == 1 and len(heads) == len(places))
    assert cached.token_bytes(EngineConfig(device="cpu"), torch.bfloat16) == 4 * sum(
        count * width for count, width in heads
    )
    in_8_bits = cached.token_bytes(EngineConfig(device="cpu", kv_cache_dtype="int8"), torch.bfloat16)
    assert in_8_bits == 2 * sum(count * (width + 4) for count, width in heads), "a scale of 4 bytes for each head"


def test_heads_that_attention_does_not_take_are_refused_by_their_size() -> None:
    layers = [KVHeads(2, 256), KVHeads(1, 512)]
    refuse_wide_heads(layers, "cpu")
    refuse_wide_heads(layers[:1], "cuda")
    with pytest.raises(
        ModelNotSupported, match=r"^model: .* 512 channels, .* at most 256 on a GPU; serve it on a CPU$"
    ):
        refuse_wide_heads(layers, "cuda")
    with pytest.raises(ModelNotSupported, match=r"^model: it has heads of 592 channels, and .* at most 576$"):
        refuse_wide_heads([KVHeads(1, 592)], "cpu")


def test_recurrent_states_take_their_part_of_the_memory() -> None:
    config = EngineConfig(device="cpu", max_batch_size=3, num_draft_tokens=7, jump_forward_tokens=0)
    # Three places with a state and eight rows each; snapshots take a quarter of the cache's size.
    shape = CachedShape(1, (KVHeads(1, 16),), 0, StateSize(state=1000, pending=50))
    free = 3 * (1000 + 8 * 50) + 2 * TOKEN_BYTES * 1000
    assert decide(config, shape, TOKEN_BYTES, free).room_tokens == 1000 / 1.25
    assert decide(replace(config, prefix_cache=False), shape, TOKEN_BYTES, free).room_tokens == 1000
    with pytest.raises(ModelNotSupported, match=r"^max_batch_size: the recurrent states of 3 slots take 0\.00 GB"):
        decide(config, shape, TOKEN_BYTES, 8000)


@pytest.mark.parametrize(
    ("length", "snapshots", "interval"), [(4096, 1024, 256), (32_768, 64, 2048), (32_768, 4, 32_768), (300, 0, 1280)]
)
def test_the_longest_prompt_has_a_quarter_of_the_snapshots(length: int, snapshots: int, interval: int) -> None:
    assert snapshot_interval(length, snapshots, 256) == interval
    assert not snapshots or length / interval <= max(1, snapshots / 4)


def test_a_length_without_room_is_refused_with_both_numbers() -> None:
    with pytest.raises(ModelNotSupported, match=r"^max_model_len: 4096 tokens do not fit .* has room for 3000 "):
        sizes(8192, 3000, max_model_len=4096)
    with pytest.raises(ModelNotSupported, match=r"^max_model_len: 16 tokens do not fit .* has room for 9 "):
        sizes(8192, 9)
    with pytest.raises(ModelNotSupported, match="must be set"):
        sizes(0, None)


@pytest.mark.parametrize(
    ("quantization", "of_8_bits", "expected"), [("none", False, 96), ("fp8", False, 80), ("auto", True, 80)]
)
def test_a_quantised_matrix_takes_a_byte_a_weight_on_a_gpu(quantization: str, of_8_bits: bool, expected: int) -> None:
    net = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "lm_head": nn.Linear(4, 8, bias=False)})
    config = EngineConfig(device="cuda", quantization=quantization)
    assert device_bytes(config, net, torch.bfloat16, of_8_bits=of_8_bits) == expected


def test_files_are_counted_as_they_are_loaded(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors", "c.json"):
        (tmp_path / name).write_bytes(b"12345")
    assert file_bytes(tmp_path, torch.bfloat16) == 10
    assert file_bytes(tmp_path / "a.safetensors", torch.float32) == 10
