"""Settings from four places under one name: flag, environment variable, TOML file, default. The first one given wins.

The invariant: a setting is written down once, as a field of a config dataclass with its docstring. The flag, the
environment variable, the TOML key and the help text are made from that field. A TOML key without a field is an error.
A variable that looks like a misspelt one is a warning: other programs may have variables with the same prefix.

A setting that goes is announced for one version by its config class:
- `RENAMED = {"old": "new"}`: the old flag, variable and key still work, each with a warning that names both.
- `MERGED = (Merged(...),)`: several old settings that are one now; their values are turned into its value.
- `DROPPED = {"old": "what to do instead"}`: giving the setting is an error that says this.
A value under an old and a new name is an error. Settings in `HIDDEN` are read, and left out of `--help` and the page.
Fields in `INTERNAL` are no settings: only code sets them, such as a benchmark or a test.

Not responsible for: the range of a value (the config class checks it).
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import inspect
import re
import textwrap
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

ENV_PREFIX = "LOCKSTEP_"

_OF_KUBERNETES = re.compile(r"_SERVICE_(HOST|PORT)|_PORT($|_\d)")
"""What Kubernetes sets for a Service called lockstep."""

_BOOLS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}

C = TypeVar("C")


class SettingsError(ValueError):
    """A setting is unknown, is given twice, or has a value of the wrong type; the message names it and its place."""


@dataclasses.dataclass(frozen=True, slots=True)
class Merged:
    """Old settings that are one setting now, read for one version."""

    into: str
    """Name of the setting that has replaced them."""
    kinds: Mapping[str, type]
    """Type of each old setting by its name."""
    value: Callable[[Mapping[str, Any]], Any]
    """Returns the value of `into` for the old settings that are given, by name; raises ValueError for a wrong value."""


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One field of one config class."""

    name: str
    kind: type
    default: Any
    help: str
    old_names: tuple[str, ...] = ()
    hidden: bool = False
    """True: left out of `--help` and of docs/configuration.md."""

    @property
    def is_list(self) -> bool:
        """True: its flag may be repeated, and the TOML value is a list of strings."""
        return self.kind is tuple

    @property
    def flag(self) -> str:
        """The flag. A list's flag is singular, because each use adds one value."""
        return flag_of(self.name.removesuffix("s") if self.is_list else self.name)

    def parse(self, text: str | list[str], where: str) -> Any:
        """Return the value of a flag or an environment variable. Raises SettingsError that begins with `where`.

        A list comes as the values of its flag, or as the lines of a variable."""
        if self.is_list:
            return tuple(text.splitlines() if isinstance(text, str) else text)
        assert isinstance(text, str), "no other flag is repeated"
        try:
            return _BOOLS[text.lower()] if self.kind is bool else self.kind(text)
        except (ValueError, KeyError):
            raise SettingsError(f"{where}: {text!r} is not {_article(self.kind)}") from None

    def accept(self, value: Any, where: str) -> Any:
        """Return a TOML value, checked. Raises SettingsError that begins with `where`."""
        if self.is_list and isinstance(value, list) and all(isinstance(each, str) for each in value):
            return tuple(value)
        if self.kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if type(value) is not self.kind:
            raise SettingsError(f"{where}: {value!r} is not {_article(self.kind)}")
        return value


def settings_of(config_class: type[Any]) -> list[Setting]:
    """Return the settings of a config dataclass, in order.

    Fields are str, int, float, bool, bool | None, or tuple[str, ...]."""
    docs = _field_docs(config_class)
    kinds: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool, "bool | None": bool}
    kinds["tuple[str, ...]"] = tuple
    renamed: Mapping[str, str] = getattr(config_class, "RENAMED", {})
    hidden, internal = getattr(config_class, "HIDDEN", ()), getattr(config_class, "INTERNAL", ())
    return [
        Setting(
            field.name,
            kinds[str(field.type)],
            field.default,
            docs[field.name],
            tuple(old for old, new in renamed.items() if new == field.name),
            field.name in hidden,
        )
        for field in dataclasses.fields(config_class)
        if field.name not in internal
    ]


