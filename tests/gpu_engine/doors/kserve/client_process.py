"""A process of its own for `tritonclient`: its messages have the names of the server's, and a process has one of both.

Invariant: this module imports neither, so that both processes can. An error of a call ends only that call.

Not responsible for: the calls (see triton_calls.py), servers without a model (see fake_server.py).
"""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

_CALLS = "tests.gpu_engine.doors.kserve.triton_calls"
_LONGEST_CALL_S = 120.0
"""Longer than every timeout within a call."""


class CallFailed(RuntimeError):
    """A call of the other process raised an error, whose class and text the message has, or it did not end."""


def _answer_calls(connection: Connection) -> None:
    while True:
        name, arguments, options = connection.recv()
        try:
            answer = getattr(importlib.import_module(_CALLS), name)(*arguments, **options), None
        except Exception as error:
            # As text: InferenceServerException can be pickled, but not unpickled.
            answer = None, f"{type(error).__name__}: {error}"
        connection.send(answer)


class TritonProcess:
    """Runs functions of triton_calls.py in the other process, one at a time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    async def __call__(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Run a function by its name; arguments and results are plain values. Raises CallFailed."""
        return await asyncio.to_thread(self._call, name, arguments, options)

    def _call(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        with self._lock:
            self._connection.send((name, arguments, options))
            if not self._connection.poll(_LONGEST_CALL_S):
                self._connection.close()  # a later call fails at once, and gets no answer of this one
                raise CallFailed(f"{name}: no answer after {_LONGEST_CALL_S:.0f} s")
            result, error = self._connection.recv()
        if error is not None:
            raise CallFailed(f"{name}: {error}")
        return result


@contextmanager
def triton_process() -> Iterator[TritonProcess]:
    """Run the other process for the time of the block. It is killed at the end: it holds nothing that could be lost."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer_calls, args=(theirs,), name="tritonclient", daemon=True)
    process.start()
    theirs.close()
    try:
        yield TritonProcess(ours)
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()
