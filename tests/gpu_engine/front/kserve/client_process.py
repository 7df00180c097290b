"""A process of its own for `tritonclient`: its messages have the names of the server's, and a process has one of both.

Invariant: this module imports neither, so that both processes can.
"""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.server import Parts, Server, open_server
from tests.fakes import FakeEngine, FakeModel, Script

_CALLS = "tests.gpu_engine.front.kserve.triton_calls"


def _call(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return getattr(importlib.import_module(_CALLS), name)(*arguments, **options)


@dataclass(frozen=True)
class TritonProcess:
    """Runs functions of triton_calls.py in the other process."""

    pool: ProcessPoolExecutor

    async def __call__(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Run a function by its name; arguments and results are plain values."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, _call, name, arguments, options)


@contextmanager
def triton_process() -> Iterator[TritonProcess]:
    """Run the other process for the time of the block."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield TritonProcess(pool)


@dataclass
class Fakes:
    """The parts of a server without a model. A script answers every request; without one the test calls `emit`."""

    script: Script | None = None
    engines: list[FakeEngine] = field(default_factory=list)

    def parts(self) -> Parts:
        def build(config: EngineConfig, *rest: Any) -> FakeEngine:
            self.engines.append(FakeEngine(config, self.script))
            return self.engines[-1]

        return Parts(lambda config, progress: FakeModel(), build)

    @property
    def engine(self) -> FakeEngine:
        """The engine of the server."""
        return self.engines[-1]


@asynccontextmanager
async def serving(fakes: Fakes, **fields: Any) -> AsyncIterator[Server]:
    """Run a server with KServe's service, and a model named "fake"."""
    server_config = ServerConfig(**{"listen": "localhost:0", "grammar": "none", "kserve": True, "max_n": 4} | fields)
    engine_config = EngineConfig(max_model_len=256, served_model_name="fake, alias")
    async with open_server(engine_config, server_config, parts=fakes.parts()) as server:
        yield server
