"""The figures of `python -m benchmarks exact`: distances, their noise, and the verdict."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator

import pytest

from benchmarks.harness.measure import Answer, EngineTimes
from benchmarks.quality.exact import (
    SCORED_AT_ONCE,
    SUBJECTS,
    Outcome,
    Scorer,
    Subject,
    Wanted,
    distance,
    main,
    noise,
)
from protos.engine.v1 import engine_pb2 as pb

WANTED = Wanted({" yes": 0.75, " no": 0.25}, math.log(0.5))


def answer(text: str, tokens: tuple[int, ...] = (1, 2), finish: str = "stop") -> Answer:
    times = EngineTimes(1.0, 2.0, 0.0, 6, 0, 0, 0, exact_tries=3, exact_tokens=6)
    return Answer("a", text, tokens if finish == "stop" else (), finish, 0.0, 0.0, 0.0, 6, times)


def outcome(yes: int, no: int, *, repeated: tuple[Answer, ...] = (), given_up: int = 0) -> Outcome:
    exact = (*[answer(" yes")] * yes, *[answer(" no")] * no, *[answer("", finish="grammar_inexact")] * given_up)
    return Outcome(SUBJECTS[0], WANTED, exact, (answer(" no"),) * 4, repeated)


def test_a_distance_is_half_of_the_sum_of_differences() -> None:
    assert distance([" yes"] * 3 + [" no"], WANTED) == 0.0
    assert distance([" no"], WANTED) == 0.75
    assert distance(["other"], WANTED) == 1.0
    assert math.isnan(distance([], WANTED))


def test_noise_falls_with_the_number_of_answers() -> None:
    assert 0.0 < noise(WANTED, 10_000) < noise(WANTED, 100) < 0.3


def test_answers_outside_the_noise_or_changed_by_drafts_fail() -> None:
    assert outcome(300, 100).is_exact
    assert not outcome(100, 300).is_exact
    assert outcome(300, 100, repeated=(answer(" yes"),)).is_exact
    assert not outcome(300, 100, repeated=(answer(" yes", tokens=(1, 3)),)).is_exact


def test_a_row_has_the_cost_of_an_answer() -> None:
    row = outcome(3, 1, given_up=1).row()
    assert row[1:6] == ["3", "5.0e-01", "0.0000", pytest.approx(row[4]), "0.7500"]
    assert row[6:10] == ["3.00", "3.75", "6.0 / 6.0", "20.0%"]


def test_each_grammar_has_a_name_and_distinct_texts() -> None:
    assert len({each.name for each in SUBJECTS}) == len(SUBJECTS) >= 12
    assert all(len(set(each.texts)) == len(each.texts) > 1 for each in SUBJECTS)


class Uniform:
    """A server whose tokens have a probability of 1 in 200 each; notes how many calls it has at once."""

    def __init__(self) -> None:
        self.calls = self.most = 0

    async def unary(self, *_: object) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(token_ids=[7])

    async def stream(self, *_: object) -> AsyncIterator[pb.GenerateResponse]:
        self.calls += 1
        self.most = max(self.most, self.calls)
        await asyncio.sleep(0)
        self.calls -= 1
        yield pb.GenerateResponse(prompt_logprobs=[pb.TokenLogprobs(logprob=-math.log(200))])


async def test_a_server_scores_a_bounded_number_of_spellings_at_once() -> None:
    texts = tuple(chr(code) for code in range(0x21, 0x7F))
    server = Uniform()
    scorer = Scorer(server, dict(enumerate(texts)), [1000])  # type: ignore[arg-type]  # it has what is used
    wanted = await scorer.wanted(Subject("each", "", pb.Grammar(), texts), lambda: None)
    assert wanted.probabilities == pytest.approx(dict.fromkeys(texts, 1 / len(texts)))
    assert wanted.log_mass == pytest.approx(math.log(len(texts)) - 2 * math.log(200))
    assert server.most == SCORED_AT_ONCE < len(texts)


@pytest.mark.parametrize("arguments", [["--grammars", "none of them"], ["--masked", "0"], ["--count", "0"]])
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
