"""Values and items of a stream: built from events, by both clients, and what leaving such a stream does."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Annotated, Any

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_engine.front.tokens.json_reader import JsonReader
from lockstep_client import AsyncClient, Keywords, NotParsed, Value, ValueEventKind
from lockstep_client.answers import delta_of
from lockstep_client.values import Values
from protos.engine.v1 import engine_pb2 as pb
from tests.client.scripted import Scripted, Twin, end

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


class Invoice(pydantic.BaseModel):
    number: int
    payer: str = pydantic.Field(max_length=20)


INVOICES = [Invoice(number=i, payer=f"p{i}") for i in range(5)]
TEXT = json.dumps([invoice.model_dump() for invoice in INVOICES])


def responses(text: str, items_of: str | None, *, values: bool = True, size: int = 7) -> Iterator[pb.GenerateResponse]:
    """Yield the responses of the engine for an answer in pieces of `size` characters."""
    reader = JsonReader(items_of)
    for at in range(0, len(text), size):
        response = pb.GenerateResponse(text=text[at : at + size], token_ids=[at])
        events = reader.push(text[at : at + size]) + (reader.finish() if at + size >= len(text) else [])
        for event in events:
            kind, of_type = (
                pb.ValueEvent.Kind.ValueType(event.kind.value),
                pb.ValueEvent.Type.ValueType(event.type.value),
            )
            if values or kind == pb.ValueEvent.KIND_ITEM:
                response.value_events.add(kind=kind, pointer=event.pointer, type=of_type, value_json=event.text)
        yield response


def at(value: Any, pointer: str) -> Any:
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value


@settings(max_examples=100)
@given(value=JSON, size=st.integers(1, 9))
def test_a_value_that_ended_is_the_one_of_the_whole_answer(value: Any, size: int) -> None:
    values = Values()
    found = [
        each for response in responses(json.dumps(value), "", size=size) for each in values.take(delta_of(response))
    ]
    ended = [each for each in found if each.kind is ValueEventKind.FINISHED]
    assert ended[-1].pointer == ""
    for each in ended:
        assert each.value == at(value, each.pointer)
    items = [each.value for each in found if each.kind is ValueEventKind.ITEM]
    assert items == (value if isinstance(value, list) else [])
    assert all(each.value is None for each in found if each.kind is ValueEventKind.STARTED)


def test_the_last_of_equal_keys_is_the_value_of_the_object() -> None:
    values = Values()
    found = [each for response in responses('{"a":[1],"a":{"b":2}}', None) for each in values.take(delta_of(response))]
    assert [each.value for each in found if each.pointer == "/a" and each.value is not None] == [[1], {"b": 2}]
    assert found[-1].value == {"a": {"b": 2}}


@pytest.mark.parametrize(("text", "items_of"), [("9" * 5000, None), ("[" + "9" * 5000 + "]", "")])
def test_a_number_that_python_does_not_read_is_not_parsed(text: str, items_of: str | None) -> None:
    deltas = [delta_of(response) for response in responses(text, items_of, values=items_of is None)]
    with pytest.raises(NotParsed, match="a value of the answer is none of its type"):
        [Values().take(delta) for delta in deltas]


async def read(twin: Twin, method: str, *arguments: Any, **options: Any) -> list[Any]:
    function = getattr(twin.client, method)
    if isinstance(twin.client, AsyncClient):
        async with function(*arguments, **options) as stream:
            return [each async for each in stream]

    def all_of_them() -> list[Any]:
        with function(*arguments, **options) as stream:
            return list(stream)

    return await asyncio.to_thread(all_of_them)


async def test_items_are_objects_of_their_type(twin: Twin, server: Scripted) -> None:
    server.script = lambda request, context: [*responses(TEXT, "", values=False), end()]
    assert await read(twin, "stream_items", "x", schema=list[Invoice]) == INVOICES
    sent = server.requests[0]
    assert (sent.response.HasField("items_of"), sent.response.items_of, sent.response.value_events) == (True, "", False)
    assert json.loads(sent.grammar.json_schema)["items"]["properties"]["payer"]["maxLength"] == 20
    at_least = Annotated[list[Invoice], Keywords(minItems=2)]
    assert await read(twin, "stream_items", "x", schema=at_least) == INVOICES
    inside = f'{{"invoices": {TEXT}}}'
    server.script = lambda request, context: [*responses(inside, "/invoices", values=False), end()]
    within: dict[str, Any] = {"messages": "Hello", "items_of": "/invoices"}
    schema = {"type": "object"}
    assert await read(twin, "stream_items", schema=schema, item=Invoice, **within) == INVOICES
    assert await read(twin, "stream_items", schema=schema, **within) == json.loads(TEXT)
    assert server.requests[-1].response.items_of == "/invoices"


async def test_values_come_as_they_end_and_the_answer_after_them(twin: Twin, server: Scripted) -> None:
    server.script = lambda request, context: [*responses('{"a": [1, "x"]}', None), end()]
    found = await read(twin, "stream_values", "x", schema={"type": "object"})
    assert [(each.kind.value, each.pointer, each.value) for each in found] == [
        ("started", "", None), ("started", "/a", None), ("started", "/a/0", None), ("finished", "/a/0", 1),
        ("started", "/a/1", None), ("finished", "/a/1", "x"), ("finished", "/a", [1, "x"]),
        ("finished", "", {"a": [1, "x"]}),
    ]  # fmt: skip
    assert all(isinstance(each, Value) for each in found)
    assert server.requests[0].response.value_events


async def test_an_answer_that_was_cut_off_says_so_after_its_items(twin: Twin, server: Scripted) -> None:
    server.script = lambda request, context: [
        *responses(TEXT[:70], "", values=False), end(reason="GRAMMAR_INCOMPLETE")
    ]  # fmt: skip
    got: list[Invoice] = []

    async def collect() -> None:
        if isinstance(twin.client, AsyncClient):
            async for invoice in twin.client.stream_items("x", schema=list[Invoice]):
                got.append(invoice)
        else:
            for invoice in twin.client.stream_items("x", schema=list[Invoice]):
                got.append(invoice)

    with pytest.raises(NotParsed, match="GRAMMAR_INCOMPLETE"):
        await collect()
    assert got == INVOICES[: len(got)]
    assert got
    server.script = lambda request, context: [*responses('[{"number": "no"}]', "", values=False), end()]
    with pytest.raises(NotParsed, match="a value of the answer is none of its type"):
        await read(twin, "stream_items", "x", schema=list[Invoice])


@pytest.mark.parametrize("closes", [True, False])
async def test_leaving_after_the_third_item_cancels_the_call(twin: Twin, server: Scripted, closes: bool) -> None:
    ended = threading.Event()

    def script(request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        context.add_callback(ended.set)
        yield from responses(TEXT[:-1], "", values=False)
        while context.is_active():
            yield pb.GenerateResponse(text=" ")
            threading.Event().wait(0.01)

    def leave() -> list[Invoice]:
        got: list[Invoice] = []
        stream = twin.client.stream_items("x", schema=list[Invoice])
        for invoice in stream:  # type: ignore[union-attr]
            got.append(invoice)
            if len(got) == 3:
                break
        assert not ended.is_set()
        if closes:
            stream.close()  # type: ignore[union-attr]
        return got

    server.script = script
    if isinstance(twin.client, AsyncClient):
        got: list[Invoice] = []
        stream = twin.client.stream_items("x", schema=list[Invoice])
        async for invoice in stream:
            got.append(invoice)
            if len(got) == 3:
                break
        assert not ended.is_set()
        if closes:
            await stream.aclose()
        del stream
    else:
        got = await asyncio.to_thread(leave)
    assert got == INVOICES[:3]
    assert await asyncio.to_thread(ended.wait, 60)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"schema": dict[str, int]}, "item: is required"),
        ({"schema": list[int], "items_of": "/a"}, "item: is required"),
        ({"schema": list[int], "n": 2}, "n: is not for items"),
        ({"schema": list[int], "omit_text": True}, "omit_text: is not for items"),
        ({"schema": list[int], "messages": "x"}, "prompt, messages: exactly one"),
    ],
)
async def test_wrong_arguments_are_refused(twin: Twin, server: Scripted, given: dict[str, Any], problem: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{problem}"):
        await read(twin, "stream_items", "x", **given)
    assert not server.requests
