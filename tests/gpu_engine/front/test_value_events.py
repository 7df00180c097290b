"""Events of the values of a JSON answer: they do not depend on the pieces, are the answer's values, and are final."""

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
from gpu_engine.front.responses import Responses
from gpu_engine.front.text_output import SequenceOutput
from gpu_engine.front.tokens.json_reader import MAX_POINTER, EventKind, JsonReader, ValueEvent
from gpu_engine.front.tokens.value_events import ScoredEvent, ValueEvents
from gpu_engine.front.validation import check
from protos.engine.v1 import engine_pb2 as pb
from tests.gpu_engine.front.serving import LIMITS
from tests.gpu_engine.made_requests import made

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def pieces_of(text: str, seed: int) -> list[str]:
    draw = random.Random(seed)
    cuts = sorted({0, len(text), *(draw.randrange(len(text) + 1) for _ in range(draw.randrange(40)))})
    return [text[a:b] for a, b in itertools.pairwise(cuts)]


def read(pieces: Sequence[str], items_of: str | None = None, *, complete: bool = True) -> list[ValueEvent]:
    reader = JsonReader(items_of)
    events = [event for piece in pieces for event in reader.push(piece)]
    return events + reader.finish() if complete else events


def part(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def expected(value: Any, pointer: str = "") -> Iterator[tuple[EventKind, str, Any]]:
    """Yield the start and the end of each value; the value of a container with parts is None."""
    yield EventKind.STARTED, pointer, None
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from expected(each, f"{pointer}/{part(str(key))}")
    yield EventKind.FINISHED, pointer, None if isinstance(value, dict | list) and value else value


def read_values(events: Sequence[ValueEvent]) -> list[tuple[EventKind, str, Any]]:
    return [(e.kind, e.pointer, None if e.text is None else json.loads(e.text)) for e in events]


@settings(max_examples=150)
@given(value=VALUES, seed=st.integers(0, 2**32), ascii_only=st.booleans(), indent=st.sampled_from([None, 1]))
def test_the_events_are_those_of_the_value_however_the_text_is_split(
    value: Any, seed: int, ascii_only: bool, indent: int | None
) -> None:
    text = f"\n {json.dumps(value, ensure_ascii=ascii_only, indent=indent)} "
    events = read(pieces_of(text, seed))
    assert read_values(events) == list(expected(value))
    assert events == read([text]) == read(list(text))
    for event in events:
        if event.kind is EventKind.FINISHED:
            assert event.text in (None, text[event.begin : event.end])


@settings(max_examples=80)
@given(items=st.lists(VALUES, max_size=4), seed=st.integers(0, 2**32), inside=st.booleans())
def test_the_items_of_an_array_come_whole_as_they_close(items: list[Any], seed: int, inside: bool) -> None:
    value, pointer = ({"x": [[]], "a/b": items, "y": items}, "/a~1b") if inside else (items, "")
    events = read(pieces_of(json.dumps(value), seed), pointer)
    found = [(e.pointer, json.loads(e.text or "")) for e in events if e.kind is EventKind.ITEM]
    assert found == [(f"{pointer}/{i}", item) for i, item in enumerate(items)]
    for event, after in itertools.pairwise(events):
        if after.kind is EventKind.ITEM:
            assert (event.kind, event.pointer, event.end) == (EventKind.FINISHED, after.pointer, after.end)


@settings(max_examples=80)
@given(value=VALUES, cut=st.integers(0, 200), seed=st.integers(0, 2**32))
def test_a_text_that_was_cut_off_has_the_first_events_of_the_whole_one(value: Any, cut: int, seed: int) -> None:
    text = json.dumps(value)
    cut, whole = min(cut, len(text)), read([text])
    found = read(pieces_of(text[:cut], seed), complete=False)
    assert found == whole[: len(found)]
    assert len(found) >= sum((e.end or e.begin) < cut for e in whole)
    assert all(e.end <= cut for e in found)


@pytest.mark.parametrize(
    ("text", "leaves"),
    [
        (r'{"a":1,"a":[2]}', [("/a", "1"), ("/a/0", "2")]),
        (r'{"a\ud800/~":1}', [("/a?~1~0", "1")]),
        (r'{"\u0061\ud83d\ude00":"\\\"\ud83d\ude00"}', [("/a\U0001f600", r'"\\\"\ud83d\ude00"')]),
        ("[[[]],{}]", [("/0/0", "[]"), ("/1", "{}")]),
        ("[1e5,-0.5E-2 ]", [("/0", "1e5"), ("/1", "-0.5E-2")]),
        ('{"":{"":null}}', [("//", "null")]),
        ("12", [("", "12")]),
        (" true", [("", "true")]),
        ('"a" rest', [("", '"a"')]),
        ("no json", []),
        ("[nope]", []),
    ],
)
def test_leaves_of_texts_with_special_places(text: str, leaves: list[tuple[str, str]]) -> None:
    for pieces in ([text], list(text)):
        found = [(e.pointer, e.text) for e in read(pieces) if e.kind is EventKind.FINISHED and e.text is not None]
        assert found == leaves


def test_only_a_number_waits_for_the_character_after_it() -> None:
    reader = JsonReader()
    assert [e.kind for e in reader.push("[true")] == [EventKind.STARTED, EventKind.STARTED, EventKind.FINISHED]
    assert [e.kind for e in reader.push(",12")] == [EventKind.STARTED]
    assert [(e.kind, e.text) for e in reader.push("3 ")] == [(EventKind.FINISHED, "123")]


def test_a_container_with_a_long_pointer_is_reported_whole() -> None:
    key = "k" * MAX_POINTER
    for value in ({key: {"a": [1, {"b": 2}], "c": []}}, [[{key: [{"a": 1}, 2]}]]):
        events = read(pieces_of(json.dumps(value), 3), "")
        longest = max(events, key=lambda e: len(e.pointer))
        assert len(longest.pointer) <= MAX_POINTER + len("/0/0/")
        whole = [e for e in events if e.kind is EventKind.FINISHED and e.text is not None]
        assert json.loads(whole[-1].text or "") in ({"a": [1, {"b": 2}], "c": []}, [{"a": 1}, 2])
    deep = read(["["] * 4000 + ["1"] + ["]"] * 4000)
    assert sum(len(e.pointer) for e in deep) < MAX_POINTER * MAX_POINTER
    assert max(len(e.text or "") for e in deep) > 6000, "the array below is whole"


def test_a_long_string_is_kept_once() -> None:
    text = json.dumps(["x" * 400_000, "y"])
    reader = JsonReader()
    events = [e for at in range(0, len(text), 4) for e in reader.push(text[at : at + 4])]
    assert [len(e.text or "") for e in events if e.kind is EventKind.FINISHED] == [400_002, 3, 0]


def output_of(chunks: Sequence[bytes], *, items_of: str | None = None, **options: Any) -> SequenceOutput:
    def decode(ids: Sequence[int]) -> str:
        return b"".join(chunks[i] for i in ids).decode("utf-8", "replace")

    values = ValueEvents(values=True, items_of=items_of, scored=options.pop("scored", True))
    return SequenceOutput(made([], value_events=True, items_of=items_of, **options), decode, values=values)


def taken(
    output: SequenceOutput, count: int, finish: FinishReason | None = FinishReason.STOP, per_event: int = 1
) -> list[tuple[str, list[ScoredEvent]]]:
    deltas = []
    for first in range(0, count, per_event):
        ids = tuple(range(first, min(first + per_event, count)))
        logprobs = tuple(Logprobs(-(2.0**-i), ()) for i in ids)
        delta = output.take([TokenEvent(0, ids, logprobs, finish if ids[-1] == count - 1 else None)])
        deltas.append((delta.text, delta.values))
        if output.ended:
            break
    return deltas


@settings(max_examples=80)
@given(value=VALUES, seed=st.integers(0, 2**32), per_event=st.integers(1, 5))
def test_a_value_has_the_tokens_that_hold_a_byte_of_it(value: Any, seed: int, per_event: int) -> None:
    text = json.dumps(value, ensure_ascii=False)
    data, draw = text.encode(), random.Random(seed)
    cuts = sorted({0, len(data), *(draw.randrange(len(data) + 1) for _ in range(draw.randrange(40)))})
    chunks = [data[a:b] for a, b in itertools.pairwise(cuts)]
    deltas = taken(output_of(chunks), len(chunks), per_event=per_event)
    scored = [each for _, values in deltas for each in values]
    assert [each.event for each in scored] == read([text])
    for each in scored:
        begin, end = (len(text[:at].encode()) for at in (each.event.begin, each.event.end))
        inside = [i for i in range(len(chunks)) if cuts[i] < end and cuts[i + 1] > begin]
        ended = each.event.kind is EventKind.FINISHED
        assert each.logprob == (sum(-(2.0**-i) for i in inside) if ended else None)
        assert each.tokens == (len(inside) if ended else 0)
    seen = ""
    for delta_text, values in deltas:
        seen += delta_text
        assert all(each.event.end <= len(seen) for each in values), "an event is never ahead of the text"


def test_without_log_probabilities_events_have_none() -> None:
    chunks = [b'{"a"', b":1", b"}"]
    scored = [each for _, values in taken(output_of(chunks, scored=False), 3) for each in values]
    assert [(each.logprob, each.tokens) for each in scored] == [(None, 0)] * 4


def test_values_within_a_possible_stop_string_wait_and_cut_values_do_not_finish() -> None:
    chunks = [b'[1,"x', b'"', b",2", b",3", b"]"]
    deltas = taken(output_of(chunks, stop=('",2,4',)), len(chunks))
    assert [[e.event.pointer for e in values if e.event.kind is EventKind.FINISHED] for _, values in deltas] == [
        ["/0"], [], [], ["/1", "/2"], ["/3", ""],
    ]  # fmt: skip
    stopped = taken(output_of(chunks, stop=(",3",)), len(chunks))
    assert [e.event.pointer for _, v in stopped for e in v if e.event.kind is EventKind.FINISHED] == ["/0", "/1"]


@pytest.mark.parametrize(
    ("finish", "finished"),
    [
        (FinishReason.STOP, [""]),
        (FinishReason.GRAMMAR_CLOSED, [""]),
        (FinishReason.GRAMMAR_INCOMPLETE, []),
        (FinishReason.ABORTED, []),
    ],
)
def test_a_number_at_the_top_ends_with_a_whole_answer(finish: FinishReason, finished: list[str]) -> None:
    ((_, first), (_, last)) = taken(output_of([b"1", b"2"]), 2, finish)
    assert [each.event.kind for each in first] == [EventKind.STARTED]
    assert [each.event.pointer for each in last] == finished


@pytest.mark.parametrize("options", [{}, {"whole": True}, {"cumulative": True}, {"omit_text": True}])
def test_responses_have_each_event_once(options: dict[str, Any]) -> None:
    chunks = [b'{"a":', b"[1", b",2]", b"}"]
    output = output_of(chunks, items_of="/a", omit_text=options.get("omit_text", False))
    responses = Responses(pb.ResponseOptions(omit_token_ids=True, **options))
    sent = []
    for i in range(len(chunks)):
        finish = FinishReason.STOP if i == len(chunks) - 1 else None
        delta = output.take([TokenEvent(0, (i,), (Logprobs(-1.0, ()),), finish)])
        sent += responses.respond(output, delta)
    events = [event for response in sent for event in response.value_events]
    kinds = pb.ValueEvent
    assert [(e.kind, e.pointer, e.value_json) for e in events] == [
        (kinds.KIND_STARTED, "", ""), (kinds.KIND_STARTED, "/a", ""), (kinds.KIND_STARTED, "/a/0", ""),
        (kinds.KIND_FINISHED, "/a/0", "1"), (kinds.KIND_ITEM, "/a/0", "1"), (kinds.KIND_STARTED, "/a/1", ""),
        (kinds.KIND_FINISHED, "/a/1", "2"), (kinds.KIND_ITEM, "/a/1", "2"), (kinds.KIND_FINISHED, "/a", ""),
        (kinds.KIND_FINISHED, "", ""),
    ]  # fmt: skip
    assert [e.HasField("value_json") for e in events] == [bool(e.value_json) for e in events]
    assert {e.logprob for e in events if e.pointer == ""} == {0.0, -4.0}
    if options.get("whole"):
        assert len(sent) == 1


JSON = pb.Grammar(json_object=True)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({}, r"value_events: needs a grammar of the kind json_object"),
        ({"grammar": pb.Grammar(regex="a")}, r"value_events: needs a grammar of the kind json_object"),
        ({"grammar": JSON, "reasoning": pb.Reasoning()}, r"value_events: is not allowed together with reasoning"),
        ({"grammar": JSON, "beam_search": pb.BeamSearch(beam_width=2)}, r"value_events: is not allowed .* beam_search"),
    ],
)
def test_what_is_not_one_json_value_is_refused(more: dict[str, Any], problem: str) -> None:
    request = pb.GenerateRequest(text="x", response=pb.ResponseOptions(value_events=True), **more)
    with pytest.raises(InvalidRequest, match=rf"^response\.{problem}"):
        check(request, LIMITS, ())


def test_reasoning_that_is_turned_off_is_no_obstacle() -> None:
    response = pb.ResponseOptions(value_events=True)
    request = pb.GenerateRequest(text="x", response=response, grammar=JSON, reasoning=pb.Reasoning(enabled=False))
    assert check(request, LIMITS, ()).params.outputs.value_events


@pytest.mark.parametrize("pointer", ["a", "/a~2", "/" * 1025, "/~"])
def test_items_need_a_json_pointer(pointer: str) -> None:
    request = pb.GenerateRequest(text="x", response=pb.ResponseOptions(items_of=pointer), grammar=JSON)
    with pytest.raises(InvalidRequest, match=r"^response\.items_of: "):
        check(request, LIMITS, ())
    for right in ("", "/a/0/~0~1", "/" * 1024):
        request.response.items_of = right
        assert check(request, LIMITS, ()).params.outputs.items_of == right
