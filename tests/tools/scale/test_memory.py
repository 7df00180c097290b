"""The memory model against the tensors that the engine allocates, and against published sizes."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.engine_settings import SLOT_TOKENS
from gpu_engine.core.engine import Engine
from gpu_engine.core.executor import lookahead
from gpu_engine.model.embedded import EmbeddedModelMissing, weights_file
from gpu_engine.model.loader import load_model
from gpu_engine.step.buffers import LaneBuffers, SlotBuffers
from gpu_engine.step.device.graphs import lane_buckets
from gpu_engine.step.outputs.tensors import scratch_pages
from kernels.cuda.row_state import RowScratch, SlotRows
from kernels.kv_pages import KVHeads, KVPages
from tools.scale.__main__ import main
from tools.scale.memory import FORMATS, Serving
from tools.scale.shape import PRESETS, ModelShape, UnknownShape, load_shape

BOUND = 0.001
"""The weights of the embedded model are predicted to a thousandth."""


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name))


def bytes_of(value: Any) -> int:
    """Bytes of the distinct memory after the tensors of a dataclass."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(value) if t.numel()}
    return sum(found.values())


def serving(**settings: Any) -> Serving:
    return Serving(PRESETS["embedded"], FORMATS["q4-cpu"], EngineConfig(**{"device": "cpu", **settings}))


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "form"), [("auto", "q4-cpu"), ("int8", "int8-cpu"), ("none", "bfloat16-cpu")])
def test_the_weights_of_the_embedded_model_are_predicted(quantization: str, form: str) -> None:
    try:
        weights_file()
    except EmbeddedModelMissing as missing:
        pytest.skip(str(missing))
    dtype = "auto" if quantization == "auto" else "bfloat16"
    model = load_model(
        EngineConfig(device="cpu", quantization=quantization, dtype=dtype, num_threads=1, max_model_len=SLOT_TOKENS)
    )
    config = EngineConfig(device="cpu", max_batch_size=4, max_model_len=512, num_draft_tokens=3)
    one = Serving(PRESETS["embedded"], FORMATS[form], config)
    memory = Engine(config, replace(model, max_model_len=512)).stats().memory
    whole = Serving(PRESETS["embedded"], FORMATS[form], EngineConfig(device="cpu"))  # the tables are as long as loaded
    assert whole.weights() + whole.tables() == pytest.approx(memory.weight_bytes, rel=BOUND)
    assert memory.kv_cache_bytes == one.kv_cache()
    assert memory.buffer_bytes == one.slot_buffers() + one.lane_buffers()
    assert model.num_parameters == PRESETS["embedded"].num_weights


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_batch_size": 4, "max_model_len": 512, "page_size": 32},
        {"drafter": "none"},
        {"num_draft_tokens": 3, "jump_forward_tokens": 0, "overlap": True},
        {"kv_cache_tokens": 5000, "drafter": "model", "draft_model": "x"},
    ],
    ids=str,
)
def test_buffers_are_those_that_the_engine_allocates(settings: dict[str, Any]) -> None:
    one, vocab = serving(**settings), PRESETS["embedded"].vocab
    config = one.config
    S, R = config.max_batch_size, config.num_rows
    ahead = lookahead(config, config.max_inflight_steps)
    assert one.lookahead == ahead
    assert one.scratch_pages == scratch_pages(config.page_size)
    slots = SlotBuffers.allocate(S + 1, R, (config.max_model_len or SLOT_TOKENS) + ahead, config.page_size)
    assert one.slot_buffers() == bytes_of(slots)
    assert one.lane_buffers() == bytes_of(LaneBuffers.allocate(S, R, vocab))


def test_pages_and_sampling_on_a_device_are_those_that_the_engine_allocates() -> None:
    shape = ModelShape(
        name="tiny", num_layers=2, hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate=128, vocab=5000
    )
    one = Serving(shape, FORMATS["bfloat16"], EngineConfig(device="cuda", max_batch_size=8, max_model_len=128))
    pages = KVPages.allocate_layers(
        [KVHeads(2, 16)] * 2,
        one.num_pages + one.scratch_pages,
        16,
        torch.bfloat16,
        torch.device("cpu"),
        token_major=True,
    )
    assert one.kv_cache() == sum(layer.k.nbytes + layer.v.nbytes for layer in pages)
    done = torch.zeros(9, dtype=torch.bool)
    masks = torch.zeros(9, 1, 1, dtype=torch.int32)
    rows = SlotRows.allocate(9, 5000, masks, done, max_rules=512)
    scratch = RowScratch.allocate(one.step_rows, 5000, "cpu")
    assert one.sampling() == bytes_of(rows) - done.nbytes - masks.nbytes + bytes_of(scratch)


