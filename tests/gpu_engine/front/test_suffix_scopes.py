"""Whose answers draft for a request: clients and grammars never share a scope by accident."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.api.limits import Limits
from gpu_engine.api.request import GrammarKind, GrammarSpec, SuffixScope
from gpu_engine.front.suffix_scopes import (
    MAX_LITERALS,
    MAX_SEEDED_CHARS,
    MAX_SEEDED_SCOPES,
    SuffixScopes,
    client_identity,
    client_key,
    literals,
)
from gpu_engine.front.validation import check
from protos.engine.v1 import engine_pb2 as pb
from tests.fakes import ByteTokenizer
from tests.gpu_engine.front.serving import LIMITS


def scopes(**engine: Any) -> SuffixScopes:
    config = EngineConfig(**{"device": "cpu", **engine})
    limits = Limits.of(config, ServerConfig(), vocab_size=320, max_model_len=256)
    return SuffixScopes(ByteTokenizer(), limits)


def scope_of(made: SuffixScopes, client: bytes = b"", **fields: Any) -> SuffixScope | None:
    return made.of(check(pb.GenerateRequest(text="hi", **fields), LIMITS, ()).params, client)


def schema(value: Any, **options: Any) -> pb.Grammar:
    return pb.Grammar(json_schema=json.dumps(value), **options)


NAMES = {"type": "object", "properties": {"name": {"type": "string"}}}
OTHER = {"type": "object", "properties": {"age": {"type": "integer"}}}


def test_equal_grammars_share_a_scope_and_others_do_not() -> None:
    made = scopes()
    one, again = scope_of(made, grammar=schema(NAMES)), scope_of(made, grammar=schema(NAMES))
    assert one == again is not None
    others = (schema(OTHER), schema(NAMES, whitespace=pb.WHITESPACE_COMPACT))
    found = [one, *(scope_of(made, grammar=grammar) for grammar in others)]
    assert len({each.key for each in found if each}) == 3


def test_salts_and_known_clients_divide_every_scope() -> None:
    made = scopes()
    for client in (b"", b"token\0one"):
        same = [scope_of(made, client, grammar=schema(NAMES), cache_salt=salt) for salt in ("a", "b", "a", "")]
        assert same[0] == same[2] is not None
        assert len({scope.key for scope in same if scope}) == 3
    guided, clients = {"grammar": schema(NAMES)}, (b"", b"token\0a", b"token\0b")
    found = [scope_of(made, client, **fields) for client in clients for fields in (guided, {})]
    assert len({scope.key for scope in found if scope}) == 5
    # Free text of an unknown client has no scope, with or without a salt, unless the setting says so.
    assert scope_of(made) is scope_of(made, cache_salt="a") is None
    assert scope_of(scopes(draft_index_shared=True)) is not None


@pytest.mark.parametrize(
    ("engine", "fields"),
    [
        ({"draft_index_bytes": 0}, {}),
        ({"drafter": "none"}, {}),
        ({"drafter": "grammar"}, {}),
        ({"num_draft_tokens": 0}, {}),
        ({"device": "cuda"}, {}),
        ({}, {"speculation": pb.Speculation(draft_index=False)}),
        ({}, {"speculation": pb.Speculation(num_draft_tokens=0)}),
    ],
)
def test_no_scope_without_an_index_or_where_the_request_wants_none(
    engine: dict[str, Any], fields: dict[str, Any]
) -> None:
    assert scope_of(scopes(**engine), b"token\0a", grammar=schema(NAMES), **fields) is None
    assert scope_of(scopes(), b"token\0a", grammar=schema(NAMES), speculation=pb.Speculation(draft_index=True))


def test_a_token_identifies_a_client_only_if_the_server_checks_tokens() -> None:
    sent = [("user-agent", "x"), ("authorization", "Bearer secret")]
    assert client_identity(sent, None, checks_tokens=True) == client_identity(
        [("authorization", b"bearer  secret")], None, checks_tokens=True
    )
    assert client_identity(sent, None, checks_tokens=False) == b""
    assert client_identity(sent, [b"alice"], checks_tokens=False) == b"certificate\0alice"
    assert client_identity([], [], checks_tokens=False) == b""
    names = [client_key(identity, claimed) for identity in (b"alice", b"bob", b"") for claimed in ("", "x", "y")]
    assert names[:3] == names[:1] * 3, "a known client is not another one by what it says"
    assert (len(set(names)), names[6]) == (5, "")


def test_seeds_are_the_tokens_of_what_a_schema_spells_out() -> None:
    value = {
        "properties": {"tool": {"const": "search"}, "unit": {"enum": ["celsius", 3, None]}},
        "anyOf": [{"properties": {"inner": {}}}],
        "$defs": {"x": {"type": "string", "description": "prose is no literal"}},
    }
    spec = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(value))
    assert list(literals(spec)) == [', "tool": ', ', "unit": ', ' "search"', ' "celsius"', ', "inner": ']
    found = scope_of(scopes(), grammar=schema(value))
    assert found is not None
    assert found.seeds[2] == tuple(ByteTokenizer().encode(' "search"'))


def test_seeds_of_choices_and_structural_tags() -> None:
    assert list(literals(GrammarSpec(GrammarKind.CHOICE, '["yes", "no"]'))) == ["yes", "no"]
    tag = {"structures": [{"begin": "<call>", "schema": NAMES, "end": "</call>"}]}
    found = set(literals(GrammarSpec(GrammarKind.STRUCTURAL_TAG, json.dumps(tag))))
    assert found == {"<call>", "</call>", ', "name": '}


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (GrammarKind.REGEX, "abc"),
        (GrammarKind.JSON_SCHEMA, "{not json"),
        (GrammarKind.JSON_SCHEMA, "[" * 60_000),
        (GrammarKind.JSON_SCHEMA, json.dumps({"const": "a", "x": "y" * MAX_SEEDED_CHARS})),
        (GrammarKind.JSON_SCHEMA, '{"properties": 3, "enum": "abc", "const": {"a": 1}}'),
    ],
)
def test_what_cannot_be_read_gives_no_seeds(kind: GrammarKind, source: str) -> None:
    assert list(literals(GrammarSpec(kind, source))) == []


def test_seeds_are_bounded() -> None:
    made = scopes()
    many = {"enum": [f"value {number}" for number in range(3000)]}
    found = scope_of(made, grammar=schema(many))
    assert found is not None
    assert len(found.seeds) == MAX_LITERALS
    for number in range(MAX_SEEDED_SCOPES + 5):
        scope_of(made, grammar=schema({"const": f"value {number}"}))
    assert len(made._seeds) == MAX_SEEDED_SCOPES
