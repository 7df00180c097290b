"""`python -m benchmarks.harness.internals NAME=VALUE ... -- ARGUMENTS` runs `lockstep ARGUMENTS` with internal values.

A comparison, or a test on a busy machine, changes values that are no settings: the fields that the config classes list
in `INTERNAL`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from gpu_engine.cli.commands import main


def command(internal: Mapping[str, Any]) -> list[str]:
    """Return the command that arguments of `lockstep` are appended to, so that it runs with these values."""
    values = [f"{name}={value!r}" for name, value in internal.items()]
    return [sys.executable, "-m", "benchmarks.harness.internals", *values, "--"]


def parse(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the internal values and the arguments of `lockstep`."""
    end = words.index("--")
    pairs = (word.partition("=") for word in words[:end])
    return {name: ast.literal_eval(value) for name, _, value in pairs}, list(words[end + 1 :])


if __name__ == "__main__":
    internal, arguments = parse(sys.argv[1:])
    sys.exit(main(arguments, internal))
