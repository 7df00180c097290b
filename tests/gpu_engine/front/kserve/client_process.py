"""A process of its own for `tritonclient`: its messages have the names of the server's, and a process has one of both.

Invariant: this module imports neither, so that both processes can; an error of a call ends that call alone.
Not responsible for: the calls (see triton_calls.py), servers without a model (see fake_server.py).
"""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_CALLS = "tests.gpu_engine.front.kserve.triton_calls"


class CallFailed(RuntimeError):
    """A call of the other process raised an error; the message has its class and its text."""


def _call(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    try:
        return getattr(importlib.import_module(_CALLS), name)(*arguments, **options)
    except Exception as error:
        # InferenceServerException cannot be unpickled: as a result it would break the pool for all later calls.
        raise CallFailed(f"{name}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class TritonProcess:
    """Runs functions of triton_calls.py in the other process."""

    pool: ProcessPoolExecutor

    async def __call__(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Run a function by its name; arguments and results are plain values. Raises CallFailed."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, _call, name, arguments, options)


@contextmanager
def triton_process() -> Iterator[TritonProcess]:
    """Run the other process for the time of the block."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield TritonProcess(pool)
