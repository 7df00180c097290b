"""The argument parser of `lockstep`: argparse, whose errors name the nearest flag and the command that has it.

The invariant: a wrong flag is explained by the usage of its own command. Abbreviated flags are refused: an abbreviation
would change its meaning when a longer flag is added.

Not responsible for: the commands (see commands.py).
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of the examples."""


class _HelpAll(argparse.Action):
    """Prints the help with every flag, and ends the process."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        """See argparse.Action."""
        assert isinstance(parser, Parser)
        print(parser.format_whole_help(), end="")
        parser.exit()


class Parser(argparse.ArgumentParser):
    """A parser of commands, and of each command's flags."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        defaults: dict[str, Any] = {"allow_abbrev": False, "formatter_class": Formatter}
        super().__init__(*arguments, **defaults | more)
        self._commands: dict[str, Parser] = {}
        self._short: frozenset[argparse.Action] = frozenset()
        """What `--help` shows; empty: all."""
        self._words: argparse.Action | None = None

    def shorten_help(self, flags: Sequence[str]) -> None:
        """Let `--help` show only these flags, and `--help-all` every one."""
        self._short = frozenset(self._option_string_actions[flag] for flag in ("--help", "--version", *flags))
        self.add_argument("--help-all", action=_HelpAll, nargs=0, help="every setting")

    def format_help(self) -> str:
        """Return the help; after `shorten_help` the short one."""
        if not self._short:
            return super().format_help()
        texts = {action: action.help for action in self._actions}
        for action, text in texts.items():
            action.help = _first_sentence(text or "") if action in self._short else argparse.SUPPRESS
        try:
            shown = super().format_help()
        finally:
            for action, text in texts.items():
                action.help = text
        more = sum(text != argparse.SUPPRESS for action, text in texts.items() if action not in self._short) - 1
        return f"{shown}\n--help-all shows {more} more settings, and all of each.\n"

    def format_whole_help(self) -> str:
        """Return the help with every flag."""
        return super().format_help()

    def add_words(self, name: str, **about: Any) -> None:
        """Add an argument of any number of words, which may stand before, between and after the flags."""
        self._words = self.add_argument(name, nargs="*", **about)

    def parse_known_args(  # type: ignore[override]  # argparse's has overloads for a namespace of the caller's own
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """See argparse.ArgumentParser, which takes only the first words in a row."""
        flags, unknown = super().parse_known_args(args, namespace)
        if self._words is None or any(re.match(r"-\S", word) for word in unknown):
            return flags, unknown
        try:
            more = [self._get_value(self._words, word) for word in unknown]
        except argparse.ArgumentError as error:
            self.error(str(error))
        setattr(flags, self._words.dest, [*getattr(flags, self._words.dest), *more])
        return flags, []

    def add_commands(self, version: str) -> Commands:
        """Return what adds commands to this parser."""
        return Commands(self, version)

    def parse_args(  # type: ignore[override]  # argparse's has overloads for a namespace of the caller's own
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
        """Parse a command line. Prints the error and ends the process where it is wrong."""
        arguments = list(sys.argv[1:] if args is None else args)
        if self._commands:
            self._check_beginning(arguments)
        flags, unknown = self.parse_known_args(arguments)
        if unknown:
            self._commands.get(arguments[0] if arguments else "", self)._refuse(unknown, self._commands)
        return flags

    def _check_beginning(self, arguments: list[str]) -> None:
        """Refuse a flag before its command, and a command that does not exist."""
        if not arguments or arguments[0] in (*self._commands, "-h", "--help", "--version"):
            return
        first = arguments[0]
        if first.startswith("-"):
            owners = _owners(first, self._commands)
            self.error(
                f"{_name(first)} belongs after its command: lockstep {owners[0]} {_name(first)} ..."
                if owners
                else f"{_name(first)}: a command comes first: {', '.join(self._commands)}"
            )
        near = difflib.get_close_matches(first, self._commands, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"the commands are {', '.join(self._commands)}"
        self.error(f"there is no command {first!r}; {hint}")

    def _refuse(self, unknown: list[str], commands: dict[str, Parser]) -> NoReturn:
        first = next((word for word in unknown if word.startswith("-")), None)
        problem = f"unrecognized arguments: {' '.join(unknown)}"
        if first is None:
            self.error(f"{problem}; every value belongs to a flag")
        owners = _owners(first, commands)
        if owners:
            self.error(f"{problem}; {_name(first)} is a flag of `lockstep {owners[0]}`")
        if near := self._nearest(first):
            self.error(f"{problem}; did you mean {near}?")
        for name, command in commands.items():
            if near := command._nearest(first):
                self.error(f"{problem}; `lockstep {name}` has {near}")
        self.error(problem)

    def _nearest(self, word: str) -> str:
        """Return the flag that is most like `word`, "" if none is. The dashes in front do not count as like."""
        flags = {flag.lstrip("-"): flag for flag in self._option_string_actions}
        near = difflib.get_close_matches(_name(word).lstrip("-"), flags, 1)
        return flags[near[0]] if near else ""


class Commands:
    """Adds commands to a parser."""

    def __init__(self, parser: Parser, version: str) -> None:
        self._parser, self._version = parser, version
        self._added = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)

    def add(self, name: str, **about: Any) -> Parser:
        """Return the parser of a new command; `about` is for argparse."""
        command: Parser = self._added.add_parser(name, **about)
        command.add_argument("--version", action="version", version=self._version)
        self._parser._commands[name] = command
        return command


def _first_sentence(text: str) -> str:
    """Return the first sentence of a flag's help without what is in brackets, and its default."""
    about, _, default = text.rpartition(" (default: ")
    if not about:
        return text
    sentence = re.sub(r" ?\([^()]*\)", "", about.partition(". ")[0]).rstrip(".")
    return f"{sentence} (default: {default.partition('; ')[0]})"


def _name(word: str) -> str:
    return word.partition("=")[0]


def _owners(word: str, commands: dict[str, Parser]) -> list[str]:
    """Return the commands that have the flag of `word`."""
    return [name for name, command in commands.items() if _name(word) in command._option_string_actions]
