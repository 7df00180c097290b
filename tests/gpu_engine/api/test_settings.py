"""One name, four places, one precedence; and nothing that is written down twice."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.api.settings import SettingsError, Sources, add_flags, settings_of


@dataclass(frozen=True, kw_only=True)
class Config:
    """A config."""

    name: str = "n"
    """What it is called: 100%."""
    count: int = 1
    """How many."""
    share: float = 0.5
    """How much."""
    quick: bool = False
    """Whether."""
    eager: bool | None = None
    """Whether, or as the device likes it."""


def resolve(arguments: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Config:
    parser = argparse.ArgumentParser()
    add_flags(parser, [Config])
    return Sources(parser.parse_args(arguments), environ or {}, [Config]).fill(Config)


def toml(tmp_path: Path, text: str) -> str:
    path = tmp_path / "c.toml"
    path.write_text(text)
    return str(path)


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = toml(tmp_path, "count = 2\nshare = 2\nname = 'file'")
    assert resolve() == Config()
    assert resolve(["--config", file]) == Config(count=2, share=2.0, name="file")
    environ = {"LOCKSTEP_CONFIG": file, "LOCKSTEP_COUNT": "3", "LOCKSTEP_NAME": "env"}
    assert resolve([], environ) == Config(count=3, share=2.0, name="env")
    assert resolve(["--count", "4"], environ) == Config(count=4, share=2.0, name="env")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cuont = 1", "unknown setting 'cuont'"),
        ("count = '1'", "count: '1' is not an integer"),
        ("count = true", "count: True is not an integer"),
        ("count = 1.5", "count: 1.5 is not an integer"),
        ("quick = 1", "quick: 1 is not true or false"),
        ("share = 'x'", "share: 'x' is not a number"),
        ("[engine]\ncount = 1", "unknown setting 'engine'"),
        ("count =", "c.toml: "),
    ],
)
def test_a_bad_file_is_refused_with_its_name(tmp_path: Path, text: str, message: str) -> None:
    file = toml(tmp_path, text)
    with pytest.raises(SettingsError) as caught:
        resolve(["--config", file])
    assert message in str(caught.value)
    assert file in str(caught.value)


def test_a_bad_value_is_refused_with_its_place() -> None:
    with pytest.raises(SettingsError, match="--count: 'x' is not an integer"):
        resolve(["--count", "x"])
    with pytest.raises(SettingsError, match="--quick: 'maybe' is not true or false"):
        resolve(["--quick", "maybe"])
    with pytest.raises(SettingsError, match="LOCKSTEP_SHARE: 'x' is not a number"):
        resolve([], {"LOCKSTEP_SHARE": "x"})


def test_a_switch_is_spelled_out(tmp_path: Path) -> None:
    assert resolve(["--quick", "true"]).quick
    assert resolve([], {"LOCKSTEP_QUICK": "1"}).quick
    assert not resolve(["--quick", "off"], {"LOCKSTEP_QUICK": "1"}).quick
    assert resolve(["--config", toml(tmp_path, "quick = true")]).quick


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"nowhere\.toml: No such file"):
        resolve(["--config", "nowhere.toml"])


@pytest.mark.parametrize("config_class", [EngineConfig, ServerConfig])
def test_every_field_has_a_text_and_a_kind(config_class: type[EngineConfig | ServerConfig]) -> None:
    settings = settings_of(config_class)
    assert [setting.name for setting in settings] == [field.name for field in fields(config_class)]
    for setting in settings:
        assert setting.help
        assert setting.default is None or type(setting.default) is setting.kind


def test_help_shows_default_and_variable() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, [Config])
    text = " ".join(parser.format_help().split())
    assert "What it is called: 100%. (default: n; env: LOCKSTEP_NAME)" in text
    assert "as the device likes it. (default: unset; env: LOCKSTEP_EAGER)" in text


@pytest.mark.parametrize("timeout_s", [0.0, 601.0])
def test_what_a_spawned_sidecar_would_refuse_is_refused_here(timeout_s: float) -> None:
    with pytest.raises(ValueError, match=r"compile_timeout_s: must be in \(0, 600\]"):
        ServerConfig(compile_timeout_s=timeout_s)
