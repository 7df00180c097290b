"""The engine's config classes: every setting is documented, and a wrong value is refused."""

from __future__ import annotations

import argparse
from dataclasses import fields

import pytest

from gpu_engine.api.config import EngineConfig, ServerConfig
from service_runtime.settings import Sources, add_flags, settings_of


@pytest.mark.parametrize("config_class", [EngineConfig, ServerConfig])
def test_every_field_has_a_text_and_a_kind(config_class: type[EngineConfig | ServerConfig]) -> None:
    settings = settings_of(config_class)
    assert [s.name for s in settings] == [f.name for f in fields(config_class) if f.name not in config_class.INTERNAL]
    for setting in settings:
        assert setting.help
        assert setting.default is None or type(setting.default) is setting.kind


@pytest.mark.parametrize("timeout_s", [0.0, 601.0])
def test_a_value_that_a_spawned_grammar_process_refuses_is_refused_by_the_engine(timeout_s: float) -> None:
    with pytest.raises(ValueError, match=r"compile_timeout_s: must be in \(0, 600\]"):
        ServerConfig(compile_timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("old", "services"),
    [
        ({"kserve": "true"}, "auto,kserve"),
        ({"vllm_wire": "on", "kv_events": "true"}, "vllm,kv_events"),
        ({"vllm_wire": "off", "kv_events": "true"}, ""),
        ({"kv_events": "false", "kserve": "false"}, "auto"),
    ],
)
def test_the_old_settings_of_services_are_read(old: dict[str, str], services: str) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, [ServerConfig])
    environ = {f"LOCKSTEP_{name.upper()}": value for name, value in old.items()}
    sources = Sources(parser.parse_args([]), environ, [ServerConfig])
    assert sources.fill(ServerConfig).services == services
    assert len(sources.warnings) == len(old)
