"""Guided steps against a toy grammar process: legal, lossless, and robust against everything it may do."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext

import pytest

from gpu_engine.api.errors import GrammarUnavailable, InternalError, InvalidRequest
from gpu_engine.api.request import FinishReason
from gpu_engine.api.stats import Stage as SequenceStage
from gpu_engine.core.engine import Engine
from gpu_engine.core.runner import LaunchedStep
from gpu_engine.model.loader import LoadedModel
from gpu_engine.step.buffers import StepBatch
from shared_mem.channel import Record
from shared_mem.layout import Stage
from tests.fakes import EOS
from tests.gpu_engine.core.guided_requests import MIX, legal, made
from tests.gpu_engine.harness import (
    PATIENCE_S,
    UNHURRIED_MS,
    Answer,
    Hold,
    answer_all,
    ask,
    executor_of,
    launched_steps,
    tokens,
    until_false,
    with_drafts,
)
from tests.gpu_engine.toy_sidecar import CrashError, ToyGrammar, guided_engine


def toy_engine(
    llama: LoadedModel, num_drafts: int = 7, **fields: object
) -> AbstractContextManager[tuple[Engine, ToyGrammar]]:
    return guided_engine(llama, with_drafts(num_drafts, **{"row_timeout_ms": UNHURRIED_MS, **fields}))


def test_the_target_as_its_own_draft_model_is_right(
    llama: LoadedModel, draft_models: dict[str, str], guided_tokens: list[list[int]], overlap: bool
) -> None:
    """It has the rows of the verification and its noise; only drafts after a stop are wrong."""
    fields = {"draft_model": draft_models["same"], "draft_masks": "on", "draft_timeout_ms": UNHURRIED_MS}
    answers = made()
    with toy_engine(llama, 3, overlap=overlap, **fields) as (engine, _):
        assert answer_all(engine, answers) == guided_tokens
    for answer in answers:
        telemetry = answer.telemetry
        wrong = telemetry.draft_tokens - telemetry.accepted_draft_tokens
        assert wrong < 3 if answer.finish is FinishReason.STOP else wrong == 0


def test_a_grammar_that_is_slow_to_open_or_refused_delays_no_other_request(llama: LoadedModel) -> None:
    with toy_engine(llama) as (engine, grammar):
        answer_all(engine, [ask(tokens(9, 1), ignore_eos=True)])
        assert grammar.sidecar.records == []
        assert engine.stats().mask_wait_ms == 0
        grammar.hold = True
        slow, refused = ask(tokens(9, 1), grammar="20", max_tokens=60), ask(tokens(9, 1), grammar="what")
        for answer in (slow, refused):
            answer.submit(engine)
        answer_all(engine, [ask(tokens(9, 2), ignore_eos=True)])
        assert slow.events == []
        assert isinstance(refused.wait().error, InvalidRequest)
        grammar.hold = False
        engine.grammar_restored()
        assert legal(slow.wait())
        assert engine.stats().failed == {"INVALID_ARGUMENT": 1}
    telemetry = slow.telemetry
    assert (telemetry.compile_ms, telemetry.compile_cache_hit) == (1.5, True)
    assert (telemetry.backend, telemetry.warnings) == (2, ("toy",))
    assert slow.request.arrived_s <= telemetry.scheduled_s <= telemetry.first_token_s <= telemetry.finished_s


LONG = tokens(60, 1)
"""A prompt whose forward begins while the matcher is opened, with chunks as large."""


def late_posts(engine: Engine, grammar: ToyGrammar) -> list[StepBatch]:
    """Have each post of late lanes wait for the matchers, as a longer forward does; return their batches."""
    sync, posted = executor_of(engine).sync, list[StepBatch]()
    post = sync.post

    def patient(batch: StepBatch) -> None:
        if batch.late_lanes and int(batch.slots_B[batch.late_lanes[0]]) >= 0:
            until_false(lambda: bool(grammar.sidecar.binding))
            posted.append(batch)
        post(batch)

    sync.post = patient  # type: ignore[method-assign]
    return posted


@pytest.mark.parametrize("num_drafts", [0, 7])
def test_an_answer_begins_in_the_forward_of_its_prompt(llama: LoadedModel, num_drafts: int) -> None:
    def asked() -> Answer:
        return ask(LONG, grammar="20", max_tokens=60, drafts=num_drafts)

    with toy_engine(llama, num_drafts, max_batched_tokens=16) as (engine, _):
        expected = answer_all(engine, [asked()])
    answer = asked()
    with toy_engine(llama, num_drafts, max_batched_tokens=128) as (engine, grammar):
        steps = launched_steps(engine)
        posted = late_posts(engine, grammar)
        assert answer_all(engine, [answer]) == expected
        assert engine.stats().deferred_rows == 0
    assert len(posted) == 1
    first = steps[0]
    assert first.late_lanes == (0,)
    assert [(start, end) for _, start, end in first.chunks] == [(0, len(LONG) - 1)]
    assert first.outcomes[0].token_ids == (expected[0][0],)
    assert not any(step.late_lanes for step in steps[1:])


def test_a_matcher_that_is_open_after_the_forward_of_the_prompt_changes_nothing(llama: LoadedModel) -> None:
    with toy_engine(llama, max_batched_tokens=16) as (engine, _):
        expected = answer_all(engine, [ask(LONG, grammar="20", max_tokens=60)])
    answer = ask(LONG, grammar="20", max_tokens=60)
    with toy_engine(llama, max_batched_tokens=128) as (engine, grammar):
        steps = launched_steps(engine)
        grammar.hold = True
        answer.submit(engine)
        until_false(lambda: not grammar.sidecar.records)
        grammar.hold = False
        engine.grammar_restored()
        assert [answer.wait().tokens] == expected
        assert engine.stats().deferred_rows == 0, "a matcher that is not there yet defers nothing"
    assert [step.late_lanes for step in steps[:2]] == [(0,), ()]
    assert steps[0].outcomes[0].deferred


def test_an_answer_of_one_token_says_how_its_grammar_was_compiled(llama: LoadedModel) -> None:
    """Though the message that the matcher is open comes after the step."""
    collected, answer = threading.Event(), ask(LONG, grammar="0")
    with toy_engine(llama, max_batched_tokens=128) as (engine, grammar):
        late_posts(engine, grammar)
        runner = executor_of(engine).runner
        collect, bound = runner.collect, grammar._bound

        def noted(step: LaunchedStep) -> None:
            collect(step)
            collected.set()

        def later(slot: int, slot_gen: int) -> None:
            threading.Thread(target=lambda: collected.wait(PATIENCE_S) and bound(slot, slot_gen)).start()

        runner.collect, grammar._bound = noted, later  # type: ignore[method-assign]
        assert answer_all(engine, [answer]) == [[EOS]]
    assert (answer.telemetry.backend, answer.telemetry.warnings) == (2, ("toy",))


def test_others_are_posted_before_the_forward_in_which_an_answer_begins(llama: LoadedModel) -> None:
    """Each lane of a step has one record, and the late one's comes last."""
    running, late = ask(tokens(9, 2), grammar="90", max_tokens=120), ask(LONG, grammar="20", max_tokens=60)
    with toy_engine(llama, 0, max_batched_tokens=128, overlap=False) as (engine, grammar):
        steps = launched_steps(engine)
        posted = late_posts(engine, grammar)
        hold = Hold(engine, lambda: len(running.tokens) > 5)
        running.submit(engine)
        with hold.reached():
            late.submit(engine)
            before = len(grammar.sidecar.records)
        for answer in (running, late):
            assert legal(answer.wait())
        both = next(step for step in steps if len(step.slots) == 2)
        records = [record.slot for record in grammar.sidecar.records[before:]]
    assert len(posted) == 1
    assert both.late_lanes == (both.slots.index(1),)
    assert all(len(outcome.token_ids) == 1 for outcome in both.outcomes)
    assert records[:3] == [0, 1, 0]


