"""What an engine says of its memory is what its tensors take."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from gpu_engine.api.stats import MemoryUse
from gpu_engine.core.engine import Engine
from gpu_engine.model.cache_size import cache_dtype
from gpu_engine.model.loader import LoadedModel
from gpu_engine.ops.memory import memory_use, weight_bytes
from gpu_engine.step.outputs.tensors import scratch_pages
from kernels.kv_pages import bytes_of_token
from tests.gpu_engine.harness import config, running


@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_an_engine_reports_its_memory_when_it_starts(
    llama: LoadedModel, caplog: pytest.LogCaptureFixture, kv: str
) -> None:
    settings = config(kv_cache_dtype=kv)
    model = replace(llama, max_model_len=settings.max_model_len)
    with caplog.at_level(logging.INFO), running(Engine(settings, model)) as engine:
        stats = engine.stats()
    num_pages = stats.num_pages + scratch_pages(settings.page_size)
    page_bytes = bytes_of_token(model.kv_heads, cache_dtype(settings, model.dtype)) * settings.page_size
    assert (page_bytes < bytes_of_token(model.kv_heads, torch.bfloat16) * settings.page_size) == (kv == "int8")
    assert stats.memory.kv_cache_bytes == num_pages * page_bytes
    assert stats.memory.weight_bytes == weight_bytes(llama) >= 4 * llama.num_parameters
    assert stats.memory.buffer_bytes > settings.max_batch_size * settings.max_model_len * 4
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("memory: ")]
    assert lines == [f"memory: {stats.memory}"]


def test_shared_memory_counts_once_and_the_line_has_megabytes(llama: LoadedModel) -> None:
    whole = torch.zeros(100, dtype=torch.int32)
    assert str(MemoryUse(1_500_000, 2_000_000_000, 40_000)) == (
        "1.5 MB of weights, 2,000.0 MB of KV pages, 0.0 MB of buffers"
    )
    assert memory_use(llama, [], whole, whole[:10], torch.zeros(3)).buffer_bytes == 400 + 12
