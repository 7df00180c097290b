"""One grammar from the three ways in which clients ask for one: response_format, structured_outputs, guided_*.

Invariant: a request has at most one grammar; two are an error that names both fields. A schema keeps the order of its
properties.

Not responsible for: what a grammar may contain (the grammar process), tools (prompts.py).
"""

from __future__ import annotations

import json
from typing import Any

from http_gateway.wire.errors import ApiError
from http_gateway.wire.outputs import JsonObjectFormat, JsonSchemaFormat, Schema, StructuralTagFormat, StructuredOutputs
from http_gateway.wire.sampling import SamplingFields
from protos.engine.v1 import engine_pb2 as pb

_BACKENDS: dict[str, pb.Backend] = {
    "auto": pb.BACKEND_AUTO,
    "xgrammar": pb.BACKEND_XGRAMMAR,
    "llguidance": pb.BACKEND_LLGUIDANCE,
    "guidance": pb.BACKEND_LLGUIDANCE,
}
_UNENFORCED: dict[str, pb.Unenforced] = {
    "refuse": pb.UNENFORCED_REFUSE,
    "warn": pb.UNENFORCED_WARN,
    "verify": pb.UNENFORCED_VERIFY,
}
_WHITESPACE: dict[str, pb.Whitespace] = {
    "spaced": pb.WHITESPACE_SPACED,
    "compact": pb.WHITESPACE_COMPACT,
    "bounded": pb.WHITESPACE_BOUNDED,
    "any": pb.WHITESPACE_ANY,
}
_NUMBERS = (
    "max_string_length", "max_array_items", "max_number_digits", "max_whitespace", "max_backtracks", "hold_tokens",
)  # fmt: skip
_PATTERNS = {"": "compact", "[ ]?": "bounded", " ?": "bounded", r"[\n ]?": "bounded", r"[\n\t ]*": "any", r"\s*": "any"}
"""White space patterns of clients, and the policy that allows no more than them or the same."""


def grammar_of(fields: SamplingFields) -> pb.Grammar | None:
    """Return the request's grammar, None without one. Raises ApiError that names the field."""
    found = _found(fields)
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise ApiError(f"{found[1][0]}: {names} exclude each other", param=found[1][0], code="invalid_value")
    if not found:
        return None
    name, grammar = found[0]
    options = fields.structured_outputs or StructuredOutputs()
    _apply_options(grammar, options, fields, name)
    return grammar


def grammar_field(fields: SamplingFields) -> str | None:
    """Return the name of the field that has the request's grammar, None without one."""
    return next((name for name, _ in _found(fields)), None)


def _found(fields: SamplingFields) -> list[tuple[str, pb.Grammar]]:
    return [*_from_format(fields), *_from_structured(fields.structured_outputs), *_from_guided(fields)]


def schema_text(schema: Schema | str) -> str:
    """Return the text of a JSON Schema."""
    return schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)


def _from_format(fields: SamplingFields) -> list[tuple[str, pb.Grammar]]:
    name, form = "response_format", fields.response_format
    match form:
        case JsonObjectFormat():
            return [(name, pb.Grammar(json_object=True))]
        case JsonSchemaFormat(json_schema=named):
            where = f"{name}.json_schema.schema"
            if named.schema_ is None:
                raise ApiError(f"{where}: is required", param=where, code="missing_required_parameter")
            closed = True if named.strict else None
            return [(where, pb.Grammar(json_schema=schema_text(named.schema_), closed_objects=closed))]
        case StructuralTagFormat():
            return [(name, pb.Grammar(structural_tag=form.model_dump_json(exclude_none=True)))]
    return []