def test_a_cancelled_answer_that_begins_delays_nobody(llama: LoadedModel) -> None:
    """Its opening is never heard of, because it has lost its slot."""
    cancelled, heard = ask(LONG, grammar="0"), list[int]()
    with toy_engine(llama, max_batched_tokens=128, overlap=False) as (engine, grammar):
        late_posts(engine, grammar)
        runner, loop = executor_of(engine).runner, engine._loop
        collect, hear = runner.collect, loop._hear

        def dropped(step: LaunchedStep) -> None:
            collect(step)
            if step.late_lanes:
                engine.drop(cancelled.request)

        def counted() -> None:
            heard.append(len(loop.sequences))
            hear()

        grammar._bound = lambda slot, slot_gen: None  # type: ignore[method-assign]
        runner.collect, loop._hear = dropped, counted  # type: ignore[method-assign]
        cancelled.submit(engine)
        until_false(lambda: not heard or bool(loop.sequences))
        answer_all(engine, [ask(tokens(9, 2), ignore_eos=True)])
    assert heard == [1]
    assert cancelled.events == []


def test_no_answer_begins_early_where_a_step_stays_in_flight(llama: LoadedModel) -> None:
    answer = ask(LONG, grammar="20", max_tokens=60)
    with toy_engine(llama, max_batched_tokens=128, overlap=True) as (engine, _):
        steps = launched_steps(engine)
        answer_all(engine, [answer])
    assert legal(answer)
    assert not any(step.late_lanes for step in steps)


