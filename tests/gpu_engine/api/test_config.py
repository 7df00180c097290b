"""The engine's config classes: every setting is documented, and a wrong value is refused."""

from __future__ import annotations

from dataclasses import fields

import pytest

from gpu_engine.api.config import EngineConfig, ServerConfig
from service_runtime.settings import settings_of


@pytest.mark.parametrize("config_class", [EngineConfig, ServerConfig])
def test_every_field_has_a_text_and_a_kind(config_class: type[EngineConfig | ServerConfig]) -> None:
    settings = settings_of(config_class)
    assert [setting.name for setting in settings] == [field.name for field in fields(config_class)]
    for setting in settings:
        assert setting.help
        assert setting.default is None or type(setting.default) is setting.kind


@pytest.mark.parametrize("timeout_s", [0.0, 601.0])
def test_a_value_that_a_spawned_grammar_process_refuses_is_refused_by_the_engine(timeout_s: float) -> None:
    with pytest.raises(ValueError, match=r"compile_timeout_s: must be in \(0, 600\]"):
        ServerConfig(compile_timeout_s=timeout_s)
