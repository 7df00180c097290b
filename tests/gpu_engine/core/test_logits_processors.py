"""Logits processors on the engine's thread: lossless with drafts, and an error that ends one request alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from gpu_engine.api.errors import ProcessorFailed
from gpu_engine.api.request import FinishReason
from gpu_engine.core.engine import Engine
from gpu_engine.model.loader import LoadedModel, load_model
from shared_mem.channel import Record
from tests.gpu_engine.harness import (
    PATIENCE_S,
    Answer,
    answer_all,
    answer_each,
    answer_staggered,
    ask,
    tokens,
    unguided_engine,
    with_drafts,
)
from tests.gpu_engine.processor_cases import SETTING, processed
from tests.gpu_engine.toy_sidecar import guided_engine

NAMED = {"logits_processors": SETTING}
PATIENT = {"row_timeout_ms": 2000.0}
REPEATING = partial(ask, [*range(196, 203)] * 2, max_tokens=30)
"""A prompt that the tiny model goes on with; drafts of it are right."""

Case = tuple[Callable[[], Answer], tuple[tuple[str, str], ...]]
FREE: list[Case] = [
    (REPEATING, (("waves", '{"strength": 0.5}'),)),
    (partial(ask, tokens(30, 1, repeat=12), max_tokens=24, temperature=0.8, seed=4, top_p=0.9), (("batch", ""),)),
    (partial(ask, tokens(20, 2, repeat=8), max_tokens=24, ignore_eos=True), (("captured", '{"strength": 2.0}'),)),
    (partial(ask, tokens(9, 3), max_tokens=20, temperature=0.6, logprobs=2, ignore_eos=True), (("batch", ""),)),
    (partial(ask, [*range(196, 203)] * 2, max_tokens=20), ()),
    (
        partial(ask, tokens(12, 5), max_tokens=20, repetition_penalty=1.2, logit_bias=((7, 2.0),), bad_token_ids=(9,)),
        (("captured", '{"strength": 1.0}'), ("waves", '{"strength": 1.5}'), ("captured", '{"strength": 0.5}')),
    ),
]
"""More than there are slots."""
GUIDED: list[Case] = [
    (partial(ask, tokens(30, 1, repeat=10), grammar="40", max_tokens=80), (("waves", ""),)),
    (partial(ask, tokens(20, 3), grammar="30", max_tokens=80, temperature=1.0, seed=3), (("captured", ""),)),
    (REPEATING, (("batch", '{"strength": 0.5}'),)),
    (partial(ask, tokens(21, 6), grammar="9", max_tokens=60, logprobs=1), (("batch", ""), ("waves", ""))),
]


def made(engine: Engine, cases: list[Case]) -> list[Answer]:
    return [processed(engine.processors, make(), *uses) for make, uses in cases]


@pytest.fixture(scope="module")
def free(llama: LoadedModel) -> list[Answer]:
    """One request at a time, one token a step."""
    with unguided_engine(llama, with_drafts(0, **NAMED)) as engine:
        answers = made(engine, FREE)
        answer_each(engine, answers)
    assert answers[0].tokens != answers[4].tokens, "the processor changes the answer"
    return answers


@pytest.fixture(scope="module")
def guided(llama: LoadedModel) -> list[Answer]:
    with guided_engine(llama, with_drafts(0, **NAMED, **PATIENT)) as (engine, _):
        answers = made(engine, GUIDED)
        answer_each(engine, answers)
    return answers


@pytest.mark.parametrize("num_drafts", [0, 3, 7])
@pytest.mark.parametrize("answer", [answer_all, answer_staggered])
def test_tokens_do_not_depend_on_speculation_or_company(
    llama: LoadedModel, free: list[Answer], num_drafts: int, answer: Callable[..., list[list[int]]], overlap: bool
) -> None:
    with unguided_engine(llama, with_drafts(num_drafts, overlap=overlap, **NAMED)) as engine:
        answers = made(engine, FREE)
        assert answer(engine, answers) == [each.tokens for each in free]
        assert [each.logprobs for each in answers] == [each.logprobs for each in free]
        assert (engine.stats().accepted_draft_tokens > 10) == (num_drafts > 0)
        assert engine._loop.executor.slot_writer.processed == {}, "the slots hold no request that has ended"


@pytest.mark.parametrize("drafter", ["same", "trained eagle3"])
def test_drafts_of_a_network_change_no_token(
    llama: LoadedModel, draft_models: dict[str, str], free: list[Answer], drafter: str
) -> None:
    settings = with_drafts(3, draft_model=draft_models[drafter], **NAMED)
    with unguided_engine(llama, settings) as engine:
        assert answer_all(engine, made(engine, FREE)) == [each.tokens for each in free]


def test_bfloat16_logits_are_processed_in_float32(saved: Callable[[str], Path]) -> None:
    settings = {"model": str(saved("llama")), "dtype": "bfloat16", **NAMED}
    model = load_model(with_drafts(3, **settings))
    found = []
    for num_drafts in (0, 3):
        with unguided_engine(model, with_drafts(num_drafts, **settings)) as engine:
            answers = made(engine, FREE)
            found.append((answer_all(engine, answers), [answer.logprobs for answer in answers]))
    assert found[0] == found[1]


def test_three_kinds_of_one_function_give_the_same_tokens(llama: LoadedModel) -> None:
    with unguided_engine(llama, with_drafts(3, **NAMED)) as engine:
        kinds = [[(REPEATING, ((name, ""),))] for name in ("waves", "batch", "captured")]
        single, batch, captured = (answer_all(engine, made(engine, kind)) for kind in kinds)
    assert single == batch == captured


@pytest.mark.parametrize("num_drafts", [0, 3, 7])
def test_guided_tokens_do_not_depend_on_speculation(
    llama: LoadedModel, guided: list[Answer], num_drafts: int, overlap: bool
) -> None:
    with guided_engine(llama, with_drafts(num_drafts, overlap=overlap, **NAMED, **PATIENT)) as (engine, _):
        answers = made(engine, GUIDED)
        assert answer_all(engine, answers) == [each.tokens for each in guided]
        assert [each.logprobs for each in answers] == [each.logprobs for each in guided]
        assert [each.finish for each in answers] == [each.finish for each in guided]


def test_a_killed_grammar_process_changes_no_token(llama: LoadedModel, guided: list[Answer]) -> None:
    with guided_engine(llama, with_drafts(3, **NAMED, **PATIENT)) as (engine, grammar):
        answers, reached, first = made(engine, GUIDED), threading.Event(), grammar.sidecar

        def die(record: Record) -> None:
            if record.commit_pos + len(record.committed) >= 6:
                first.stopping = True
                reached.set()

        first.before = die
        for answer in answers:
            answer.submit(engine)
        assert reached.wait(PATIENCE_S)
        grammar.kill_sidecar()
        engine.grammar_lost()
        assert not all(answer.over for answer in answers)
        grammar.start_sidecar()
        engine.grammar_restored()
        assert [answer.wait().tokens for answer in answers] == [each.tokens for each in guided]


def test_a_preempted_sequence_has_the_same_tokens(llama: LoadedModel) -> None:
    long = partial(ask, tokens(20, 1, repeat=8), max_tokens=70, ignore_eos=True)
    cases: list[Case] = [(long, ((name, f'{{"strength": {s}}}'),)) for name in ("waves", "batch") for s in (0.5, 2.0)]

    def run(**fields: int) -> tuple[list[list[int]], int]:
        with unguided_engine(llama, with_drafts(3, max_model_len=128, **NAMED, **fields)) as engine:
            return answer_all(engine, made(engine, cases)), engine.stats().preemptions

    expected, never = run()
    found, preemptions = run(kv_cache_tokens=128)
    assert found == expected
    assert never == 0 < preemptions


def test_log_probabilities_are_the_models_own(llama: LoadedModel) -> None:
    """A bias forces the same tokens, and its log-probabilities are the model's own."""
    for num_drafts in (0, 3):
        with unguided_engine(llama, with_drafts(num_drafts, **NAMED)) as engine:
            wanted = {"max_tokens": 8, "logprobs": 3, "ignore_eos": True}
            by_bias = ask(tokens(9, 1), logit_bias=((7, 100.0),), **wanted)
            forced = processed(engine.processors, ask(tokens(9, 1), **wanted), ("only", '{"token": 7}'))
            assert answer_all(engine, [by_bias, forced]) == [[7] * 8] * 2
            assert forced.logprobs == by_bias.logprobs