def test_without_a_grammar_process_no_answer_begins(llama: LoadedModel) -> None:
    answer = ask(LONG, grammar="20", max_tokens=60)
    with toy_engine(llama, max_batched_tokens=128) as (engine, grammar):
        steps = launched_steps(engine)
        grammar.lose_sidecar(engine)
        answer.submit(engine)
        answer_all(engine, [ask(tokens(9, 2), ignore_eos=True)])
        assert steps
        assert not any(step.any_guided for step in steps)
        grammar.restore_sidecar(engine)
        assert legal(answer.wait())


@pytest.mark.parametrize(("num_drafts", "draft_model"), [(0, ""), (7, ""), (5, "same")])
@pytest.mark.parametrize("trouble", ["dead", "error"])
def test_a_dead_end_or_an_error_ends_its_request_alone(
    llama: LoadedModel,
    draft_models: dict[str, str],
    guided_tokens: list[list[int]],
    trouble: str,
    num_drafts: int,
    draft_model: str,
    overlap: bool,
) -> None:
    with toy_engine(llama, num_drafts, overlap=overlap, draft_model=draft_models.get(draft_model, "")) as (engine, _):
        answers = made()
        broken = ask(answers[0].request.prompt_ids, grammar=f"50 {trouble} 20", max_tokens=90)
        assert answer_all(engine, [*answers, broken])[:-1] == guided_tokens
    assert broken.finish is FinishReason.GRAMMAR_ERROR
    assert broken.tokens == guided_tokens[0][:20]


def test_a_late_answer_defers_its_slot_and_holds_up_no_other(
    llama: LoadedModel, guided_tokens: list[list[int]], overlap: bool
) -> None:
    with toy_engine(llama, 7, overlap=overlap, row_timeout_ms=5.0) as (engine, grammar):
        seen_free, withheld = threading.Event(), threading.Event()

        def late_once(record: Record) -> None:
            # The answer comes when a free request has 30 tokens, however long that takes.
            if record.commit_pos > 10 and not withheld.is_set():
                withheld.set()
                free.submit(engine)
                assert seen_free.wait(PATIENCE_S)

        def watch(answer: Answer) -> None:
            if len(answer.tokens) >= 30:
                seen_free.set()

        grammar.sidecar.before = late_once
        guided = MIX[0]()
        free = ask(tokens(9, 9), max_tokens=60, ignore_eos=True, drafts=0, on_event=watch)
        answer_all(engine, [guided])
        free.wait()
        assert guided.tokens == guided_tokens[0]
        assert guided.telemetry.deferred_rows >= 1
        assert len(grammar.opened) == 1


def test_a_slot_with_missing_rows_is_in_no_step(
    llama: LoadedModel, guided_tokens: list[list[int]], overlap: bool
) -> None:
    with toy_engine(llama, 7, overlap=overlap) as (engine, grammar):
        sidecar = grammar.sidecar
        withheld, gave = threading.Event(), threading.Event()

        def late(record: Record) -> int | None:
            if record.commit_pos <= 10 or gave.is_set():
                return None
            if not withheld.is_set():
                withheld.set()
                free.submit(engine)
            return 0

        def watch(answer: Answer) -> None:
            if len(answer.tokens) >= 30 and not gave.is_set():
                gave.set()
                sidecar.give()

        sidecar.withhold = late
        guided = MIX[0]()
        free = ask(tokens(9, 9), max_tokens=60, ignore_eos=True, drafts=0, on_event=watch)
        answer_all(engine, [guided])
        assert guided.tokens == guided_tokens[0]
        # With overlap the next step was launched before the first was read.
        assert guided.telemetry.deferred_rows == (2 if overlap else 1)
        assert len(free.wait().tokens) == 60
        assert len(grammar.opened) == 1