def _from_structured(options: StructuredOutputs | None) -> list[tuple[str, pb.Grammar]]:
    if options is None:
        return []
    o = options
    made: dict[str, pb.Grammar | None] = {
        "json": _when(o.json_, lambda v: pb.Grammar(json_schema=schema_text(v))),
        "regex": _when(o.regex, lambda v: pb.Grammar(regex=v)),
        "choice": _when(o.choice, lambda v: pb.Grammar(choice=pb.Choice(choices=v))),
        "grammar": _when(o.grammar, text_grammar),
        "lark": _when(o.lark, lambda v: pb.Grammar(lark=v)),
        "ebnf": _when(o.ebnf, lambda v: pb.Grammar(ebnf=v)),
        "json_object": _when(o.json_object or None, lambda v: pb.Grammar(json_object=v)),
        "structural_tag": _when(o.structural_tag, lambda v: pb.Grammar(structural_tag=schema_text(v))),
        "grammar_id": _when(o.grammar_id, lambda v: pb.Grammar(grammar_id=v)),
    }
    return [(f"structured_outputs.{name}", grammar) for name, grammar in made.items() if grammar is not None]


def _from_guided(fields: SamplingFields) -> list[tuple[str, pb.Grammar]]:
    made: dict[str, pb.Grammar | None] = {
        "guided_json": _when(fields.guided_json, lambda v: pb.Grammar(json_schema=schema_text(v))),
        "guided_regex": _when(fields.guided_regex, lambda v: pb.Grammar(regex=v)),
        "guided_choice": _when(fields.guided_choice, lambda v: pb.Grammar(choice=pb.Choice(choices=v))),
        "guided_grammar": _when(fields.guided_grammar, text_grammar),
    }
    return [(name, grammar) for name, grammar in made.items() if grammar is not None]


def text_grammar(text: str) -> pb.Grammar:
    """Return a grammar from its text: GBNF where it has `::=`, else Lark."""
    return pb.Grammar(ebnf=text) if "::=" in text else pb.Grammar(lark=text)


def _when(value: Any, make: Any) -> pb.Grammar | None:
    return None if value is None else make(value)


def _apply_options(grammar: pb.Grammar, options: StructuredOutputs, fields: SamplingFields, name: str) -> None:
    if options.disable_additional_properties:
        where = "structured_outputs.disable_additional_properties"
        if options.closed_objects is False:
            raise ApiError(f"{where} contradicts structured_outputs.closed_objects", param=where, code="invalid_value")
        grammar.closed_objects = True
    if options.closed_objects is not None:
        grammar.closed_objects = options.closed_objects
    backend = options.backend or fields.guided_decoding_backend
    if backend is not None:
        grammar.backend = _BACKENDS[backend]
    policies = {
        "structured_outputs.whitespace": options.whitespace,
        "structured_outputs.disable_any_whitespace": "compact" if options.disable_any_whitespace else None,
        "structured_outputs.whitespace_pattern": _policy(
            options.whitespace_pattern, "structured_outputs.whitespace_pattern"
        ),
        "guided_whitespace_pattern": _policy(fields.guided_whitespace_pattern, "guided_whitespace_pattern"),
    }
    given = {where: policy for where, policy in policies.items() if policy is not None}
    if len(set(given.values())) > 1:
        raise ApiError(f"{' and '.join(given)} contradict each other", param=[*given][1], code="invalid_value")
    for policy in given.values():
        grammar.whitespace = _WHITESPACE[policy]
    grammar.allow_unenforced = bool(options.allow_unenforced)
    if options.unenforced is not None:
        grammar.unenforced = _UNENFORCED[options.unenforced]
    for number in _NUMBERS:
        if (value := getattr(options, number)) is not None:
            setattr(grammar, number, value)


def _policy(pattern: str | None, where: str) -> str | None:
    if pattern is None:
        return None
    if pattern not in _PATTERNS:
        known, policies = ", ".join(map(repr, _PATTERNS)), ", ".join(_WHITESPACE)
        raise ApiError(
            f"{where}: {pattern!r} is not supported; use structured_outputs.whitespace ({policies}), or one of {known}",
            param=where,
            code="unsupported_parameter",
        )
    return _PATTERNS[pattern]