def _merged(config_class: type[Any]) -> Sequence[Merged]:
    merged: Sequence[Merged] = getattr(config_class, "MERGED", ())
    return merged


def _dropped(config_class: type[Any]) -> Mapping[str, str]:
    dropped: Mapping[str, str] = getattr(config_class, "DROPPED", {})
    return dropped


def old_names_of(config_class: type[Any]) -> set[str]:
    """Return the names that the class no longer has as settings, and still knows."""
    names = {name for setting in settings_of(config_class) for name in setting.old_names}
    names.update(name for merged in _merged(config_class) for name in merged.kinds)
    return names | set(_dropped(config_class))


def flag_of(name: str) -> str:
    """Return the flag of a setting: `max_batch_size` -> `--max-batch-size`."""
    return "--" + name.replace("_", "-")


def variable_of(name: str, prefix: str = ENV_PREFIX) -> str:
    """Return the environment variable of a setting: `max_batch_size` -> `LOCKSTEP_MAX_BATCH_SIZE`."""
    return prefix + name.upper()


def add_flags(parser: argparse.ArgumentParser, config_classes: Sequence[type[Any]], prefix: str = ENV_PREFIX) -> None:
    """Add `--config` and one flag per setting. A flag that is not given is None, so that the other places count."""
    parser.add_argument(
        "--config", metavar="FILE", help=f"TOML file with settings by name (env: {prefix}CONFIG)", default=None
    )
    for config_class in config_classes:
        title = (inspect.getdoc(config_class) or config_class.__name__).splitlines()[0].rstrip(".")
        group = parser.add_argument_group(title)
        for setting in settings_of(config_class):
            shown = {"": "''", None: "unset", (): "none"}.get(setting.default, setting.default)
            text = f"{setting.help} (default: {shown}; env: {variable_of(setting.name, prefix)})".replace("%", "%%")
            if setting.hidden:
                text = argparse.SUPPRESS
            metavar = "STR" if setting.is_list else setting.kind.__name__.upper()
            # A flag without a value turns a switch on, as in other servers.
            form: dict[str, Any] = {"nargs": "?", "const": "true"} if setting.kind is bool else {}
            if setting.is_list:
                form = {"action": "append", "dest": setting.name}
            group.add_argument(setting.flag, metavar=metavar, default=None, help=text, **form)
        for old in sorted(old_names_of(config_class)):
            group.add_argument(flag_of(old), nargs="?", const="true", default=None, help=argparse.SUPPRESS)


class _Given(NamedTuple):
    """A value, as one place gives it under one name."""

    where: str
    value: Any
    is_text: bool
    """A flag or an environment variable is text; a TOML value has a type."""


