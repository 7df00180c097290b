"""Whole servers whose engine is a fake."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.api.ports import GrammarPort
from gpu_engine.server import Parts, Server, open_server
from tests.fakes import FakeEngine, FakeModel, Script

ENGINE = EngineConfig(max_model_len=256, num_draft_tokens=3)


def parts(
    script: Script | None = None, engines: list[FakeEngine] | None = None, ports: list[GrammarPort] | None = None
) -> Parts:
    def build(
        config: EngineConfig, model: Any, channel: object, grammar: GrammarPort | None, **hooks: object
    ) -> FakeEngine:
        if ports is not None and grammar is not None:
            ports.append(grammar)
        engine = FakeEngine(config, script)
        if engines is not None:
            engines.append(engine)
        return engine

    return Parts(lambda config, progress: FakeModel(), build)


def config(tmp_path: Path, **fields: Any) -> ServerConfig:
    return ServerConfig(**{"listen": f"unix:{tmp_path}/s", "grammar": "none"} | fields)


@asynccontextmanager
async def serving(script: Script | None = None, **fields: Any) -> AsyncIterator[Server]:
    """Run a server on a port of this machine, or where `listen` says."""
    server_config = ServerConfig(**{"listen": "localhost:0", "grammar": "none"} | fields)
    async with open_server(ENGINE, server_config, parts=parts(script)) as server:
        yield server
