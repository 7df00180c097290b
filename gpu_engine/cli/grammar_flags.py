"""The flags of a grammar, and the message that they make.

The invariant: a flag that is not given leaves its field unset, so that the server's default applies.

Not responsible for: the rest of a request (see request_flags.py).
"""

from __future__ import annotations

import argparse
from typing import Any

from gpu_engine.cli.inputs import read_text, text, text_or_file
from lockstep_client.wire import engine_pb2 as pb

_WHITESPACE = {
    "spaced": pb.WHITESPACE_SPACED,
    "compact": pb.WHITESPACE_COMPACT,
    "bounded": pb.WHITESPACE_BOUNDED,
    "any": pb.WHITESPACE_ANY,
}
_BACKENDS = {"xgrammar": pb.BACKEND_XGRAMMAR, "llguidance": pb.BACKEND_LLGUIDANCE, "auto": pb.BACKEND_AUTO}
_UNENFORCED = {"refuse": pb.UNENFORCED_REFUSE, "warn": pb.UNENFORCED_WARN, "verify": pb.UNENFORCED_VERIFY}
_JSON_KINDS = {"schema": "json_schema", "structural_tag": "structural_tag"}
_FILE_KINDS = {"ebnf": "ebnf", "lark": "lark"}
_GBNF_MARK = "::="
_NUMBERS = {
    "max_string_length": "most characters of a string in JSON; 0: no bound",
    "max_array_items": "most items of an array in JSON; 0: no bound",
    "max_number_digits": "most digits of a number in JSON before its decimal point, and after it, without an exponent; "
    "0: no bound",
    "max_whitespace": "most white space characters in a row in JSON; 0: no bound",
    "max_backtracks": "how often a verified answer without a legal token may go back",
    "hold_tokens": "the last tokens of a verified answer that are held back for that; 0: it never goes back",
}
GRAMMAR_FLAGS = ("--json", "--schema", "--regex", "--choice", "--grammar", "--ebnf", "--lark", "--structural-tag")
"""The flags that exclude each other."""


def add_grammar_flags(
    parser: argparse.ArgumentParser, description: str = "The form of the answer; without a flag here it is free text."
) -> argparse._MutuallyExclusiveGroup:
    """Add the flags of a grammar; return the group of flags that exclude each other."""
    grammar = parser.add_argument_group("grammar", description)
    kind = grammar.add_mutually_exclusive_group()
    kind.add_argument("--json", action="store_true", help="any JSON object; a schema gives better answers")
    kind.add_argument(
        "--schema",
        type=text,
        metavar="FILE",
        help="JSON that fits the JSON Schema in this file, or in the flag: '{...}'",
    )
    kind.add_argument(
        "--regex", type=text, metavar="PATTERN", help="text that this regular expression matches as a whole"
    )
    kind.add_argument(
        "--choice", type=text, metavar="TEXT", action="append", help="one of these texts; give the flag once per text"
    )
    kind.add_argument(
        "--grammar", metavar="FILE", help="text of the grammar in this file: GBNF if it has ::=, otherwise Lark"
    )
    kind.add_argument("--ebnf", metavar="FILE", help="text of the GBNF grammar in this file (start rule `root`)")
    kind.add_argument("--lark", metavar="FILE", help="text of the Lark grammar in this file (start rule `start`)")
    kind.add_argument(
        "--structural-tag",
        type=text,
        metavar="FILE",
        help="free text with guided regions, described by the JSON in this file, or in the flag: '{...}'",
    )
    grammar.add_argument(
        "--whitespace", choices=sorted(_WHITESPACE), help="white space in JSON (default: the server's)"
    )
    grammar.add_argument(
        "--closed-objects",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="whether objects that list their properties have no others (default: the server's)",
    )
    grammar.add_argument(
        "--backend",
        choices=sorted(_BACKENDS),
        help="grammar library; auto: the first one that enforces the whole grammar (default: the server's)",
    )
    grammar.add_argument(
        "--allow-unenforced",
        action="store_true",
        help="accept a grammar with parts that cannot be enforced; each becomes a warning",
    )
    grammar.add_argument(
        "--unenforced",
        choices=list(_UNENFORCED),
        help="what happens to parts that cannot be enforced: the request is refused, a warning, or the answer is "
        "verified (default: refuse)",
    )
    for name, meaning in _NUMBERS.items():
        flag = f"--{name.replace('_', '-')}"
        grammar.add_argument(flag, type=int, metavar="N", help=f"{meaning} (default: the server's)")
    return kind


def build_grammar(flags: argparse.Namespace) -> pb.Grammar | None:
    """Return the grammar, or None without one. Raises ValueError that names the flag."""
    options: dict[str, Any] = {}
    if flags.whitespace:
        options["whitespace"] = _WHITESPACE[flags.whitespace]
    if flags.closed_objects is not None:
        options["closed_objects"] = flags.closed_objects
    if flags.backend:
        options["backend"] = _BACKENDS[flags.backend]
    if flags.allow_unenforced:
        options["allow_unenforced"] = True
    if flags.unenforced:
        options["unenforced"] = _UNENFORCED[flags.unenforced]
    options |= {name: getattr(flags, name) for name in _NUMBERS if getattr(flags, name) is not None}
    source = _source(flags)
    if source is None and options:
        raise ValueError(f"--{next(iter(options)).replace('_', '-')}: needs a grammar")
    return None if source is None else pb.Grammar(**source, **options)


def _source(flags: argparse.Namespace) -> dict[str, Any] | None:
    if getattr(flags, "grammar_id", None) is not None:
        return {"grammar_id": flags.grammar_id}
    if flags.json:
        return {"json_object": True}
    if flags.regex is not None:
        return {"regex": flags.regex}
    if flags.choice:
        return {"choice": pb.Choice(choices=flags.choice)}
    if flags.grammar is not None:
        source = read_text("--grammar", flags.grammar)
        return {"ebnf" if _GBNF_MARK in source else "lark": source}
    for kinds, read in ((_JSON_KINDS, text_or_file), (_FILE_KINDS, read_text)):
        for name, field in kinds.items():
            if (value := getattr(flags, name)) is not None:
                return {field: read(f"--{name.replace('_', '-')}", value)}
    return None
