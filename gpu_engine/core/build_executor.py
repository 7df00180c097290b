"""Chooses the executor by the model's device.

Invariant: device_executor.py is imported only for a CUDA device, since it imports Triton, which an installation for
a CPU lacks. Not responsible for: building an executor (see executor.py and device_executor.py).
"""

from __future__ import annotations

from typing import Protocol

from gpu_engine.api.config import EngineConfig
from gpu_engine.core.cpu_executor import cpu_executor
from gpu_engine.core.executor import Executor
from gpu_engine.model.loader import LoadedModel
from shared_mem.channel import EngineEnd


class BuildExecutor(Protocol):
    """How an engine gets its executor; a test passes another function."""

    def __call__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        channel: EngineEnd | None,
        num_pages: int,
        max_inflight_steps: int,
    ) -> Executor:
        """Allocate everything for `num_pages` KV pages and `max_inflight_steps` steps in flight.

        `channel` is the engine's end of the shared segment; None without a grammar process.
        """


def build_executor(
    config: EngineConfig, model: LoadedModel, channel: EngineEnd | None, num_pages: int, max_inflight_steps: int
) -> Executor:
    """Return the executor of `config.device`."""
    if model.device.type == "cpu":
        return cpu_executor(config, model, channel, num_pages, max_inflight_steps)
    from gpu_engine.core.device_executor import cuda_executor  # imports Triton, which a CPU installation lacks

    return cuda_executor(config, model, channel, num_pages, max_inflight_steps)
