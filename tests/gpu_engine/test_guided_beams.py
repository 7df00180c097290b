"""Beam searches after a reasoning, over the real grammar libraries: each beam has the state of its own tokens."""

from __future__ import annotations

import json
from functools import partial

import jsonschema
import pytest

from gpu_engine.api.request import FinishReason
from gpu_engine.core.engine import Engine
from gpu_engine.model.loader import LoadedModel
from grammar_service.backends.registry import NAMES
from tests.fakes import byte_tokenizer
from tests.gpu_engine.beams import BeamAnswer, search
from tests.gpu_engine.harness import ask, tokens, with_drafts
from tests.gpu_engine.library_sidecars import PATIENT, Sidecars

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["a", "ab", "b"]}, "years": {"type": "array", "items": {"type": "boolean"}}},
    "required": ["name", "years"],
    "additionalProperties": False,
}
THOUGHT = {"begin": "<t>", "end": "</t>", "open": True, "max_tokens": 9}
"""Its end is forced after nine tokens at the latest, so beams are in the answer soon."""
SOURCE = json.dumps({"format": {"type": "json_schema", "json_schema": SCHEMA}, "reasoning": THOUGHT})
SEARCHES = [
    partial(search, tokens(20, 3), 4, grammar=f"COMPOSED COMPACT {SOURCE}", max_tokens=60),
    partial(search, tokens(9, 5), 3, grammar=f"COMPOSED COMPACT {SOURCE}", max_tokens=44, penalty=0.0),
]


@pytest.fixture(scope="module", params=NAMES)
def sidecars(request: pytest.FixtureRequest, llama: LoadedModel) -> Sidecars:
    return Sidecars(request.param, llama)


def run(engine: Engine, answers: list[BeamAnswer]) -> list[list[list[int]]]:
    for answer in answers:
        answer.submit(engine)
    return [answer.wait().tokens for answer in answers]


def test_beams_part_in_the_reasoning_and_in_the_answer(sidecars: Sidecars) -> None:
    settings = partial(with_drafts, **PATIENT)
    with sidecars.engine(settings(0, max_batch_size=4), logs=False) as (engine, _):
        alone = [run(engine, [make()])[0] for make in SEARCHES]
    answers, other = [make() for make in SEARCHES], ask(tokens(30, 1), grammar=SEARCHES[0].keywords["grammar"])
    with sidecars.engine(settings(7, max_batch_size=8, overlap=True), logs=False) as (engine, _):
        other.submit(engine)
        assert run(engine, answers) == alone
        other.wait()
    for answer in answers:
        assert len({tuple(ids) for ids in answer.tokens}) == len(answer.tokens)
        assert set(answer.finishes) == {FinishReason.STOP}
        for ids in answer.tokens:
            thought, end, text = byte_tokenizer().decode(ids, skip_special_tokens=True).partition("</t>")
            assert end
            assert len(thought) + len(end) <= 9
            jsonschema.validate(json.loads(text), SCHEMA)
