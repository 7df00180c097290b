"""The flags of `generate` and `compile`, and the request or grammar that they make.

The invariant: a flag that is not given leaves its field unset, so that the server's default applies. The server alone
checks values, and names the wrong one.

Not responsible for: sending the request (client.py).
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any, TextIO

from protos.engine.v1 import engine_pb2 as pb

_WHITESPACE = {"compact": pb.WHITESPACE_COMPACT, "bounded": pb.WHITESPACE_BOUNDED, "any": pb.WHITESPACE_ANY}
_BACKENDS = {"xgrammar": pb.BACKEND_XGRAMMAR, "llguidance": pb.BACKEND_LLGUIDANCE, "auto": pb.BACKEND_AUTO}
_FILE_KINDS = {"schema": "json_schema", "ebnf": "ebnf", "lark": "lark", "structural_tag": "structural_tag"}
GRAMMAR_FLAGS = ("--json", "--schema", "--regex", "--choice", "--ebnf", "--lark", "--structural-tag")
"""The flags that exclude each other."""
_SAMPLING: list[tuple[str, type, str]] = [
    ("max_tokens", int, "most tokens of the answer"),
    ("min_tokens", int, "fewest tokens of the answer"),
    ("temperature", float, "0: the most likely token each time"),
    ("top_p", float, "sample from the smallest set of tokens with this probability, in (0, 1]"),
    ("top_k", int, "sample from the k most likely tokens; 0: from all"),
    ("min_p", float, "drop tokens below this share of the most likely token's probability"),
    ("seed", int, "the same seed gives the same answer"),
    ("repetition_penalty", float, "above 1: tokens of the prompt and the answer become less likely"),
    ("presence_penalty", float, "subtracted once from the logit of a token of the answer"),
    ("frequency_penalty", float, "subtracted from the logit for each occurrence in the answer"),
]


def add_request_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for prompt, grammar, sampling and speculation."""
    prompt = parser.add_argument_group(
        "prompt", "Either --prompt or --chat; without both, the prompt is read from stdin."
    )
    prompt.add_argument("--prompt", metavar="TEXT", help="text that the answer continues")
    prompt.add_argument("--chat", metavar="TEXT", help="a user message, in the model's chat template")
    prompt.add_argument("--system", metavar="TEXT", help="with --chat: the system message")
    kind = add_grammar_flags(parser)
    kind.add_argument("--grammar-id", metavar="ID", help="the id of a grammar, from `lockstep compile`")
    sampling = parser.add_argument_group("sampling", "A flag that is not given has the server's default.")
    for name, kind_of_value, text in _SAMPLING:
        flag = "--" + name.replace("_", "-")
        sampling.add_argument(flag, type=kind_of_value, metavar=kind_of_value.__name__.upper(), help=text)
    sampling.add_argument(
        "--stop", metavar="TEXT", action="append", default=[], help="end before this text; may be repeated"
    )
    sampling.add_argument("--ignore-eos", action="store_true", help="continue after the end-of-sequence token")
    sampling.add_argument(
        "--draft-tokens",
        type=int,
        metavar="INT",
        help="drafts per step, jump-forward tokens included; 0: no speculation",
    )


def seconds(text: str) -> float:
    """Return the value of a flag in seconds. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def add_grammar_flags(
    parser: argparse.ArgumentParser, description: str = "The form of the answer; without a flag here it is free text."
) -> argparse._MutuallyExclusiveGroup:
    """Add the flags of a grammar; return the group of flags that exclude each other."""
    grammar = parser.add_argument_group("grammar", description)
    kind = grammar.add_mutually_exclusive_group()
    kind.add_argument("--json", action="store_true", help="any JSON object")
    kind.add_argument("--schema", metavar="FILE", help="JSON that fits the JSON Schema in this file")
    kind.add_argument("--regex", metavar="PATTERN", help="text that this regular expression matches as a whole")
    kind.add_argument(
        "--choice", metavar="TEXT", action="append", help="one of these texts; give the flag once per text"
    )
    kind.add_argument("--ebnf", metavar="FILE", help="text of the GBNF grammar in this file (start rule `root`)")
    kind.add_argument("--lark", metavar="FILE", help="text of the Lark grammar in this file (start rule `start`)")
    kind.add_argument(
        "--structural-tag", metavar="FILE", help="free text with guided regions, described by the JSON in this file"
    )
    grammar.add_argument(
        "--whitespace", choices=sorted(_WHITESPACE), help="white space in JSON (the server's default: bounded)"
    )
    grammar.add_argument(
        "--backend",
        choices=sorted(_BACKENDS),
        help="grammar library; auto: the first one that enforces the whole grammar",
    )
    grammar.add_argument(
        "--allow-unenforced",
        action="store_true",
        help="accept a grammar with parts that cannot be enforced; each becomes a warning",
    )
    return kind


def build_request(flags: argparse.Namespace, stdin: TextIO = sys.stdin) -> pb.GenerateRequest:
    """Return the request. Raises OSError for an unreadable file, ValueError for a value that its field cannot hold."""
    request = pb.GenerateRequest()
    _fill_prompt(request, flags, stdin)
    for name, _, _ in _SAMPLING:
        if (value := getattr(flags, name)) is not None:
            try:
                setattr(request.sampling, name, value)
            except ValueError as error:
                raise ValueError(f"--{name.replace('_', '-')}: {error}") from error
    request.sampling.stop.extend(flags.stop)
    request.sampling.ignore_eos = flags.ignore_eos
    if flags.draft_tokens is not None:
        request.speculation.num_draft_tokens = flags.draft_tokens
    grammar = build_grammar(flags)
    if grammar is not None:
        request.grammar.CopyFrom(grammar)
    return request


def _fill_prompt(request: pb.GenerateRequest, flags: argparse.Namespace, stdin: TextIO) -> None:
    if flags.prompt is not None and flags.chat is not None:
        raise ValueError("--prompt and --chat exclude each other")
    if flags.system is not None and flags.chat is None:
        raise ValueError("--system needs --chat")
    if flags.chat is None:
        request.text = flags.prompt if flags.prompt is not None else stdin.read()
        return
    if flags.system is not None:
        request.messages.messages.add(role="system", content=flags.system)
    request.messages.messages.add(role="user", content=flags.chat)


def build_grammar(flags: argparse.Namespace) -> pb.Grammar | None:
    """Return the grammar, or None without one. Raises as `build_request`."""
    options: dict[str, Any] = {}
    if flags.whitespace:
        options["whitespace"] = _WHITESPACE[flags.whitespace]
    if flags.backend:
        options["backend"] = _BACKENDS[flags.backend]
    if flags.allow_unenforced:
        options["allow_unenforced"] = True
    if getattr(flags, "grammar_id", None) is not None:
        return pb.Grammar(grammar_id=flags.grammar_id, **options)
    if flags.json:
        return pb.Grammar(json_object=True, **options)
    if flags.regex is not None:
        return pb.Grammar(regex=flags.regex, **options)
    if flags.choice:
        return pb.Grammar(choice=pb.Choice(choices=flags.choice), **options)
    for flag, field in _FILE_KINDS.items():
        if (path := getattr(flags, flag)) is not None:
            source: dict[str, Any] = {field: Path(path).read_text(encoding="utf-8")}
            return pb.Grammar(**source, **options)
    if options:
        raise ValueError("--whitespace, --backend and --allow-unenforced need a grammar")
    return None
