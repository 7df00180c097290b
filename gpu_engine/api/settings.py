"""Settings from four places under one name each: flag, environment, TOML file, default; the first that speaks wins.

The invariant: a setting is written down once, as a field of a config dataclass with its docstring; the flag, the
variable `LOCKSTEP_<NAME>`, the TOML key and the help text are made from it. A key that is no field is an error. Not
here: what the values mean (`config.py` checks them).
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

ENV_PREFIX = "LOCKSTEP_"

_BOOLS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}

C = TypeVar("C")


class SettingsError(ValueError):
    """A setting is unknown or has a value of the wrong type; the message names it and where it stood."""


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One field of one config class."""

    name: str
    kind: type
    default: Any
    help: str

    @property
    def flag(self) -> str:
        """`--max-batch-size`."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """`LOCKSTEP_MAX_BATCH_SIZE`."""
        return ENV_PREFIX + self.name.upper()

    def parse(self, text: str, where: str) -> Any:
        """Return the value that `text` stands for."""
        try:
            return _BOOLS[text.lower()] if self.kind is bool else self.kind(text)
        except (ValueError, KeyError):
            raise SettingsError(f"{where}: {text!r} is not {_article(self.kind)}") from None

    def accept(self, value: Any, where: str) -> Any:
        """Return a TOML value, checked."""
        if self.kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if type(value) is not self.kind:
            raise SettingsError(f"{where}: {value!r} is not {_article(self.kind)}")
        return value


def settings_of(config_class: type[Any]) -> list[Setting]:
    """Return the settings of a config dataclass, in order. Fields are str, int, float, bool or bool | None."""
    docs = _field_docs(config_class)
    kinds: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool, "bool | None": bool}
    return [
        Setting(field.name, kinds[str(field.type)], field.default, docs[field.name])
        for field in dataclasses.fields(config_class)
    ]


def add_flags(parser: argparse.ArgumentParser, config_classes: Sequence[type[Any]]) -> None:
    """Add `--config` and one flag per setting. Unset flags are None, so that other places may speak."""
    parser.add_argument(
        "--config", metavar="FILE", help=f"TOML file with settings by name (env: {ENV_PREFIX}CONFIG)", default=None
    )
    for config_class in config_classes:
        title = (inspect.getdoc(config_class) or config_class.__name__).splitlines()[0].rstrip(".")
        group = parser.add_argument_group(title)
        for setting in settings_of(config_class):
            shown = {"": "''", None: "unset"}.get(setting.default, setting.default)
            text = f"{setting.help} (default: {shown}; env: {setting.variable})".replace("%", "%%")
            group.add_argument(setting.flag, metavar=setting.kind.__name__.upper(), default=None, help=text)


class Sources:
    """The places that may speak, read once: parsed flags, the environment, and the TOML file that one of them names."""

    def __init__(
        self, flags: argparse.Namespace, environ: Mapping[str, str], config_classes: Sequence[type[Any]]
    ) -> None:
        """Raises SettingsError for a file that cannot be read or has a key that is no field of `config_classes`."""
        self._flags = flags
        self._environ = environ
        self._file = flags.config or environ.get(f"{ENV_PREFIX}CONFIG")
        self._table = _read_toml(Path(self._file)) if self._file else {}
        known = {setting.name for config_class in config_classes for setting in settings_of(config_class)}
        if unknown := sorted(set(self._table) - known):
            raise SettingsError(f"{self._file}: unknown setting {unknown[0]!r}")

    def fill(self, config_class: type[C]) -> C:
        """Return an instance. Raises SettingsError, or ValueError from the class for a value out of range."""
        values: dict[str, Any] = {}
        for setting in settings_of(config_class):
            flag = getattr(self._flags, setting.name, None)
            if flag is not None:
                values[setting.name] = setting.parse(flag, setting.flag)
            elif setting.variable in self._environ:
                values[setting.name] = setting.parse(self._environ[setting.variable], setting.variable)
            elif setting.name in self._table:
                values[setting.name] = setting.accept(self._table[setting.name], f"{self._file}: {setting.name}")
        return config_class(**values)

    def __repr__(self) -> str:
        return f"<Sources file={self._file}>"


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"--config: {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: {error}") from error


def _field_docs(config_class: type[Any]) -> dict[str, str]:
    """Return the string that stands under each field in the source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(config_class))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = inspect.cleandoc(text)
    return docs


def _article(kind: type) -> str:
    return {str: "a string", int: "an integer", float: "a number", bool: "true or false"}[kind]
