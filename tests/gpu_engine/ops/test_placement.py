"""How the device and the number of threads are resolved for a machine."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.ops.core_split import CoreSplit
from gpu_engine.ops.placement import resolve_placement

NO_GRAMMAR = ServerConfig(grammar="none")


def resolved(
    cuda_devices: int = 0, cores: int = 2, server: ServerConfig | None = None, **fields: object
) -> EngineConfig:
    config = EngineConfig(**fields)  # type: ignore[arg-type]
    return resolve_placement(config, server or ServerConfig(), cuda_devices=cuda_devices, cores=cores)


def test_the_default_device_is_a_gpu_where_torch_sees_one_and_one_line_names_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    given: list[dict[str, Any]] = [
        {"cuda_devices": 1},
        {"cuda_devices": 0},
        {"cuda_devices": 1, "device": "cpu", "num_threads": 1},
        {"cuda_devices": 2, "device": "cuda:1"},
    ]
    assert [resolved(**fields).device for fields in given] == ["cuda", "cpu", "cpu", "cuda:1"]
    assert [line.getMessage() for line in caplog.records][:3] == [
        "device: cuda (torch sees 1 CUDA device)",
        "device: cpu (torch sees no CUDA devices), 2 threads on 2 usable cores",
        "device: cpu (as set), 1 threads on 2 usable cores",
    ]


@pytest.mark.parametrize(
    ("cores", "threads"), [(1, 1), (2, 2), (3, 3), (4, 3), (8, 7), (15, 14), (16, 14), (24, 21), (64, 61)]
)
def test_with_four_cores_and_more_the_default_leaves_some_to_the_grammar_process(cores: int, threads: int) -> None:
    assert resolved(cores=cores).num_threads == threads
    assert resolved(cores=cores, num_threads=cores).num_threads == cores, "set by hand"
    assert resolved(cores=cores, server=NO_GRAMMAR).num_threads == cores
    split = CoreSplit.of(resolved(cores=cores), frozenset(range(cores)), cores)
    assert (split is None) == (cores == threads), "the grammar process is confined to unused cores"
    assert split is None or len(split.rest) == cores - threads


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(2, 2, 1), (2, 3, 1), (16, 2, 7), (16, 4, 3)])
def test_ranks_share_the_cores(cores: int, ranks: int, threads: int) -> None:
    assert resolved(cores=cores, tensor_parallel_size=ranks).num_threads == threads


def test_settings_of_the_device_cannot_be_read_before_it_is_resolved() -> None:
    with pytest.raises(ValueError, match="device: auto must be resolved"):
        _ = EngineConfig().max_inflight_steps
    assert resolved(cuda_devices=1).max_inflight_steps == 1
    assert resolved(cuda_devices=1, overlap=False).max_inflight_steps == 0
    assert resolved().max_inflight_steps == 0
    for fields, problem in (
        ({"tensor_parallel_size": 2, "cuda_devices": 2}, "tensor_parallel_size: ranks run on a CPU"),
        ({"sync": "device_flag"}, "sync: device_flag needs a GPU; device is cpu"),
        ({"drafter": "decoupled", "draft_model": "m", "draft_device": "cuda:1"}, "draft_device: needs a GPU"),
    ):
        with pytest.raises(ValueError, match=problem):
            resolved(**fields)  # type: ignore[arg-type]