@pytest.mark.parametrize("during_a_step", [False, True])
def test_a_sidecar_that_is_silent_for_a_while_loses_nothing(
    llama: LoadedModel, guided_tokens: list[list[int]], during_a_step: bool, overlap: bool
) -> None:
    with toy_engine(llama, 7, overlap=overlap, row_timeout_ms=30_000.0) as (engine, grammar):
        reached, go_on, answers = threading.Event(), threading.Event(), made()

        def stop(record: Record) -> None:
            if record.commit_pos + len(record.committed) >= 15 and not reached.is_set():
                reached.set()
                if during_a_step:
                    assert go_on.wait(PATIENCE_S)

        grammar.sidecar.before = stop
        hold = Hold(engine, lambda: reached.is_set() and not during_a_step)
        for answer in answers:
            answer.submit(engine)
        assert reached.wait(PATIENCE_S)
        with nullcontext() if during_a_step else hold.reached():
            engine._channel.set_abort()
            engine.grammar_silent()
        # No other sequence waits for it: unguided ones run to their end, guided ones pause.
        for answer in answers:
            if answer.request.grammar is None:
                answer.wait()
        assert not all(answer.over for answer in answers)
        posts = grammar.sidecar.end.stats()["records"]
        engine._channel.clear_abort()
        engine.grammar_alive()
        go_on.set()
        assert [answer.wait().tokens for answer in answers] == guided_tokens
        assert len(grammar.opened) == 5
        assert grammar.sidecar.end.stats()["records"] > posts


def test_answers_that_only_defer_make_the_engine_open_the_slot_again(
    llama: LoadedModel, guided_tokens: list[list[int]], overlap: bool
) -> None:
    with toy_engine(llama, 7, overlap=overlap) as (engine, grammar):

        def lost_the_thread(record: Record) -> bool:
            return record.commit_pos + len(record.committed) > 10 and len(grammar.opened) == 1

        grammar.sidecar.refuse = lost_the_thread
        answer = MIX[0]()
        answer_all(engine, [answer])
        assert answer.tokens == guided_tokens[0]
        # With overlap every second of these steps was launched before the first was read.
        assert engine.stats().deferred_rows == (8 if overlap else 4)
        ((slot, gen, nothing), (again, same, committed)) = grammar.opened
        assert (slot, gen, nothing) == (again, same, ())
        assert list(committed) == guided_tokens[0][: len(committed)]
        assert len(committed) > 10
        grammar.opened.pop()


def test_a_matcher_that_never_answers_ends_its_request(llama: LoadedModel, overlap: bool) -> None:
    with toy_engine(llama, 7, overlap=overlap) as (engine, grammar):
        engine.grammar_slots.stall_s = PATIENCE_S
        grammar.sidecar.refuse = lambda record: record.slot == 0
        stuck, fine = (ask(tokens(9, seed), grammar="30", max_tokens=60) for seed in (1, 2))
        for answer in (stuck, fine):
            answer.submit(engine)
        assert fine.wait().finish is FinishReason.STOP
        until_false(lambda: len(grammar.opened) <= 3)
        engine.grammar_slots.stall_s = 0.3
        assert isinstance(stuck.wait().error, GrammarUnavailable)
        assert stuck.tokens == []


@pytest.mark.parametrize("frozen", [True, False], ids=["not read", "read, and slow"])
def test_a_slot_whose_record_was_overwritten_unread_is_opened_again(
    llama: LoadedModel, guided_tokens: list[list[int]], frozen: bool, overlap: bool
) -> None:
    with toy_engine(llama, 7, overlap=overlap, row_timeout_ms=5.0) as (engine, grammar):
        sidecar, channel = grammar.sidecar, engine._channel
        assert channel is not None

        def any_deferred() -> bool:
            return any(each.stage is SequenceStage.PARKED for each in engine.sequence_stats())

        def trouble(record: Record) -> int | None:
            if record.slot != 0 or record.commit_pos < 10 or grammar.opened[1:] or sidecar.overruns:
                return None
            # This record is answered; the next one is not read, or has no row for a while.
            sidecar.frozen = frozen
            return None if frozen else 0

        sidecar.withhold = trouble
        answer = MIX[0]()
        answer.submit(engine)
        if frozen:
            assert sidecar.froze.wait(PATIENCE_S)
        else:
            until_false(lambda: not sidecar.withheld)
        until_false(lambda: (len(sidecar.records) == channel.last_seq) == frozen)
        until_false(lambda: not any_deferred() or engine.num_inflight_steps > 0)
        until_false(lambda: not frozen and len(sidecar.records) < channel.last_seq)
        # As the drafts of others would do it; the engine's own thread posts nothing now.
        others = channel.batch_arrays(1)
        others.slots[0], others.slot_gens[0], others.commit_pos[0] = 3, 99, 0
        others.n_commit[0] = others.n_draft[0] = 0
        others.need_rows[0] = 1
        for _ in range(channel.layout.num_recs + 4):
            read = len(sidecar.records)
            channel.post_batch(others, 1)
            until_false(lambda: not frozen and len(sidecar.records) == read)  # noqa: B023 - ends before it changes
        if frozen:
            until_false(lambda: len(grammar.opened) < 2)
            sidecar.frozen = False
        else:
            # Many turns of the engine, and a look at the slot in each.
            answer_all(engine, [ask(tokens(9, 9), max_tokens=40, ignore_eos=True, drafts=0)])
            assert any_deferred()
            sidecar.withhold = lambda record: None
            sidecar.give()
        assert answer.wait().tokens == guided_tokens[0]
        assert len(grammar.opened) == (2 if frozen else 1)
        assert (sidecar.overruns > 0) == frozen