def test_a_processor_sees_the_ids(llama: LoadedModel) -> None:
    with unguided_engine(llama, with_drafts(3, **NAMED)) as engine:
        answers = []
        for index, client in ((0, "65"), (2, "65"), (0, "70")):
            answer = ask(tokens(9, 1), max_tokens=4, ignore_eos=True)
            answer.change(client_id=client, index=index)
            answers.append(processed(engine.processors, answer, ("by_client", "")))
        assert answer_all(engine, answers) == [[65] * 4, [67] * 4, [70] * 4]


def test_a_request_without_processors_causes_no_call(llama: LoadedModel) -> None:
    with unguided_engine(llama, with_drafts(3, **NAMED)) as engine:
        answer_each(engine, made(engine, [FREE[0]]))
        waves = engine.processors.by_name["waves"].processor
        calls = waves.calls  # type: ignore[union-attr]
        answer_all(engine, [REPEATING() for _ in range(6)])
        assert waves.calls == calls > 0  # type: ignore[union-attr]


# -- what goes wrong ---------------------------------------------------------------------------------------------------

PROBLEMS = {
    "raise": "raised RuntimeError",
    "shape": r"returned \[1, 299\] float32 on cpu, must be \[1, 300\] float32 on cpu",
    "dtype": r"returned \[1, 300\] float64 on cpu, must be \[1, 300\] float32 on cpu",
    "none": "returned NoneType, must be a tensor",
    "nan": r"returned NaN or \+inf",
    "inf": r"returned NaN or \+inf",
}