class Sources:
    """The places that give settings, read once: parsed flags, the environment, and a TOML file named by either."""

    def __init__(
        self,
        flags: argparse.Namespace,
        environ: Mapping[str, str],
        config_classes: Sequence[type[Any]],
        *,
        prefix: str = ENV_PREFIX,
        table: str | None = None,
        others: tuple[str, ...] = (),
    ) -> None:
        """Read the TOML file, if one is named.

        Args:
            flags: parsed by a parser with `add_flags` of the same classes.
            environ: the environment variables.
            config_classes: every class whose fields may be keys of the file.
            prefix: the prefix of the environment variables.
            table: the file's table of this name is read instead of the whole file, where it has one.
            others: longer prefixes, of the variables of other processes.

        Raises SettingsError for a file that cannot be read or has a key that is no field of `config_classes`.
        """
        self._flags = flags
        self._environ = environ
        self._prefix = prefix
        self._file = flags.config or environ.get(f"{prefix}CONFIG")
        document = _read_toml(Path(self._file)) if self._file else {}
        self._table = document.get(table, document) if table else document
        self.warnings: list[str] = []
        """One line for each setting that `fill` read under an old name, and for each variable that looks misspelt. The
        caller logs them once logging is set up."""
        known = {setting.name for config_class in config_classes for setting in settings_of(config_class)}
        known.update(*(old_names_of(config_class) for config_class in config_classes))
        if unknown := sorted(set(self._table) - known):
            near = difflib.get_close_matches(unknown[0], known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise SettingsError(f"{self._file}: unknown setting {unknown[0]!r}{hint}")
        self.warnings += _misspelt(environ, known | {"config"}, prefix, others)

    def fill(self, config_class: type[C], internal: Mapping[str, Any] | None = None) -> C:
        """Return an instance. `internal`: values of fields in `INTERNAL` of this or another class.

        Raises SettingsError, or ValueError from the class for a value out of range.
        """
        for name, instead in _dropped(config_class).items():
            if (given := self._look_up(name, flag_of(name))) is not None:
                raise SettingsError(f"{given.where}: {name} is no longer a setting: {instead}")
        values: dict[str, Any] = {}
        for setting in settings_of(config_class):
            given = self._given(setting)
            if given is not None:
                values[setting.name] = _value(setting, given)
        for merged in _merged(config_class):
            self._merge(merged, values)
        own: Collection[str] = getattr(config_class, "INTERNAL", ())
        values.update((name, value) for name, value in (internal or {}).items() if name in own)
        return config_class(**values)

    def _merge(self, merged: Merged, values: dict[str, Any]) -> None:
        """Set `merged.into` in `values` where one of the old settings is given."""
        old: dict[str, Any] = {}
        for name, kind in merged.kinds.items():
            given = self._look_up(name, flag_of(name))
            if given is None:
                continue
            if merged.into in values:
                raise SettingsError(f"{given.where}: {name} is part of {merged.into} now, which is given as well")
            old[name] = _value(Setting(name, kind, None, ""), given)
            self.warnings.append(
                f"{given.where}: {name} is part of {merged.into} now; the old name works only in this version"
            )
        if old:
            values[merged.into] = merged.value(old)

    def _given(self, setting: Setting) -> _Given | None:
        """Return what the first place gives, under the setting's name or an old one."""
        found = self._look_up(setting.name, setting.flag)
        for old in setting.old_names:
            under_old = self._look_up(old, flag_of(old))
            if under_old is None:
                continue
            if found is not None:
                raise SettingsError(
                    f"{under_old.where}: {old} is the old name of {setting.name}, "
                    f"which {found.where} also gives; keep only {setting.name}"
                )
            found = under_old
            self.warnings.append(
                f"{under_old.where}: {old} is now called {setting.name}; the old name works only in this version"
            )
        return found

    def _look_up(self, name: str, flag: str) -> _Given | None:
        given = getattr(self._flags, name, None)
        if given is not None:
            return _Given(flag, given, True)
        variable = variable_of(name, self._prefix)
        if variable in self._environ:
            return _Given(variable, self._environ[variable], True)
        if name in self._table:
            return _Given(f"{self._file}: {name}", self._table[name], False)
        return None

    def __repr__(self) -> str:
        return f"<Sources file={self._file} prefix={self._prefix}>"


def _misspelt(environ: Mapping[str, str], known: Collection[str], prefix: str, others: tuple[str, ...]) -> list[str]:
    """Return a line for each variable whose name is close to that of a setting, and is none."""
    found = []
    for variable in sorted(environ):
        name = variable.removeprefix(prefix).lower()
        is_ours = variable.startswith(prefix) and not variable.startswith(others) and name not in known
        if not is_ours or _OF_KUBERNETES.search(variable):
            continue
        if near := difflib.get_close_matches(name, known, 1, cutoff=0.8):
            found.append(f"{variable}: is no setting; did you mean {variable_of(near[0], prefix)}?")
    return found


def _value(setting: Setting, given: _Given) -> Any:
    return (setting.parse if given.is_text else setting.accept)(given.value, given.where)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"--config: {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: {error}") from error


def _field_docs(config_class: type[Any]) -> dict[str, str]:
    """Return the docstring below each field in the source of the class and its bases."""
    docs: dict[str, str] = {}
    for each in reversed(config_class.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, below in zip(body.body, body.body[1:], strict=False):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[name] = inspect.cleandoc(text)
    return docs


def _article(kind: type) -> str:
    return {str: "a string", tuple: "a list of strings", int: "an integer", float: "a number", bool: "true or false"}[
        kind
    ]
