"""The parser of a harness's flags, and the flags of the engine that many of them start.

Not responsible for: other flags (see each harness), the list of harnesses (see benchmarks/__main__.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import Any

from benchmarks.harness.server import ServerOptions


def harness_parser(doc: str, examples: str) -> argparse.ArgumentParser:
    """Return a parser for a harness whose module begins with "`COMMAND`: DESCRIPTION". `examples` end its help."""
    command, _, description = doc.partition("\n\n")[0].partition("`: ")
    return argparse.ArgumentParser(
        prog=command.removeprefix("`").partition(" --")[0],
        description=description[:1].upper() + description[1:],
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


_ENGINE_FLAGS: dict[str, dict[str, Any]] = {
    "model": {"default": "embedded", "help": "a directory, a GGUF file or 'embedded' (default)"},
    "dtype": {"default": "auto", "choices": ("auto", "bfloat16", "float32")},
    "device": {"default": "cpu", "help": "device of the engine (default cpu)"},
    "threads": {
        "type": int,
        "default": len(os.sched_getaffinity(0)),
        "help": "threads of the engine (default: all cores)",
    },
    "k": {"type": int, "default": 7, "help": "draft tokens per step (default 7)"},
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
