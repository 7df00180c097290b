"""The `grammar` field of a request: checks of its shape.

Invariant: a GrammarSpec names a kind that exists and has a source that is not empty.

Not responsible for: whether the source is a correct grammar (the grammar process reports that, with the position).
"""

from __future__ import annotations

import json
from collections.abc import Callable

from gpu_engine.api.errors import GrammarNotConfigured, InvalidRequest
from gpu_engine.api.request import GrammarKind, GrammarSpec
from protos.engine.v1 import engine_pb2 as pb

_TEXT_KINDS = {
    "json_schema": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "ebnf": GrammarKind.EBNF,
    "lark": GrammarKind.LARK,
    "structural_tag": GrammarKind.STRUCTURAL_TAG,
}


BOUNDS = {"max_string_length": 1 << 16, "max_array_items": 1 << 16, "max_number_digits": 15, "max_whitespace": 1 << 10}
"""Bounds of JSON values, and the largest value of each."""

_OF_JSON = frozenset(
    {GrammarKind.NONE, GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA, GrammarKind.LARK, GrammarKind.STRUCTURAL_TAG}
)


def check_grammar(
    grammar: pb.Grammar, known: Callable[[str], GrammarSpec] | None = None, *, options_only: bool = False
) -> GrammarSpec:
    """Return the spec of a `grammar` field.

    `known` returns the grammar of a grammar_id; None: the server has no grammar process. `options_only`: the field may
    hold nothing but options for the tools' schemas; its kind is then NONE. Raises InvalidRequest; for a grammar_id also
    GrammarNotConfigured, or the error that `known` raises.
    """
    if grammar.WhichOneof("spec") == "grammar_id":
        return _named(grammar, known)
    if grammar.whitespace not in pb.Whitespace.values():
        raise InvalidRequest("grammar.whitespace", f"{grammar.whitespace} is not a value of Whitespace")
    if grammar.backend not in pb.Backend.values():
        raise InvalidRequest("grammar.backend", f"{grammar.backend} is not a value of Backend")
    if options_only and grammar.WhichOneof("spec") is None:
        kind, source = GrammarKind.NONE, ""
    else:
        kind, source = _kind_and_source(grammar)
    unenforced = _unenforced(grammar)
    return GrammarSpec(
        kind=kind,
        source=source,
        whitespace=int(grammar.whitespace),
        backend=int(grammar.backend),
        allow_unenforced=unenforced == pb.UNENFORCED_WARN,
        verify=unenforced == pb.UNENFORCED_VERIFY,
        bounds=_bounds(grammar, of_json=options_only or kind in _OF_JSON),
        closed_objects=grammar.closed_objects if grammar.HasField("closed_objects") else None,
    )


def _bounds(grammar: pb.Grammar, *, of_json: bool) -> tuple[tuple[str, int], ...]:
    found = []
    for name, most in BOUNDS.items():
        if not grammar.HasField(name):
            continue
        value = getattr(grammar, name)
        if value > most:
            raise InvalidRequest(f"grammar.{name}", f"{value} is not in [0, {most}]")
        if value and not of_json:
            raise InvalidRequest(f"grammar.{name}", "bounds JSON, and this grammar has none; leave it unset")
        found.append((name, value))
    return tuple(found)


def _unenforced(grammar: pb.Grammar) -> int:
    wanted = grammar.unenforced
    if wanted not in pb.Unenforced.values():
        raise InvalidRequest("grammar.unenforced", f"{wanted} is not a value of Unenforced")
    if grammar.allow_unenforced and wanted not in (pb.UNENFORCED_UNSPECIFIED, pb.UNENFORCED_WARN):
        raise InvalidRequest("grammar.allow_unenforced", "contradicts grammar.unenforced; leave it unset")
    return pb.UNENFORCED_WARN if grammar.allow_unenforced else wanted


def _named(grammar: pb.Grammar, known: Callable[[str], GrammarSpec] | None) -> GrammarSpec:
    if not grammar.grammar_id:
        raise InvalidRequest("grammar.grammar_id", "is empty")
    for name in ("whitespace", "backend", "allow_unenforced", "unenforced"):
        if getattr(grammar, name):
            raise InvalidRequest(f"grammar.{name}", "was fixed when the grammar was compiled; leave it unset")
    for name in (*BOUNDS, "closed_objects"):
        if grammar.HasField(name):
            raise InvalidRequest(f"grammar.{name}", "was fixed when the grammar was compiled; leave it unset")
    if known is None:
        raise GrammarNotConfigured("grammar: this server runs without a grammar process (its setting grammar=none)")
    return known(grammar.grammar_id)


def _kind_and_source(grammar: pb.Grammar) -> tuple[GrammarKind, str]:
    name = grammar.WhichOneof("spec")
    if name is None:
        raise InvalidRequest("grammar.spec", "one of the kinds of grammar is required")
    if name == "json_object":
        if not grammar.json_object:
            raise InvalidRequest("grammar.json_object", "must be true; leave the grammar out for free text")
        return GrammarKind.JSON_OBJECT, ""
    if name == "choice":
        return GrammarKind.CHOICE, _choice(grammar.choice)
    source = str(getattr(grammar, name))
    if not source.strip() and not (name == "regex" and source):
        raise InvalidRequest(f"grammar.{name}", "is empty")
    return _TEXT_KINDS[name], source


def _choice(choice: pb.Choice) -> str:
    field = "grammar.choice.choices"
    if not choice.choices:
        raise InvalidRequest(field, "is empty")
    for i, text in enumerate(choice.choices):
        if not text:
            raise InvalidRequest(f"{field}[{i}]", "is empty")
    return json.dumps(list(dict.fromkeys(choice.choices)), ensure_ascii=False)
