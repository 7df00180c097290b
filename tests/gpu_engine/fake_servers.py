"""Whole servers whose engine is a fake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.api.ports import GrammarPort
from gpu_engine.server import Parts
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
