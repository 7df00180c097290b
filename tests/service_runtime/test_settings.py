"""One name per setting, four places with one precedence, and old names that still work."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from service_runtime.settings import Merged, SettingsError, Sources, add_flags


def share_of_old(old: Mapping[str, Any]) -> float:
    return 1.0 if old.get("whole") else old["halves"] / 2


@dataclass(frozen=True, kw_only=True)
class Config:
    """A config."""

    RENAMED: ClassVar = {"number": "count"}
    MERGED: ClassVar = (Merged("share", {"halves": int, "whole": bool}, share_of_old),)
    DROPPED: ClassVar = {"luck": "nothing replaces it"}
    HIDDEN: ClassVar = frozenset({"eager"})
    INTERNAL: ClassVar = frozenset({"patience"})

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
    parts: tuple[str, ...] = ()
    """Which."""
    patience: int = 3
    """No setting."""


def resolve_with_warnings(
    arguments: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> tuple[Config, list[str]]:
    parser = argparse.ArgumentParser()
    add_flags(parser, [Config])
    sources = Sources(parser.parse_args(arguments), environ or {}, [Config])
    return sources.fill(Config), sources.warnings


def resolve(arguments: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Config:
    return resolve_with_warnings(arguments, environ)[0]


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
        ("cuont = 1", "unknown setting 'cuont'; did you mean 'count'?"),
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


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        (["--count", "x"], {}, "--count: 'x' is not an integer"),
        (["--quick", "maybe"], {}, "--quick: 'maybe' is not true or false"),
        ([], {"LOCKSTEP_SHARE": "x"}, "LOCKSTEP_SHARE: 'x' is not a number"),
        (["--config", "nowhere.toml"], {}, r"nowhere\.toml: No such file"),
        # Of a merged setting.
        (
            ["--share", "0.1"],
            {"LOCKSTEP_HALVES": "1"},
            r"^LOCKSTEP_HALVES: halves is part of share now, which is given as",
        ),
        (["--halves", "x"], {}, r"^--halves: 'x' is not an integer$"),
    ],
)
def test_a_bad_value_is_refused_with_its_place(arguments: list[str], environ: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        resolve(arguments, environ)


def test_a_switch_stands_alone_or_is_spelled_out(tmp_path: Path) -> None:
    assert resolve(["--quick"]).quick
    assert resolve(["--quick", "--eager", "--count", "3"]) == Config(quick=True, eager=True, count=3)
    assert resolve(["--quick", "true"]).quick
    assert resolve([], {"LOCKSTEP_QUICK": "1"}).quick
    assert not resolve(["--quick", "off"], {"LOCKSTEP_QUICK": "1"}).quick
    assert resolve(["--config", toml(tmp_path, "quick = true")]).quick


def test_a_list_has_a_flag_for_each_value(tmp_path: Path) -> None:
    assert resolve(["--part", "a=1", "--part", "b\nc"]).parts == ("a=1", "b\nc")
    assert resolve([], {"LOCKSTEP_PARTS": "a\nb, c"}).parts == ("a", "b, c")
    assert resolve(["--config", toml(tmp_path, "parts = ['a', 'b']")]).parts == ("a", "b")
    for wrong in ("'a'", "[1]"):
        with pytest.raises(SettingsError, match=r"parts: .* is not a list of strings"):
            resolve(["--config", toml(tmp_path, f"parts = {wrong}")])


def test_help_shows_default_and_variable() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, [Config])
    text = " ".join(parser.format_help().split())
    assert "What it is called: 100%. (default: n; env: LOCKSTEP_NAME)" in text
    assert "Which. (default: none; env: LOCKSTEP_PARTS)" in text
    for absent in ("--eager", "--number", "--halves", "--luck", "--patience"):
        assert absent not in text


def test_a_renamed_setting_is_read_under_its_old_name_with_one_warning(tmp_path: Path) -> None:
    file = toml(tmp_path, "number = 2")
    for arguments, environ, place in (
        (["--number", "2"], {}, "--number"),
        ([], {"LOCKSTEP_NUMBER": "2"}, "LOCKSTEP_NUMBER"),
        (["--config", file], {}, f"{file}: number"),
    ):
        config, warnings = resolve_with_warnings(arguments, environ)
        assert config == Config(count=2)
        (warning,) = warnings
        assert warning.startswith(f"{place}: number is now called count;")
    assert resolve_with_warnings(["--count", "2"]) == (Config(count=2), [])


def test_a_setting_under_both_names_is_refused(tmp_path: Path) -> None:
    file = toml(tmp_path, "number = 2")
    for arguments, environ in (
        (["--number", "2", "--count", "2"], {}),
        (["--count", "2"], {"LOCKSTEP_NUMBER": "2"}),
        (["--config", file], {"LOCKSTEP_COUNT": "2"}),
    ):
        with pytest.raises(SettingsError, match=r"number is the old name of count, which .* also gives"):
            resolve(arguments, environ)


def test_merged_settings_are_read_under_their_old_names_with_a_warning_each(tmp_path: Path) -> None:
    file = toml(tmp_path, "halves = 1")
    assert resolve_with_warnings(["--config", file]) == (
        Config(share=0.5),
        [f"{file}: halves: halves is part of share now; the old name works only in this version"],
    )
    config, warnings = resolve_with_warnings(["--config", file, "--whole"])
    assert (config.share, len(warnings)) == (1.0, 2)


def test_a_dropped_setting_is_refused_in_every_place_with_what_to_do(tmp_path: Path) -> None:
    file = toml(tmp_path, "luck = 1")
    for arguments, environ, place in (
        (["--luck", "1"], {}, "--luck"),
        (["--luck"], {}, "--luck"),
        ([], {"LOCKSTEP_LUCK": "1"}, "LOCKSTEP_LUCK"),
        (["--config", file], {}, f"{file}: luck"),
    ):
        with pytest.raises(SettingsError) as caught:
            resolve(arguments, environ)
        assert str(caught.value) == f"{place}: luck is no longer a setting: nothing replaces it"


def test_an_internal_field_is_no_setting(tmp_path: Path) -> None:
    assert resolve([], {"LOCKSTEP_PATIENCE": "9"}).patience == 3
    with pytest.raises(SettingsError, match="unknown setting 'patience'"):
        resolve(["--config", toml(tmp_path, "patience = 9")])


def test_a_process_may_have_its_own_prefix_and_table(tmp_path: Path) -> None:
    file = toml(tmp_path, "[own]\ncount = 2\n[other]\ncount = 3")
    parser = argparse.ArgumentParser()
    add_flags(parser, [Config], "OWN_")
    environ = {"OWN_CONFIG": file, "OWN_NAME": "env", "LOCKSTEP_COUNT": "4"}
    sources = Sources(parser.parse_args([]), environ, [Config], prefix="OWN_", table="own")
    assert sources.fill(Config) == Config(count=2, name="env")
    assert "env: OWN_COUNT" in " ".join(parser.format_help().split())


def test_a_variable_that_looks_misspelt_is_a_warning_and_others_are_not_ours() -> None:
    misspelt = {"LOCKSTEP_COUNTS": "3", "LOCKSTEP_QUCK": "true"}
    foreign = {"LOCKSTEP_SERVICE_HOST": "10.0.0.1", "LOCKSTEP_PARTS_PORT": "tcp://10.0.0.1:1", "LOCKSTEP_CONFIG": ""}
    config, warnings = resolve_with_warnings(environ=misspelt | foreign | {"LOCKSTEP_UNRELATED": "x", "COUNT": "4"})
    assert config == Config()
    assert warnings == [
        "LOCKSTEP_COUNTS: is no setting; did you mean LOCKSTEP_COUNT?",
        "LOCKSTEP_QUCK: is no setting; did you mean LOCKSTEP_QUICK?",
    ]
