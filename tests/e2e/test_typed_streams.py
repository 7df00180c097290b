"""Typed streams of the embedded model: the values of the events are those of the whole answer, with drafts, held tokens
and a grammar process that is killed; and a stream that is left frees its slot."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pydantic
import pytest

from benchmarks.quality.random_schemas import random_schema
from lockstep_client import AsyncClient, Client, Grammar, Value, ValueEventKind
from tests.e2e.conftest import RunningServer
from tests.waiting import eventually

pytestmark = pytest.mark.model


class Row(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=8)
    marks: list[bool] = pydantic.Field(max_length=3)


NESTED = {
    "type": "object",
    "properties": {
        "a/b": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "c": {"type": ["string", "null"], "maxLength": 10},
        "d": {"type": "object", "properties": {"e": {"type": "number"}}, "required": ["e"]},
    },
    "required": ["a/b", "c", "d"],
    "additionalProperties": False,
}
WORDS = {
    "type": "array",
    "items": {"type": "string", "minLength": 1, "maxLength": 8},
    "uniqueItems": True,
    "minItems": 4,
    "maxItems": 5,
}
VERIFIED = Grammar.schema(WORDS).with_options(unenforced="verify", hold_tokens=4)


def at(value: Any, pointer: str) -> Any:
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value


@pytest.mark.parametrize(
    ("asked", "drafts"),
    [
        pytest.param({"schema": NESTED, "seed": 1}, 4, id="nested"),
        pytest.param({"schema": NESTED, "seed": 1}, 0, id="nested, no drafts", marks=pytest.mark.slow),
        pytest.param({"schema": {"type": "integer"}, "seed": 2}, 4, id="scalar", marks=pytest.mark.slow),
        pytest.param({"schema": {"type": "integer"}, "seed": 2}, 0, id="scalar, no drafts", marks=pytest.mark.slow),
        pytest.param({"grammar": VERIFIED, "seed": 3}, 4, id="verified"),
        pytest.param({"grammar": VERIFIED, "seed": 3}, 0, id="verified, no drafts", marks=pytest.mark.slow),
    ],
)
async def test_events_have_the_values_of_the_answer_also_after_a_kill(
    server: RunningServer, asked: dict[str, Any], drafts: int
) -> None:
    options = {"max_tokens": 90, "temperature": 0.8, "logprobs": 0, "num_draft_tokens": drafts, **asked}
    seen: list[list[Value]] = []
    with Client(server.address, timeout_s=240) as client:
        for kills in (False, True):
            values: list[Value] = []
            with client.stream_values("An answer:\n", **options) as stream:
                for value in stream:
                    values.append(value)
                    if kills and len(values) == 1:
                        server.kill_grammar_process()
                answer = stream.answer()
            seen.append(values)
            whole = answer.parse(closed=True)
            for value in values:
                if value.kind is ValueEventKind.FINISHED:
                    assert value.value == at(whole, value.pointer)
            assert values[-1].pointer == ""
            total = sum(each.logprob for each in answer.logprobs)
            assert values[-1].logprob is not None
            # The root has all tokens but the one that ends the answer.
            assert len(answer.logprobs) - values[-1].tokens in (0, 1)
            rest = sum(each.logprob for each in answer.logprobs[values[-1].tokens :])
            assert values[-1].logprob == pytest.approx(total - rest, abs=1e-3)
            await eventually(lambda: client.stats().grammar_ready)
    assert seen[0] == seen[1]


@pytest.mark.slow
async def test_the_values_of_random_schemas_are_those_of_the_whole_answers(server: RunningServer) -> None:
    """Each answer twice, with other drafts; some hold tokens back, and the grammar process is killed in between."""
    draw = random.Random(1)
    asked = [(random_schema(seed), draw.choice((0, 2, 7)), draw.choice((None, 3))) for seed in range(16)]

    async def check(seed: int, schema: dict[str, Any], drafts: int, hold: int | None) -> list[Value]:
        grammar = Grammar.schema(schema).with_options(max_string_length=30, max_array_items=3, max_number_digits=4)
        if hold is not None:
            grammar = grammar.with_options(unenforced="verify", hold_tokens=hold)
        values: list[Value] = []
        async with client.stream_values(
            "Data: ",
            grammar=grammar,
            max_tokens=250,
            temperature=1.0,
            seed=seed,
            num_draft_tokens=drafts,
        ) as stream:
            async for value in stream:
                values.append(value)
                if seed % 13 == 5 and len(values) == 2:
                    server.kill_grammar_process()
            answer = await stream.answer()
        whole = answer.parse(closed=True)
        ended = [value for value in values if value.kind is ValueEventKind.FINISHED]
        assert ended[-1].pointer == ""
        assert ended[-1].value == whole
        for value in ended:
            assert value.value == at(whole, value.pointer)
        assert len(ended) == len(values) - len(ended) == _values_in(whole)
        return values

    async with AsyncClient(server.address, timeout_s=240) as client:
        first = await asyncio.gather(*(check(seed, *each) for seed, each in enumerate(asked)))
        again = await asyncio.gather(
            *(check(seed, schema, 7 - drafts, hold) for seed, (schema, drafts, hold) in enumerate(asked))
        )
    with Client(server.address) as other:
        await eventually(lambda: other.stats().grammar_ready)
    assert first == again
    assert sum(map(len, first)) > 150


def _values_in(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(_values_in, inner))


async def test_leaving_after_the_third_item_frees_the_slot(server: RunningServer) -> None:
    array = {"type": "array", "items": Row.model_json_schema() | {"additionalProperties": False}, "minItems": 40}
    with Client(server.address, timeout_s=240) as client:
        aborted = client.stats().generated_tokens
        rows = []
        for row in client.stream_items("Rows:\n", schema=array, item=Row, max_tokens=400, seed=5):
            rows.append(row)
            if len(rows) == 3:
                break
        assert [type(row) for row in rows] == [Row] * 3
        await eventually(lambda: client.stats().running == 0)
        assert client.stats().generated_tokens - aborted < 300, json.dumps([row.model_dump() for row in rows])
