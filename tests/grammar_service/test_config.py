"""Settings from flags, environment and file."""

from __future__ import annotations

from pathlib import Path

import pytest

from grammar_service.config import GrammarConfig, read
from grammar_service.grammar.value import BOUNDS, Whitespace


def test_a_flag_beats_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    file = tmp_path / "sidecar.toml"
    file.write_text('[grammar]\ndir = "/from/file"\nbackend = "xgrammar"\ncompile_timeout_s = 3\nspin_us = 7\n')
    environment = {"LOCKSTEP_GRAMMAR_BACKEND": "llguidance", "LOCKSTEP_GRAMMAR_COMPILE_TIMEOUT_S": "4.5"}
    config, _ = read(["--config", str(file), "--compile-timeout-s", "9"], environment)
    assert config == GrammarConfig(dir="/from/file", backend="llguidance", compile_timeout_s=9.0, spin_us=7.0)
    assert read([], environment | {"LOCKSTEP_GRAMMAR_CONFIG": str(file)})[0].compile_timeout_s == 4.5


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ([], {}, "dir: is required"),
        (["--dir", "d", "--backend", "outlines"], {}, "backend: 'outlines' is not one of llguidance, xgrammar"),
        (["--dir", "d"], {"LOCKSTEP_GRAMMAR_COMPILE_WORKERS": "65"}, "compile_workers: must be in [0, 64]"),
        (["--dir", "d", "--thread", "3"], {}, "unrecognized arguments: --thread 3"),
    ],
)
def test_a_wrong_setting_is_named(
    arguments: list[str], environment: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values of other types and files are in tests/service_runtime/test_settings.py."""
    with pytest.raises(SystemExit) as caught:
        read(arguments, environment)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_threads_follow_the_machine_unless_they_are_set() -> None:
    assert GrammarConfig(dir="d", threads=5).fill_threads == 5
    assert 1 <= GrammarConfig(dir="d").fill_threads <= 8


@pytest.mark.parametrize(
    ("line", "bounds"),
    [
        ('json_bounds = "max_string_length=9, max_whitespace=0"', {"max_string_length": 9}),
        ("max_string_length = 9\nmax_array_items = 3", {"max_string_length": 9, "max_array_items": 3}),
        ("", {}),
    ],
)
def test_bounds_are_one_setting_that_has_the_old_names(line: str, bounds: dict[str, int], tmp_path: Path) -> None:
    file = tmp_path / "sidecar.toml"
    file.write_text(f'dir = "d"\n{line}\n')
    config, _ = read(["--config", str(file)], {})
    assert {name: value for name in BOUNDS if (value := getattr(config.reading, name))} == bounds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_strings=3", "'max_strings' is not one of max_string_length, "),
        ("max_number_digits=16", r"'max_number_digits=16': max_number_digits must be an integer in \[0, 15\]"),
        ("max_array_items=x", "max_array_items must be an integer"),
        ("max_array_items=1,max_array_items=2", "max_array_items is given twice"),
    ],
)
def test_wrong_bounds_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^json_bounds: .*{message}"):
        GrammarConfig(dir="d", json_bounds=text)


def test_the_layout_and_the_objects_of_requests_that_say_nothing() -> None:
    config, _ = read(["--dir", "d", "--whitespace", "bounded", "--closed-objects"], {})
    assert (config.default_whitespace, config.closed_objects) == (Whitespace.BOUNDED, True)
    plain = GrammarConfig(dir="d")
    assert (plain.default_whitespace, plain.closed_objects) == (Whitespace.SPACED, False)
    with pytest.raises(ValueError, match=r"^whitespace: 'dense' is not one of compact, bounded, any, spaced"):
        GrammarConfig(dir="d", whitespace="dense")


def test_a_cache_that_is_off_has_no_bytes() -> None:
    assert read(["--dir", "d", "--cache", "false"], {})[0].cache_bytes == 0
    assert read(["--dir", "d", "--cache"], {})[0].cache_bytes == 256 << 20
