"""The parser of a harness's flags, what reads numbers, names and lists, and the flags of the engine that many start.

Invariant: each of these readers refuses a wrong text with ArgumentTypeError, which names the text and what is allowed;
argparse adds the flag, and exits with 2.
Not responsible for: other flags (see each harness), the list of harnesses (see benchmarks/__main__.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from benchmarks.harness.server import ServerOptions

T = TypeVar("T")


def harness_parser(doc: str, examples: str) -> argparse.ArgumentParser:
    """Return a parser for a harness whose module begins with "`COMMAND`: DESCRIPTION". `examples` end its help."""
    command, _, description = doc.partition("\n\n")[0].partition("`: ")
    return argparse.ArgumentParser(
        prog=command.removeprefix("`").partition(" --")[0],
        description=description[:1].upper() + description[1:],
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return what reads a whole number of at least `least`, and of at most `most` where that is given."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {allowed}")
        return value

    return read


def real(least: float, *, endless: bool = False) -> Callable[[str], float]:
    """Return what reads a number of at least `least`; infinity is one only where the flag is a limit (`endless`)."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= (math.inf if endless else sys.float_info.max):
            allowed = ", or inf" if endless else ""
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {least:g}{allowed}")
        return value

    return read


def pair(form: str) -> Callable[[str], tuple[int, int]]:
    """Return what reads two whole numbers of at least 1 with an x between them; `form` shows them, as "LANESxROWS"."""
    positive = whole(1)

    def read(text: str) -> tuple[int, int]:
        first, _, second = text.partition("x")
        try:
            return positive(first), positive(second)
        except argparse.ArgumentTypeError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {form}, two whole numbers of at least 1") from None

    return read


def one_of(known: Iterable[str]) -> Callable[[str], str]:
    """Return what reads one of the `known` names."""
    names = tuple(known)

    def read(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
        return text

    return read


def list_of(read: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return what reads parts between commas, each as `read` does, which may also raise ValueError for a wrong one."""

    def read_part(part: str) -> T:
        try:
            return read(part)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{part!r}: {error}") from error

    return lambda text: [read_part(part) for part in text.split(",")]


def some_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return what reads some of the `known` names, with commas between them; an empty text means all of them."""
    names = tuple(known)
    return lambda text: list_of(one_of(names))(text) if text else list(names)


_ENGINE_FLAGS: dict[str, dict[str, Any]] = {
    "model": {"default": "embedded", "help": "a directory, a GGUF file or 'embedded' (default)"},
    "dtype": {"default": "auto", "choices": ("auto", "bfloat16", "float32")},
    "device": {"default": "cpu", "help": "device of the engine (default cpu)"},
    "threads": {
        "type": whole(1),
        "default": len(os.sched_getaffinity(0)),
        "help": "threads of the engine (default: all cores)",
    },
    "k": {"type": whole(0), "default": 7, "help": "draft tokens per step (default 7)"},
    "grammar-backend": {"default": "llguidance", "choices": ("llguidance", "xgrammar")},
}
_OPTIONS = {"threads": "num_threads", "k": "num_draft_tokens"}
"""By the names of flags: those of `ServerOptions`, where they differ."""


def add_engine_flags(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add flags of the engine that a harness starts, by their names without dashes."""
    for name in names:
        parser.add_argument(f"--{name}", **_ENGINE_FLAGS[name])


def engine_options(args: argparse.Namespace, **others: Any) -> ServerOptions:
    """Return the options that the flags of a harness name; `others` replace them or come in addition."""
    known = {field.name for field in dataclasses.fields(ServerOptions)}
    named = {_OPTIONS.get(name, name): value for name, value in vars(args).items()}
    return ServerOptions(**({name: value for name, value in named.items() if name in known} | others))