def test_an_answer_for_an_earlier_owner_of_the_slot_frees_no_token(llama: LoadedModel) -> None:
    with toy_engine(llama, 7, row_timeout_ms=20.0) as (engine, grammar):
        engine.grammar_slots.stall_s = 0.3
        grammar.sidecar.gen_shift = -1
        answer = ask(tokens(9, 1), grammar="30", max_tokens=60)
        answer_all(engine, [answer])
        assert isinstance(answer.error, GrammarUnavailable)
        assert answer.tokens == []


def test_a_request_that_comes_during_an_outage_waits_for_its_end(llama: LoadedModel) -> None:
    with toy_engine(llama, 3) as (engine, grammar):
        engine.grammar_lost()
        guided = ask(tokens(9, 1), grammar="20", max_tokens=60)
        guided.submit(engine)
        answer_all(engine, [ask(tokens(9, 2), ignore_eos=True)])
        assert grammar.opened == []
        assert guided.events == []
        engine.grammar_restored()
        assert legal(guided.wait())


def test_events_for_an_earlier_owner_of_a_slot_are_ignored(
    llama: LoadedModel, guided_tokens: list[list[int]], overlap: bool
) -> None:
    with toy_engine(llama, 3, overlap=overlap, max_batch_size=1) as (
        engine,
        grammar,
    ):
        answer_all(engine, [ask(tokens(9, 1), grammar="12", max_tokens=60)])

        def news(answer: Answer) -> None:
            if not answer.over:
                engine.grammar_failed(0, 1, GrammarUnavailable("of another sequence"))
                engine.grammar_opened(0, 1, compile_ms=9.0, cache_hit=False, backend=1)

        answer = MIX[0]()
        answer.on_event = news
        assert answer_all(engine, [answer]) == guided_tokens[:1]
        assert [(slot, gen) for slot, gen, _ in grammar.opened] == [(0, 1), (0, 2)]
        assert answer.telemetry.backend == 2


def test_the_matcher_of_a_preempted_request_is_opened_at_its_tokens(llama: LoadedModel, overlap: bool) -> None:
    with toy_engine(llama, overlap=overlap, max_model_len=128, kv_cache_tokens=128) as (engine, grammar):
        found = answer_all(engine, [ask(tokens(20, seed), grammar="70", max_tokens=80) for seed in range(4)])
        preemptions = engine.stats().preemptions
    assert len(grammar.opened) == 4 + preemptions > 4
    again = [list(committed) for _, _, committed in grammar.opened if committed]
    assert again
    assert all(any(ids[: len(committed)] == committed for ids in found) for committed in again)


def test_a_stop_inside_a_block_of_drafts_ends_a_guided_answer(llama: LoadedModel, overlap: bool) -> None:
    # The history holds whole answers with their stops, so the drafter proposes them.
    with toy_engine(llama, 7, overlap=overlap) as (engine, grammar):
        start = tokens(8, 1)
        first = ask(start, grammar="14", max_tokens=60)
        answer_all(engine, [first])
        prompt = start + first.tokens + start
        again = [ask(prompt, grammar=str(length), max_tokens=60) for length in range(8, 15)]
        answer_all(engine, again)
        drafted_stops = [record for record in grammar.sidecar.records if EOS in record.drafts]
    assert all(legal(answer) and answer.finish is FinishReason.STOP for answer in again)
    assert all(answer.events[-1].matched_token_id == EOS for answer in again)
    assert drafted_stops
    assert any(len(answer.events[-1].token_ids) > 1 for answer in again)


