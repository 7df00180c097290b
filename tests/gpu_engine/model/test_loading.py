"""Models that several threads load at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

from transformers import PreTrainedModel

from gpu_engine.model.loader import LoadedModel, load_model
from tests.gpu_engine.harness import config

THREADS = 3


def test_threads_that_load_at_once_leave_transformers_as_it_was(saved: Callable[[str], Path]) -> None:
    settings = config(model=str(saved("qwen2")), dtype="float32")  # with tied weights
    before, barrier = PreTrainedModel.tie_weights, Barrier(THREADS)

    def load(_: int) -> LoadedModel:
        barrier.wait(30)
        return load_model(settings)

    try:
        for _ in range(4):
            with ThreadPoolExecutor(THREADS) as pool:
                models = list(pool.map(load, range(THREADS)))
            assert len({model.num_parameters for model in models}) == 1
            assert PreTrainedModel.tie_weights is before
    finally:
        PreTrainedModel.tie_weights = before