@pytest.mark.parametrize("largest", [1, 2, 16, 48, 200, 256])
def test_graphs_are_counted_by_the_buckets_of_the_engine(largest: int) -> None:
    config = EngineConfig(device="cuda", max_batch_size=largest, drafter="none")
    steps = 2 * len(lane_buckets(largest))
    assert Serving(PRESETS["llama-8b"], FORMATS["bfloat16"], config).num_graphs() == steps + min(
        64, len(config.prefill_shapes.every)
    )


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("embedded", 0.1345),
        ("llama-8b", 8.03),
        ("llama-70b", 70.55),
        ("mixtral-8x7b", 46.70),
        ("qwen3-30b-a3b", 30.53),
        ("qwen3-32b", 32.76),
    ],
)
def test_weights_are_those_that_the_models_publish(name: str, billions: float) -> None:
    assert PRESETS[name].num_weights / 1e9 == pytest.approx(billions, rel=1e-3)


def test_a_config_gives_the_shape_of_its_preset(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert dataclasses.replace(load_shape(str(tmp_path)), name="llama-8b") == PRESETS["llama-8b"]


@pytest.mark.parametrize(
    ("change", "named"), [({"kv_lora_rank": 512}, "kv_lora_rank"), ({"vocab_size": None}, "vocab_size")]
)
def test_a_config_that_is_not_understood_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    config = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 99,
    }
    with pytest.raises(UnknownShape, match=named):
        ModelShape.of({**config, **change})


def test_ranks_share_weights_and_kv_heads() -> None:
    config = EngineConfig(device="cuda")
    whole, half, many = (Serving(PRESETS["llama-70b"], FORMATS["bfloat16"], config, ranks) for ranks in (1, 2, 16))
    assert half.kv_token_bytes * 2 == whole.kv_token_bytes
    assert many.kv_token_bytes * 8 == whole.kv_token_bytes, "sixteen ranks hold each of eight KV heads twice"
    assert half.weights() == pytest.approx(whole.weights() / 2, rel=1e-3)
    assert many.weights() > whole.weights() / 16
    with pytest.raises(ValueError, match="tensor_parallel: 3 does not divide"):
        Serving(PRESETS["llama-70b"], FORMATS["bfloat16"], config, 3)


def test_tokens_that_fit_fill_the_memory() -> None:
    one = Serving(PRESETS["llama-8b"], FORMATS["bfloat16"], EngineConfig(device="cuda"))
    tokens = one.tokens_within(40e9)
    config = dataclasses.replace(one.config, kv_cache_tokens=tokens)
    filled = dataclasses.replace(one, config=config).device_bytes()
    spare = one.num_pages - one.config.max_batch_size * one.max_model_len // one.config.page_size
    assert 40e9 - one.page_bytes <= filled - spare * one.page_bytes <= 40e9
    assert one.tokens_within(1e9) == 0


def test_the_plan_of_engines_over_several_gpus_is_what_the_tool_computes(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (root / "docs/gpu.md").read_text()
    rows = re.findall(r"^\| (\d) x (H\d+) .* \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d,]+) \|$", page, re.M)
    assert len(rows) == 3
    for ranks, device, slots, *planned, tokens in rows:
        shape = ["--tp", ranks, "--device", device.lower(), "--max-batch", slots, "--max-model-len", "8192"]
        assert main(["memory", "--model", "llama-70b", "--drafts", "7", *shape]) == 0
        said = capsys.readouterr().out
        found = [
            re.search(rf"^\| {part} +\| ([\d,.]+)", said, re.M) for part in ("weights", "KV cache", "device in all")
        ]
        assert [f"{float(each[1].replace(',', '')) / 1e3:.1f}" for each in found if each is not None] == planned
        assert f"; {tokens} tokens fit into" in said