@pytest.mark.parametrize("at", [0, 1, 12])
@pytest.mark.parametrize("num_drafts", [0, 7])
def test_a_grammar_that_kills_every_sidecar_ends_alone(
    llama: LoadedModel, guided_tokens: list[list[int]], at: int, num_drafts: int, overlap: bool
) -> None:
    with toy_engine(llama, num_drafts, overlap=overlap) as (engine, grammar):
        answers = made()
        deadly = ask(answers[0].request.prompt_ids, grammar=f"50 crash {at}", max_tokens=90)
        with grammar.supervised(engine):
            assert answer_all(engine, [*answers[:2], deadly, *answers[2:]])[:2] == guided_tokens[:2]
            assert [answer.wait().tokens for answer in answers] == guided_tokens
        assert isinstance(deadly.error, InternalError)
        assert "died" in str(deadly.error)
        assert deadly.tokens == guided_tokens[0][: len(deadly.tokens)]
        assert len(deadly.tokens) <= max(at, 1)
        assert 3 <= len(grammar.buried) <= 8
        assert [problem for sidecar in grammar.buried for problem in sidecar.problems] == []
        # Its end does not count against the sidecar.
        assert engine.grammar_progress > 50


def test_several_grammars_that_kill_the_sidecar_are_found_one_by_one(
    llama: LoadedModel, guided_tokens: list[list[int]], overlap: bool
) -> None:
    with toy_engine(llama, 3, overlap=overlap) as (engine, grammar):
        deadly = [ask(tokens(9, seed), grammar="50 crash 0", max_tokens=90) for seed in range(3)]
        answer = MIX[0]()
        with grammar.supervised(engine):
            answer_all(engine, [*deadly, answer])
        assert answer.tokens == guided_tokens[0]
        assert all(isinstance(each.error, InternalError) and each.tokens == [] for each in deadly)
        assert len(grammar.buried) <= 9


@pytest.mark.parametrize("what", ["drafts", "forced"])
def test_a_library_that_dies_of_drafts_costs_two_processes_and_no_answer(
    llama: LoadedModel, guided_tokens: list[list[int]], overlap: bool, what: str
) -> None:
    def die(record: Record) -> None:
        if record.drafts if what == "drafts" else record.stage == Stage.PROPOSE:
            raise CrashError

    with toy_engine(llama, 3, overlap=overlap) as (engine, grammar):
        grammar.before = grammar.sidecar.before = die
        with grammar.supervised(engine):
            assert answer_all(engine, [MIX[0]()]) == guided_tokens[:1]
        assert len(grammar.buried) == 2
        # The next owner of the slot drafts again.
        grammar.before = grammar.sidecar.before = None
        again = MIX[0]()
        assert answer_all(engine, [again]) == guided_tokens[:1]
        assert again.telemetry.draft_tokens > 0


@pytest.mark.parametrize("budget", [16, 128])
def test_a_library_that_dies_of_a_first_row_ends_its_request_at_the_third_crash(
    llama: LoadedModel, budget: int
) -> None:
    """Also where the first of these rows is asked for before the matcher is known to be open."""

    def die(record: Record) -> None:
        raise CrashError

    answer = ask(LONG, grammar="20", max_tokens=60)
    with toy_engine(llama, 0, overlap=False, max_batched_tokens=budget) as (engine, grammar):
        late_posts(engine, grammar)
        grammar.before = grammar.sidecar.before = die
        with grammar.supervised(engine):
            answer.submit(engine)
            assert isinstance(answer.wait().error, InternalError)
            grammar.before = None
        assert len(grammar.buried) == 3


def test_ends_from_outside_end_no_request(llama: LoadedModel, guided_tokens: list[list[int]], overlap: bool) -> None:
    with toy_engine(llama, 3, overlap=overlap) as (engine, grammar):
        grammar.forgives = True
        answer = ask(MIX[0]().request.prompt_ids, grammar="50 crash 0", max_tokens=90)
        with grammar.supervised(engine):
            answer.submit(engine)
            until_false(lambda: len(grammar.buried) < 10)
            assert not answer.over
            assert engine.abort(answer.request.request_id)
            answer.wait()
