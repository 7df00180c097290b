"""Grammars by id: the same grammar has the same id, and an id is never another grammar."""

from __future__ import annotations

import dataclasses

import pytest

from gpu_engine.api.errors import GrammarNotConfigured, InvalidRequest, LockstepError, UnknownGrammar
from gpu_engine.api.ports import Compiled
from gpu_engine.api.request import GrammarKind, GrammarSpec
from gpu_engine.front.grammar_field import check_grammar
from gpu_engine.front.grammar_handles import GrammarHandles, grammar_id
from protos.engine.v1 import engine_pb2 as pb

SPEC = GrammarSpec(GrammarKind.REGEX, "a")


async def compiled(spec: GrammarSpec) -> Compiled:
    return Compiled(
        f"inner {spec.source}", 2, True, 1.5, ("w1", "w2"), memory_bytes=7, min_tokens=3, known_answer_tokens=5
    )


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


async def test_what_was_compiled_is_found_by_its_id() -> None:
    handles = GrammarHandles(1 << 20)
    request = pb.CompileRequest(grammar=pb.Grammar(regex="a"))
    response = await handles.compile(request, compiled)
    assert response == pb.CompileResponse(
        grammar_id=grammar_id(SPEC),
        backend=pb.BACKEND_LLGUIDANCE,
        cache_hit=True,
        compile_ms=1.5,
        memory_bytes=7,
        min_tokens=3,
        known_answer_tokens=5,
        warnings=["w1", "w2"],
    )
    assert check_grammar(pb.Grammar(grammar_id=response.grammar_id), handles.spec) == SPEC


async def test_what_failed_has_no_id() -> None:
    handles = GrammarHandles(1 << 20)

    async def refuses(spec: GrammarSpec) -> Compiled:
        raise InvalidRequest("grammar", "line 3")

    with pytest.raises(InvalidRequest, match="line 3"):
        await handles.compile(pb.CompileRequest(grammar=pb.Grammar(regex="a")), refuses)
    with pytest.raises(UnknownGrammar, match="call Compile"):
        handles.spec(grammar_id(SPEC))


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
    ("request_", "error", "message"),
    [
        (pb.CompileRequest(), InvalidRequest, "grammar: is required"),
        (pb.CompileRequest(grammar=pb.Grammar()), InvalidRequest, "grammar.spec"),
        (
            pb.CompileRequest(grammar=pb.Grammar(grammar_id="g-1")),
            InvalidRequest,
            "grammar.grammar_id: is returned by Compile",
        ),
        (pb.CompileRequest(grammar=pb.Grammar(regex="a")), GrammarNotConfigured, "grammar=none"),
    ],
)
async def test_refused(request_: pb.CompileRequest, error: type[LockstepError], message: str) -> None:
    with pytest.raises(error, match=message):
        await GrammarHandles(1 << 20).compile(request_, None)


@pytest.mark.parametrize(
    ("grammar", "field"),
    [
        (pb.Grammar(grammar_id=""), "grammar.grammar_id: is empty"),
        (pb.Grammar(grammar_id="x", whitespace=pb.WHITESPACE_ANY), "grammar.whitespace"),
        (pb.Grammar(grammar_id="x", backend=pb.BACKEND_AUTO), "grammar.backend"),
        (pb.Grammar(grammar_id="x", allow_unenforced=True), "grammar.allow_unenforced"),
    ],
)
def test_an_id_allows_no_other_field_of_the_grammar(grammar: pb.Grammar, field: str) -> None:
    with pytest.raises(InvalidRequest, match=field):
        check_grammar(grammar, GrammarHandles(1 << 20).spec)


def test_an_id_needs_a_server_that_compiles() -> None:
    with pytest.raises(GrammarNotConfigured):
        check_grammar(pb.Grammar(grammar_id="x"))