@pytest.mark.parametrize("how", PROBLEMS)
@pytest.mark.parametrize("name", ["wrong", "wrong_batch"])
def test_an_error_ends_its_own_request_behind_the_tokens_before_it(llama: LoadedModel, how: str, name: str) -> None:
    """The tiny model goes round in a circle of seven; the processor fails behind the second 201."""
    ends = []
    for num_drafts in (0, 7):
        with unguided_engine(llama, with_drafts(num_drafts, **NAMED)) as engine:
            others = made(engine, [(REPEATING, ((name, '{"after": []}'),)), (REPEATING, ())])
            alone = answer_each(engine, [REPEATING()])[0]
            broken = REPEATING(name="broken")
            processed(engine.processors, broken, (name, f'{{"after": [{alone[5]}], "how": "{how}"}}'))
            answer_all(engine, [others[0], broken, others[1]])
            assert [other.tokens for other in others] == [alone, alone]
        assert isinstance(broken.error, ProcessorFailed)
        broken_at = f"logits_processors: {name} {PROBLEMS[how]}; see the server's log"
        with pytest.raises(ProcessorFailed, match=broken_at):
            raise broken.error
        ends.append(broken.tokens)
    assert ends[0] == ends[1] == alone[: alone.index(alone[5]) + 1]


def test_an_error_behind_a_wrong_draft_is_none(llama: LoadedModel) -> None:
    """The drafter proposes 201 again and again, and the processor forbids it: its rows fail, and none is reached."""
    with unguided_engine(llama, with_drafts(0, **NAMED)) as engine:
        use = ("wrong", '{"after": [201], "how": "raise", "never": [201]}')
        expected = answer_each(engine, made(engine, [(REPEATING, (use,))]))
    with unguided_engine(llama, with_drafts(7, **NAMED)) as engine:
        answers = made(engine, [(REPEATING, (use,))])
        assert answer_each(engine, answers) == expected
        stats = engine.stats()
    assert answers[0].finish is FinishReason.LENGTH
    assert stats.draft_tokens > stats.accepted_draft_tokens


def test_an_error_of_a_guided_request_closes_its_matcher(llama: LoadedModel) -> None:
    with guided_engine(llama, with_drafts(3, **NAMED, **PATIENT)) as (engine, _):
        good, broken = (ask(tokens(30, 1), grammar="20", max_tokens=60) for _ in range(2))
        expected = answer_each(engine, [ask(tokens(30, 1), grammar="20", max_tokens=60)])[0]
        use = ("wrong", f'{{"after": [{expected[8]}], "how": "raise"}}')
        answer_all(engine, [good, processed(engine.processors, broken, use)])
    assert good.tokens == expected
    assert isinstance(broken.error, ProcessorFailed)
    assert broken.tokens == expected[: expected.index(expected[8]) + 1]


def test_a_processor_that_leaves_no_token_ends_the_answer(llama: LoadedModel) -> None:
    with unguided_engine(llama, with_drafts(3, **NAMED)) as engine:
        answer = ask(tokens(9, 1), bad_token_ids=(7,))
        answer_all(engine, [processed(engine.processors, answer, ("only", '{"token": 7}'))])
    assert (answer.tokens, answer.finish) == ([], FinishReason.LENGTH)
