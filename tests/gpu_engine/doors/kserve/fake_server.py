"""A server with KServe's service and without a model: a script or the test makes the tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.server import Parts, Server, open_server
from tests.fakes import FakeEngine, FakeModel, Script


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
    server_config = ServerConfig(
        **{"listen": "localhost:0", "grammar": "none", "services": "auto,kserve", "max_n": 4} | fields
    )
    engine_config = EngineConfig(max_model_len=256, served_model_name="fake, alias")
    async with open_server(engine_config, server_config, parts=fakes.parts()) as server:
        yield server
