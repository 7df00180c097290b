"""Grammars by id: the same grammar has the same id, and an id is never another grammar."""

from __future__ import annotations

import dataclasses

import pytest

from gpu_engine.api.errors import GrammarNotConfigured, InvalidRequest, LockstepError, UnknownGrammar
from gpu_engine.api.request import GrammarKind, GrammarSpec
from gpu_engine.front.grammar_field import check_grammar
from gpu_engine.front.grammar_handles import GrammarHandles, grammar_id
from protos.engine.v1 import engine_pb2 as pb

SPEC = GrammarSpec(GrammarKind.REGEX, "a")


def test_every_field_is_part_of_an_id() -> None:
    others = [
        dataclasses.replace(SPEC, kind=GrammarKind.EBNF),
        dataclasses.replace(SPEC, source="b"),
        dataclasses.replace(SPEC, whitespace=1),
        dataclasses.replace(SPEC, backend=1),
        dataclasses.replace(SPEC, allow_unenforced=True),
    ]
    assert len({grammar_id(spec) for spec in (SPEC, *others)}) == 6
    assert grammar_id(SPEC) == grammar_id(dataclasses.replace(SPEC))


def test_the_least_recently_used_leaves_first() -> None:
    handles = GrammarHandles(3000)
    specs = [GrammarSpec(GrammarKind.REGEX, letter * 700) for letter in "abc"]
    names = [handles.keep(spec) for spec in specs[:2]]
    assert handles.spec(names[0]) == specs[0]
    names.append(handles.keep(specs[2]))
    assert handles.spec(names[0]) == specs[0]
    with pytest.raises(UnknownGrammar):
        handles.spec(names[1])
    assert handles.keep(specs[1]) == names[1]


@pytest.mark.parametrize(
    ("grammar", "error", "message"),
    [
        (None, InvalidRequest, "grammar: is required"),
        (pb.Grammar(), InvalidRequest, "grammar.spec"),
        (pb.Grammar(grammar_id="g-1"), InvalidRequest, "grammar.grammar_id: is returned by Compile"),
        (pb.Grammar(regex="a"), GrammarNotConfigured, "grammar=none"),
    ],
)
async def test_a_grammar_that_cannot_be_compiled(
    grammar: pb.Grammar | None, error: type[LockstepError], message: str
) -> None:
    with pytest.raises(error, match=message):
        await GrammarHandles(1 << 20).compile(pb.CompileRequest(grammar=grammar), None)


def test_an_id_allows_no_other_field_of_the_grammar_and_needs_a_server_that_compiles() -> None:
    for fields, problem in (
        ({"grammar_id": ""}, "grammar.grammar_id: is empty"),
        ({"whitespace": pb.WHITESPACE_ANY}, "grammar.whitespace"),
        ({"backend": pb.BACKEND_AUTO}, "grammar.backend"),
        ({"allow_unenforced": True}, "grammar.allow_unenforced"),
    ):
        with pytest.raises(InvalidRequest, match=problem):
            check_grammar(pb.Grammar(**{"grammar_id": "x", **fields}), GrammarHandles(1 << 20).spec)
    with pytest.raises(GrammarNotConfigured):
        check_grammar(pb.Grammar(grammar_id="x"))
