"""Exchanges of the draft model while requests run."""

from __future__ import annotations

import threading

from gpu_engine.api.errors import LockstepError
from gpu_engine.core.engine import Engine
from tests.gpu_engine.harness import (
    until_false,
)


def exchanging(engine: Engine, path: str) -> tuple[threading.Thread, list[object]]:
    """Start an exchange, and wait until the engine's thread, which is held, is asked to take the model over."""
    results: list[object] = []

    def exchange() -> None:
        try:
            results.append(engine.draft_models.exchange(path))
        except LockstepError as error:
            results.append(error)

    thread = threading.Thread(target=exchange)
    thread.start()
    until_false(lambda: engine._inbox.empty() and thread.is_alive())
    return thread, results
