"""Logits processors over a recorded device: captured ones in the graph, others in steps outside graphs."""

from __future__ import annotations

from functools import partial

import pytest

from gpu_engine.api.errors import ProcessorFailed
from gpu_engine.api.processors import Processors
from gpu_engine.core.engine import Engine
from gpu_engine.model.loader import LoadedModel
from tests.gpu_engine.device.device_engine import answer_over_a_loss, device_engine, guided_device_engine
from tests.gpu_engine.device.device_requests import INTERPRETED, SMALL, on_device
from tests.gpu_engine.harness import (
    Answer,
    answer_all,
    answer_each,
    ask,
    executor_of,
    tokens,
    unguided_engine,
    with_drafts,
)
from tests.gpu_engine.processor_cases import HERE, SETTING, processed
from tests.gpu_engine.toy_sidecar import guided_engine

pytestmark = INTERPRETED

OTHERS = tuple(entry for entry in SETTING if "aptured" not in entry)
NGRAMS = "ngrams=gpu_engine.processors.ngrams:NoRepeatedNgrams"
CAPTURED = {"logits_processors": (f"captured={HERE}:CapturedWaves", f"nan={HERE}:CapturedNaN", NGRAMS)}
ROUND = partial(ask, [*range(196, 203)] * 2, max_tokens=6)
Uses = tuple[tuple[str, str], ...]
FREE: list[tuple[partial[Answer], Uses]] = [
    (ROUND, (("captured", '{"strength": 9.0}'),)),
    (ROUND, ()),
    (
        partial(ask, tokens(9, 2), max_tokens=4, temperature=0.8, logprobs=2, seed=3),
        (("captured", '{"strength": 0.25}'), ("ngrams", '{"size": 2}')),
    ),
]
"""More than there are slots, so that slots are assigned again."""


def made(processors: Processors, cases: list[tuple[partial[Answer], Uses]]) -> list[Answer]:
    return [processed(processors, make(), *uses) for make, uses in cases]


@pytest.fixture(scope="module")
def free(llama: LoadedModel) -> list[Answer]:
    with unguided_engine(llama, with_drafts(0, **SMALL, **CAPTURED)) as engine:
        answers = made(engine.processors, FREE)
        answer_each(engine, answers)
    assert len({tuple(answer.tokens) for answer in answers}) == 3
    return answers


def logprobs(answers: list[Answer]) -> list[float]:
    """Return the log-probabilities of all tokens; the two devices round differently."""
    found = [entry for answer in answers for entry in answer.logprobs]
    return [entry.logprob for entry in found] + [value for entry in found for _, value in entry.top]


def counts(engine: Engine) -> tuple[int, int]:
    stats = executor_of(engine).runner.launcher.stats  # type: ignore[attr-defined]
    return stats.replays, stats.eager_steps


def test_captured_processors_are_a_part_of_the_graph(llama: LoadedModel, free: list[Answer]) -> None:
    with device_engine(llama, on_device(3, **CAPTURED)) as (engine, _):  # type: ignore[arg-type]
        answers = made(engine.processors, FREE)
        assert answer_all(engine, answers) == [each.tokens for each in free]
        assert logprobs(answers) == pytest.approx(logprobs(free), abs=1e-4)
        # A row that is not finite ends its own request.
        broken, other = processed(engine.processors, ROUND(), ("nan", '{"after": 198}')), ROUND()
        assert answer_all(engine, [broken, other]) == [[196, 197, 198], free[1].tokens]
        assert isinstance(broken.error, ProcessorFailed)
        assert "nan returned NaN" in str(broken.error)
        replays, eager = counts(engine)
        assert eager == 0 < replays
        assert engine.stats().accepted_draft_tokens > 0
        # In another order than the setting's, the same processors leave the graph.
        uses = ("ngrams", '{"size": 2}'), ("captured", '{"strength": 0.25}')
        swapped = processed(engine.processors, ask(tokens(5, 1), max_tokens=3, ignore_eos=True), *uses)
        answer_all(engine, [swapped])
        assert counts(engine)[1] > 0
    with unguided_engine(llama, with_drafts(0, **SMALL, **CAPTURED)) as engine:
        alone = processed(engine.processors, ask(tokens(5, 1), max_tokens=3, ignore_eos=True), *uses)
        assert answer_all(engine, [alone]) == [swapped.tokens]


def test_other_processors_leave_the_graph(llama: LoadedModel) -> None:
    cases: list[tuple[partial[Answer], Uses]] = [
        (ROUND, (("waves", '{"strength": 0.5}'), ("batch", "")),),
        (partial(ask, tokens(9, 2), max_tokens=4, logprobs=1, ignore_eos=True), (("batch", ""),)),
        (ROUND, (("wrong", '{"after": [198], "how": "raise"}'),)),
        (ROUND, ()),
    ]  # fmt: skip
    with unguided_engine(llama, with_drafts(0, **SMALL, logits_processors=OTHERS)) as engine:
        expected = made(engine.processors, cases)
        answer_each(engine, expected)
    with device_engine(llama, on_device(3, logits_processors=OTHERS)) as (engine, _):  # type: ignore[arg-type]
        answers = made(engine.processors, cases)
        assert answer_all(engine, answers) == [each.tokens for each in expected]
        assert logprobs(answers) == pytest.approx(logprobs(expected), abs=1e-4)
        replays, eager = counts(engine)
    assert min(replays, eager) > 0
    assert [type(each.error) for each in answers] == [type(None), type(None), ProcessorFailed, type(None)]


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["host_callback", "device_flag"])
def test_guided_tokens_equal_those_of_a_cpu(llama: LoadedModel, sync: str) -> None:
    guided = partial(ask, tokens(20, 1, repeat=8), grammar="6", max_tokens=30)
    cases: list[tuple[partial[Answer], Uses]] = [(guided, (("captured", ""),)), (guided, (("waves", ""),))]
    fields = {**SMALL, "max_batch_size": 1, "logits_processors": (SETTING[0], CAPTURED["logits_processors"][0])}
    with guided_engine(llama, with_drafts(0, **fields)) as (engine, _):
        expected = answer_each(engine, made(engine.processors, cases))
    with guided_device_engine(llama, on_device(3, sync=sync, **fields)) as (engine, _, _):  # type: ignore[arg-type]
        assert answer_each(engine, made(engine.processors, cases)) == expected
        assert min(counts(engine)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["captured", "waves"])
def test_a_killed_grammar_process_changes_no_token(llama: LoadedModel, name: str) -> None:
    guided = partial(ask, tokens(20, 1, repeat=8), grammar="6", max_tokens=30)
    free = partial(ask, [*range(196, 203)] * 2, max_tokens=6)
    cases: list[tuple[partial[Answer], Uses]] = [(guided, ((name, ""),)), (free, ((name, ""),))]
    fields = {**SMALL, "logits_processors": (SETTING[0], CAPTURED["logits_processors"][0])}
    with guided_engine(llama, with_drafts(0, **fields)) as (engine, _):
        expected = answer_each(engine, made(engine.processors, cases))
    fields |= {"row_timeout_ms": 300.0, "draft_timeout_ms": 300.0}
    with guided_device_engine(llama, on_device(3, **fields)) as (engine, grammar, stream):  # type: ignore[arg-type]
        assert answer_over_a_loss(engine, grammar, made(engine.processors, cases)) == expected
        replays, eager = counts(engine)
        assert (replays > 0) == (name == "captured")
        assert (eager > 0) == (name == "waves")
        assert stream.failure is None
