"""Log-probabilities of the leaves of a JSON answer: which leaves, which of the tokens, and where they are refused."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_engine.api.errors import InvalidRequest
from gpu_engine.api.request import FinishReason, Logprobs, TokenEvent
from gpu_engine.front.text_output import Delta, SequenceOutput
from gpu_engine.front.tokens.field_logprobs import FieldLogprob, FieldScorer, leaves
from gpu_engine.front.tools.formats import Markers
from gpu_engine.front.tools.parts import AnswerLayout
from gpu_engine.front.validation import check
from protos.engine.v1 import engine_pb2 as pb
from tests.gpu_engine.front.serving import LIMITS
from tests.gpu_engine.made_requests import made

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def expected_leaves(value: Any, pointer: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from expected_leaves(inner, f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}")
    elif isinstance(value, list) and value:
        for i, inner in enumerate(value):
            yield from expected_leaves(inner, f"{pointer}/{i}")
    else:
        yield pointer, value


@settings(max_examples=40)
@given(value=VALUES, ascii_only=st.booleans(), indent=st.sampled_from([None, 1]))
def test_leaves_are_those_of_the_value_in_its_order(value: Any, ascii_only: bool, indent: int | None) -> None:
    text = f" {json.dumps(value, ensure_ascii=ascii_only, indent=indent)} "
    assert [(pointer, json.loads(text[a:b])) for pointer, a, b in leaves(text)] == list(expected_leaves(value))


@settings(max_examples=60)
@given(value=VALUES, cut=st.integers(0, 200))
def test_a_text_that_was_cut_off_has_its_whole_leaves(value: Any, cut: int) -> None:
    text = json.dumps(value)
    whole = list(leaves(text))
    found = list(leaves(text[:cut], complete=cut >= len(text)))
    assert found == whole[: len(found)]
    assert len(found) >= sum(end < cut for _, _, end in whole)


def test_a_key_with_half_a_surrogate_pair_has_a_pointer_that_can_be_sent() -> None:
    ((pointer, _, _),) = leaves(r'{"a\ud800/~":1}')
    assert pointer == "/a?~1~0"
    assert pb.FieldLogprob(pointer=pointer).SerializeToString()


def scored(
    chunks: Sequence[bytes], per_event: int = 1, finish: FinishReason = FinishReason.STOP, **options: Any
) -> tuple[Delta, list[Delta]]:
    """Return the last delta, and all, of an answer whose token i is chunks[i] and has the log-probability -2**-i."""

    def decode(ids: Sequence[int]) -> str:
        return b"".join(chunks[i] for i in ids).decode("utf-8", "replace")

    omit_text = not options.pop("with_text", True)
    request = made([], stop=options.pop("stop", ()), field_logprobs=True, omit_text=omit_text)
    output = SequenceOutput(request, decode, fields=FieldScorer(), **options)
    deltas = []
    for first in range(0, len(chunks), per_event):
        ids = tuple(range(first, min(first + per_event, len(chunks))))
        last = ids[-1] == len(chunks) - 1
        logprobs = tuple(Logprobs(-(2.0**-i), ()) for i in ids)
        deltas.append(output.take([TokenEvent(0, ids, logprobs, finish if last else None)]))
        if output.ended:
            break
    return deltas[-1], deltas


@settings(max_examples=60)
@given(value=VALUES, seed=st.integers(0, 2**32), per_event=st.integers(1, 5))
def test_a_leaf_has_the_tokens_that_hold_a_byte_of_it(value: Any, seed: int, per_event: int) -> None:
    text = json.dumps(value, ensure_ascii=False)
    data, draw = text.encode(), random.Random(seed)
    cuts = sorted({0, len(data), *(draw.randrange(len(data) + 1) for _ in range(draw.randrange(40)))})
    chunks = [data[a:b] for a, b in itertools.pairwise(cuts)]
    last, deltas = scored(chunks, per_event)
    expected = []
    for pointer, a, b in leaves(text):
        begin, end = len(text[:a].encode()), len(text[:b].encode())
        inside = [i for i in range(len(chunks)) if cuts[i] < end and cuts[i + 1] > begin]
        expected.append(FieldLogprob(pointer, sum(-(2.0**-i) for i in inside), len(inside)))
    assert last.fields == expected
    assert "".join(delta.text for delta in deltas) == text
    assert not any(delta.fields for delta in deltas[:-1])
    assert not any(delta.logprobs for delta in deltas), "they were not asked for"


def test_answers_without_text_that_were_cut_off_or_that_reason_first() -> None:
    last, deltas = scored([b'{"a":', b"1", b"}"], with_text=False)
    assert last.fields == [FieldLogprob("/a", -0.5, 1)]
    assert {delta.text for delta in deltas} == {""}
    chunks = [b'{"a":', b"1", b',"b":', b"23"]
    cut_off = scored(chunks, finish=FinishReason.GRAMMAR_INCOMPLETE)[0].fields
    assert [f.pointer for f in cut_off] == ["/a"], "only whole leaves count"
    last, deltas = scored([*chunks, b"4", b',"c":5', b"}"], stop=('"c"',))
    assert (last.matched_stop, "".join(delta.text for delta in deltas)) == ('"c"', '{"a":1,"b":234,')
    assert [(f.pointer, f.tokens) for f in last.fields] == [("/a", 1), ("/b", 2)]
    layout = AnswerLayout(markers=Markers("<think>", "</think>"))
    last, _ = scored([b"<think>", b'{"a":9}', b"</think>", b'\n{"a":', b"1", b"}"], parser=layout.parser())
    assert last.fields == [FieldLogprob("/a", -(2.0**-4), 1)]


@pytest.mark.parametrize("grammar", [None, pb.Grammar(regex="a"), pb.Grammar(choice=pb.Choice(choices=["a"]))])
def test_without_a_json_grammar_they_are_refused(grammar: pb.Grammar | None) -> None:
    request = pb.GenerateRequest(text="x", response=pb.ResponseOptions(per_field_logprobs=True), grammar=grammar)
    with pytest.raises(InvalidRequest, match=r"^response\.per_field_logprobs: needs a grammar of the kind json_object"):
        check(request, LIMITS, ())
    request.grammar.CopyFrom(pb.Grammar(json_object=True))
    assert check(request, LIMITS, ()).params.outputs.field_logprobs
