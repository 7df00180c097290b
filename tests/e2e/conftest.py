"""A real server with the real model and a real grammar process, one per test module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest

from benchmarks.harness.server import EngineServer, ServerOptions


@dataclass(frozen=True, slots=True)
class RunningServer:
    """Where it listens, and the processes behind it."""

    address: str
    process: psutil.Process

    def grammar_process(self) -> psutil.Process:
        """Return the grammar process of now."""
        found = [child for child in self.process.children() if "grammar_service" in child.cmdline()]
        assert len(found) == 1, found
        return found[0]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    options = ServerOptions(dtype="auto", max_batch_size=8, extra=("--max-model-len", "512", "--max-queue-size", "64"))
    before = {child.pid for child in psutil.Process().children()}
    with EngineServer(options) as engine:
        (process,) = [child for child in psutil.Process().children() if child.pid not in before]
        yield RunningServer(engine.address, process)
