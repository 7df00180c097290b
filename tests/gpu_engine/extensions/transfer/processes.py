"""Engines with tiny models as real processes, which start in a second: they fork from a process that has torch.

Invariant: a process that a test started is gone when the test ends. Not responsible for: what is asked of them.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpu_engine.api.config import EngineConfig, ServerConfig

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["gpu_engine.core.engine", "gpu_engine.model.loader", "gpu_engine.server"])


def _serve(engine: EngineConfig, server: ServerConfig, log_path: str) -> None:
    logging.basicConfig(filename=log_path, level=logging.INFO, format="%(asctime)s %(message)s")
    from gpu_engine.server import serve

    asyncio.run(serve(engine, server, None, lambda started: None))


@contextmanager
def server_process(engine: EngineConfig, server: ServerConfig, log_path: str) -> Iterator[Any]:
    """Start a server; kill it at the end."""
    process = _CONTEXT.Process(target=_serve, args=(engine, server, log_path), daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join(20)
