"""`lockstep completion SHELL`: the script that lets a shell complete commands, flags and their values.

The invariant: the script comes from the parser itself, so it has every flag of this version.

Not responsible for: the script's form (shtab), the flags of `lockstep gateway`, which another package reads.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

from gpu_engine.cli.asking import FAILED, OK
from gpu_engine.cli.parser import Parser

SHELLS = ("bash", "zsh", "fish")
_FILES = ("FILE", "DIR", "PATH")


def run_completion(parser: Parser, flags: argparse.Namespace) -> int:
    """Print the script of a shell."""
    try:
        import shtab
    except ImportError:
        print("error: completion needs shtab; install it: pip install shtab", file=sys.stderr)
        return FAILED
    for action in _actions(parser):
        if action.metavar in _FILES and action.choices is None:
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # where shtab looks for it
    print(shtab.complete(parser, flags.shell))
    return OK


def _actions(parser: argparse.ArgumentParser) -> Iterable[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
        else:
            yield action
