"""A server with KServe's service and without a model: a script or the test makes the tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.server import Server, open_server
from tests.fakes import FakeEngine, Script
from tests.gpu_engine.fake_servers import parts


@dataclass
class Fakes:
    """A script that answers every request, or without one the test calls `emit`; and the engine of the server."""

    script: Script | None = None
    engines: list[FakeEngine] = field(default_factory=list)

    @property
    def engine(self) -> FakeEngine:
        return self.engines[-1]


@asynccontextmanager
async def serving(fakes: Fakes, **fields: Any) -> AsyncIterator[Server]:
    """Run a server with KServe's service, and a model named "fake"."""
    own = {"listen": "localhost:0", "grammar": "none", "services": "auto,kserve", "max_n": 4}
    engine_config = EngineConfig(max_model_len=256, served_model_name="fake, alias")
    made = parts(fakes.script, fakes.engines)
    async with open_server(engine_config, ServerConfig(**own | fields), parts=made) as server:
        yield server
