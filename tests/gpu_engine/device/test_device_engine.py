"""An engine whose steps are graphs over a recorded stream has the tokens of an engine on a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gpu_engine.api.errors import InternalError, InvalidRequest
from gpu_engine.api.output_tensors import WantedOutput
from gpu_engine.api.request import FinishReason
from gpu_engine.core.device_slot_writer import DeviceSlotWriter
from gpu_engine.model.loader import LoadedModel
from shared_mem.channel import Record
from shared_mem.layout import Stage
from tests.fakes import EOS
from tests.gpu_engine.device.device_engine import RecordedDevice, device_engine, guided_device_engine
from tests.gpu_engine.device.device_requests import GUIDED, INTERPRETED, SMALL, UNGUIDED, ByChance, on_device
from tests.gpu_engine.harness import (
    PATIENCE_S,
    Answer,
    Hold,
    answer_all,
    answer_each,
    ask,
    config,
    executor_of,
    tokens,
    unguided_engine,
    with_drafts,
)
from tests.gpu_engine.toy_sidecar import Automaton, guided_engine

pytestmark = INTERPRETED


@pytest.fixture(scope="module")
def unguided_tokens(llama: LoadedModel) -> list[list[int]]:
    with unguided_engine(llama, with_drafts(0, **SMALL)) as engine:
        return answer_each(engine, [make() for make in UNGUIDED])


@pytest.fixture(scope="module")
def guided_tokens(llama: LoadedModel) -> list[list[int]]:
    with guided_engine(llama, with_drafts(0, **SMALL)) as (engine, _):
        emitted = answer_each(engine, [make() for make in GUIDED])
    assert [len(ids) for ids in emitted] == [9, 6, 8]
    assert emitted[0][-1] == emitted[2][-1] == EOS
    return emitted


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        pytest.param({}, 4, id="graph"),
        pytest.param({"overlap": False, "enforce_eager": True}, 2, id="eager", marks=pytest.mark.slow),
    ],
)
def test_unguided_tokens_equal_those_of_a_cpu(
    llama: LoadedModel, unguided_tokens: list[list[int]], fields: dict[str, bool], count: int
) -> None:
    with device_engine(llama, on_device(3, **fields)) as (engine, _):
        assert answer_all(engine, [make() for make in UNGUIDED[:count]]) == unguided_tokens[:count]
        stats = engine.stats()
        counts = executor_of(engine).runner.launcher.stats  # type: ignore[attr-defined]
    assert stats.generated_tokens == sum(map(len, unguided_tokens[:count]))
    assert stats.accepted_draft_tokens > 3
    assert (counts.replays > 0, counts.eager_steps > 0) == (not fields, bool(fields))


@pytest.mark.parametrize("sync", ["host_callback", pytest.param("device_flag", marks=pytest.mark.slow)])
def test_guided_tokens_equal_those_of_a_cpu(llama: LoadedModel, guided_tokens: list[list[int]], sync: str) -> None:
    settings = on_device(3, sync=sync, max_batch_size=4)  # three lanes are padded to four
    with guided_device_engine(llama, settings) as (engine, grammar, _):
        answers = [make() for make in GUIDED]
        assert answer_all(engine, answers) == guided_tokens
        assert [answer.finish for answer in answers] == [FinishReason.STOP, FinishReason.LENGTH, FinishReason.STOP]
        assert engine.stats().deferred_rows == 0
        assert len({record.slot for record in grammar.sidecar.records}) == 2


@pytest.mark.parametrize("sync", [pytest.param("host_callback", marks=pytest.mark.slow), "device_flag"])
def test_steps_without_drafts_or_proposals_have_the_same_tokens(
    llama: LoadedModel, guided_tokens: list[list[int]], sync: str
) -> None:
    with guided_device_engine(llama, on_device(3, sync=sync)) as (engine, _, _):
        budget = executor_of(engine).runner.budget = ByChance()
        for _ in range(2):
            assert answer_all(engine, [make() for make in GUIDED]) == guided_tokens
        assert engine.stats().deferred_rows == 0
    assert len(budget.steps) == 4


@pytest.mark.parametrize("sync", [pytest.param("host_callback", marks=pytest.mark.slow), "device_flag"])
def test_the_runs_of_the_warm_up_change_no_token(llama: LoadedModel, guided_tokens: list[list[int]], sync: str) -> None:
    """Every other test leaves them out."""
    device = RecordedDevice(warms_up=True)
    with guided_device_engine(llama, on_device(1, sync=sync, max_batch_size=1), device) as (engine, _, stream):
        warmed = stream.ran
        assert answer_all(engine, [GUIDED[0]()]) == guided_tokens[:1]
        assert warmed > 100


@pytest.mark.slow
@pytest.mark.parametrize("eager", [False, True])
def test_the_runs_of_the_warm_up_need_no_grammar_process(
    llama: LoadedModel, unguided_tokens: list[list[int]], eager: bool
) -> None:
    settings = on_device(1, max_batch_size=1, enforce_eager=eager)
    with device_engine(llama, settings, RecordedDevice(warms_up=True)) as (engine, _):
        assert answer_all(engine, [UNGUIDED[0]()]) == unguided_tokens[:1]


@pytest.mark.parametrize(
    ("sync", "drafter"),
    [
        pytest.param("host_callback", "ngram", marks=pytest.mark.slow),
        ("device_flag", "ngram"),
        pytest.param("host_callback", "grammar", marks=pytest.mark.slow),
    ],
)
def test_jump_forward_tokens_change_no_answer(
    llama: LoadedModel, guided_tokens: list[list[int]], sync: str, drafter: str
) -> None:
    settings = replace(on_device(3, sync=sync, max_batch_size=4), drafter=drafter)
    with guided_device_engine(llama, settings) as (engine, grammar, _):
        # After an odd number of tokens the proposal is two right tokens; otherwise it is wrong.
        grammar.sidecar.proposes = lambda automaton, emitted: (
            next((ids[len(emitted) :][:2] for ids in guided_tokens if ids[: len(emitted)] == emitted), [])
            if len(emitted) % 2
            else [len(emitted), 65, 66]
        )
        assert answer_all(engine, [make() for make in GUIDED]) == guided_tokens
        stats = engine.stats()
        assert stats.deferred_rows == 0
        assert stats.jump_forward_tokens > stats.accepted_jump_forward_tokens > 3


@pytest.mark.slow
@pytest.mark.parametrize("eager", [False, True])
def test_a_fixed_choice_of_drafts_changes_no_answer(
    llama: LoadedModel, guided_tokens: list[list[int]], eager: bool
) -> None:
    """Captured steps verify drafts that the host never saw, the first of a sequence with none."""
    settings = on_device(2, max_batch_size=4, verifies_every_draft=True, enforce_eager=eager)
    with guided_device_engine(llama, settings) as (engine, _, _):
        assert answer_all(engine, [make() for make in GUIDED]) == guided_tokens
        stats = engine.stats()
    assert stats.deferred_rows == 0
    assert stats.draft_tokens > 0


@pytest.mark.slow
def test_a_draft_model_continues_after_jump_forward_tokens(llama: LoadedModel, guided_tokens: list[list[int]]) -> None:
    settings = on_device(2, draft_model=llama.name, draft_masks="on", max_batch_size=4)
    with guided_device_engine(llama, settings) as (engine, grammar, _):
        grammar.sidecar.proposes = lambda automaton, emitted: next(
            (ids[len(emitted) :][:1] for ids in guided_tokens if ids[: len(emitted)] == emitted), []
        )
        assert answer_all(engine, [make() for make in GUIDED]) == guided_tokens
        stats = engine.stats()
        assert stats.accepted_jump_forward_tokens == stats.jump_forward_tokens > 3
        assert stats.accepted_draft_tokens > stats.draft_tokens * 0.8


@pytest.mark.slow
def test_a_draft_model_changes_no_token_and_its_rows_are_cached(
    llama: LoadedModel, guided_tokens: list[list[int]]
) -> None:
    # Three lanes are padded to four.
    settings = on_device(2, draft_model=llama.name, max_batch_size=4, draft_masks="on")
    with guided_device_engine(llama, settings) as (engine, grammar, _):
        assert answer_all(engine, [make() for make in GUIDED]) == guided_tokens
        stats = engine.stats()
        verified = [record for record in grammar.sidecar.records if record.stage == Stage.VERIFY]
    assert stats.accepted_draft_tokens > stats.draft_tokens * 0.8
    # A stop token has no row after it that could be cached.
    assert {record.need_rows.bit_count() for record in verified if EOS not in record.drafts} == {1}


def test_logprobs_equal_those_of_a_cpu(llama: LoadedModel) -> None:
    def made() -> list[Answer]:
        return [ask(tokens(8, 1), max_tokens=4, logprobs=3, ignore_eos=True), ask(tokens(8, 2), max_tokens=4)]

    expected, answers = made(), made()
    with unguided_engine(llama, with_drafts(3, **SMALL)) as engine:
        answer_all(engine, expected)
    with device_engine(llama, on_device(0)) as (engine, _):
        answer_all(engine, answers)
    assert answers[1].logprobs == []
    for ours, theirs in zip(answers[0].logprobs, expected[0].logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


@pytest.mark.parametrize("drafts_by", ["ngram", pytest.param("model", marks=pytest.mark.slow)])
def test_prompt_logprobs_equal_those_of_a_cpu(llama: LoadedModel, drafts_by: str) -> None:
    def made() -> list[Answer]:
        answers = [ask(tokens(n, n), max_tokens=4, ignore_eos=True) for n in (70, 5, 1)]
        for answer in answers:
            answer.change(prompt_logprobs=3)
        return [*answers, ask(tokens(8, 2), max_tokens=4)]

    fields = {"draft_model": llama.name} if drafts_by == "model" else {}
    expected, answers = made(), made()
    with unguided_engine(llama, with_drafts(3, **{**SMALL, "max_model_len": 96})) as engine:
        answer_all(engine, expected)
    with device_engine(llama, on_device(3, max_model_len=96, **fields)) as (engine, _):
        assert answer_all(engine, answers) == [answer.tokens for answer in expected]
        if fields:
            stats = engine.stats()
            assert stats.accepted_draft_tokens > 0.9 * stats.draft_tokens > 0, "the draft model has the prompt's keys"
    assert answers[3].events[0].prompt_logprobs is None
    for ours, theirs in zip(answers[:3], expected[:3], strict=True):
        got, want = ours.events[0].prompt_logprobs, theirs.events[0].prompt_logprobs
        assert got is not None
        assert want is not None
        assert got.logprob_N == pytest.approx(want.logprob_N, abs=1e-4)
        assert got.top_ids_NM.tolist() == want.top_ids_NM.tolist()
        assert len(got.logprob_N) == len(ours.request.prompt_ids) - 1


def test_tensors_equal_those_of_a_cpu(llama: LoadedModel) -> None:
    names = ("logits", "hidden_states.1", "model.layers.0.mlp")

    def made() -> list[Answer]:
        answers = [ask(tokens(n, n), max_tokens=12, ignore_eos=True) for n in (70, 1)]
        for answer in answers:
            answer.change(
                tensors=tuple(
                    WantedOutput(name, name, llama.outputs[name], context=True, answer=True) for name in names
                )
            )
        return [*answers, ask(tokens(8, 2), max_tokens=4)]

    def rows(answer: Answer, name: str) -> Any:
        parts = [each for event in answer.events for each in event.outputs if each.name == name]
        assert [part.start for part in parts] == [0, *(part.end for part in parts[:-1])]
        return np.concatenate([part.data for part in parts]).view(np.float32)

    expected, answers = made(), made()
    with unguided_engine(llama, with_drafts(3, **{**SMALL, "max_model_len": 96})) as engine:
        answer_all(engine, expected)
    with device_engine(llama, on_device(3, max_model_len=96)) as (engine, _):
        assert answer_all(engine, answers) == [answer.tokens for answer in expected]
    for ours, theirs in zip(answers[:2], expected[:2], strict=True):
        for name in names:
            got = rows(ours, name)
            assert len(got) == len(ours.request.prompt_ids) + len(ours.tokens) - 1
            np.testing.assert_allclose(got, rows(theirs, name), atol=1e-4)


def test_the_slot_of_an_aborted_request_is_reused(llama: LoadedModel, unguided_tokens: list[list[int]]) -> None:
    with device_engine(llama, on_device(3, max_batch_size=1)) as (engine, _):
        endless = ask(tokens(5, 9), max_tokens=1000, ignore_eos=True)
        hold = Hold(engine, lambda: len(endless.tokens) >= 4)
        endless.submit(engine)
        following = UNGUIDED[0]()
        with hold.reached():
            following.submit(engine)
            assert engine.abort(endless.request.request_id)
        assert endless.wait().finish is FinishReason.ABORTED
        assert following.wait().tokens == unguided_tokens[0]


def test_more_bad_tokens_than_a_slot_holds_are_rejected_with_the_limit(llama: LoadedModel) -> None:
    with device_engine(llama, on_device(0)) as (engine, _):
        request = ask(tokens(5, 1), bad_token_ids=tuple(range(600))).request
        with pytest.raises(InvalidRequest, match="rules of 605 numbers, at most 512"):
            engine.submit(request)


def test_a_step_ends_when_its_sidecar_dies_and_answers_continue(
    llama: LoadedModel, guided_tokens: list[list[int]]
) -> None:
    # A proposal that nobody answers takes its whole timeout as well.
    settings = on_device(3, row_timeout_ms=300.0, draft_timeout_ms=300.0)
    with guided_device_engine(llama, settings) as (engine, grammar, stream):
        first, answers = grammar.sidecar, [make() for make in GUIDED]

        def die(record: Record) -> None:
            first.stopping |= record.commit_pos + len(record.committed) >= 3

        first.before = die
        for answer in answers:
            answer.submit(engine)
        first_thread = grammar._thread
        first_thread.join(PATIENCE_S)
        grammar.kill_sidecar()
        engine.grammar_lost()
        assert answers[1].wait().tokens == guided_tokens[1]
        assert not answers[0].over
        grammar.start_sidecar()
        engine.grammar_restored()
        assert [answer.wait().tokens for answer in answers] == guided_tokens
        assert first.problems == []
        assert stream.failure is None
        assert Automaton.parse("8").allows(answers[0].tokens)


def test_a_refused_post_ends_only_its_own_requests_with_internal(
    llama: LoadedModel, guided_tokens: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with guided_device_engine(llama, on_device(3)) as (engine, grammar, stream):
        slot_writer, broken = executor_of(engine).slot_writer, [0]
        assert isinstance(slot_writer, DeviceSlotWriter)

        def break_the_count(answer: Answer) -> None:
            if len(answer.tokens) >= 3 and not broken[0]:
                broken[0] = 1
                # More tokens that are not yet posted than a record holds.
                stream.kernel(slot_writer.buffers.posted_S.fill_, -1000)

        guided, unguided = ask(tokens(20, 1), grammar="50", max_tokens=90, on_event=break_the_count), GUIDED[1]()
        for answer in (guided, unguided):
            answer.submit(engine)
        assert isinstance(guided.wait().error, InternalError)
        assert unguided.wait().tokens == guided_tokens[1]
        assert "a step's post was refused" in caplog.text
        assert answer_all(engine, [GUIDED[0]()]) == guided_tokens[:1], "the next sequence can use the slot"
        assert engine.stats().failed == {"INTERNAL": 1}
        # A step launched after the refused post continues from the tokens of that post. The sidecar then sees a gap,
        # unless the matcher is closed by then. It sees no other problem, and none of another slot generation.
        broken_gen = grammar.opened[0][1]
        problems = grammar.sidecar.problems
        assert [p for p in problems if f"slot_gen={broken_gen}," not in p or not p.endswith(" tokens")] == []
        problems.clear()


def test_a_lost_device_ends_the_engine_and_is_reported(llama: LoadedModel) -> None:
    failures: list[Exception] = []
    with device_engine(llama, on_device(3)) as (engine, stream):
        engine.watch(failures.append)
        answer = ask(tokens(5, 9), max_tokens=1000, ignore_eos=True)
        hold = Hold(engine, lambda: len(answer.tokens) >= 4)
        answer.submit(engine)
        with hold.reached():
            stream.fail()
        assert isinstance(answer.wait().error, InternalError)
        engine._thread.join(PATIENCE_S)
        assert not engine._thread.is_alive()
        assert [str(failure) for failure in failures] == ["RuntimeError: an illegal memory access was encountered"]
        with pytest.raises(InternalError, match="lost its device"):
            engine.submit(ask(tokens(5, 9)).request)
        engine.watch(failures.append)
        assert len(failures) == 2, "a watcher that is added after the loss is called, too"


def test_the_inline_sync_rejects_cuda() -> None:
    with pytest.raises(ValueError, match="sync: inline runs on a CPU only; device is cuda"):
        config(device="cuda", sync="inline")
    with pytest.raises(ValueError, match="sync: device_flag needs a GPU; device is cpu"):
        config(sync="device_flag")
    assert (
        config().max_inflight_steps,
        config(device="cuda:1").max_inflight_steps,
        config(device="cuda", overlap=False).max_inflight_steps,
    ) == (0, 1, 0)
