"""Typed streams of the embedded model: the values of the events are those of the whole answer, with drafts, held tokens
and a grammar process that is killed; and a stream that is left frees its slot."""

from __future__ import annotations

import json
from typing import Any

import pydantic
import pytest

from lockstep_client import Client, Grammar, Value, ValueEventKind
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


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize(
    "asked",
    [{"schema": NESTED, "seed": 1}, {"schema": {"type": "integer"}, "seed": 2}, {"grammar": VERIFIED, "seed": 3}],
    ids=["nested", "scalar", "verified"],
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
