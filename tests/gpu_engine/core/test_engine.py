"""The engine's life: bounds, endings from outside, faults in an iteration, and threads that all talk to it at once."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from gpu_engine.api.errors import InternalError, LimitExceeded, ShuttingDown
from gpu_engine.api.request import FinishReason
from gpu_engine.core.engine import Engine
from gpu_engine.model.loader import LoadedModel
from shared_mem.channel import EngineEnd, GrammarEnd
from shared_mem.layout import Layout
from shared_mem.segment import Segment
from tests.gpu_engine.core.failing import FailsOnce
from tests.gpu_engine.harness import (
    PATIENCE_S,
    Answer,
    Hold,
    answer_all,
    answer_each,
    ask,
    config,
    held,
    running,
    settle,
    tokens,
    unguided_engine,
    until_false,
    with_drafts,
)


def endless(seed: int = 1, **fields: Any) -> Answer:
    return ask(tokens(5, seed), max_tokens=10_000, ignore_eos=True, **fields)


def submit_all(engine: Engine, answers: list[Answer]) -> None:
    for answer in answers:
        answer.submit(engine)


def in_threads(work: list[Any]) -> None:
    """Run each of `work` in its own thread, and wait for all of them."""
    threads = [threading.Thread(target=each) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_the_queue_has_a_bound_that_is_named(llama: LoadedModel) -> None:
    engine = Engine(config(max_batch_size=2, max_queue_size=3), llama)
    assert "llama float32 cpu" in repr(engine)
    assert "running=0/2 waiting=0" in repr(engine)
    answers = [ask(tokens(5, seed)) for seed in range(6)]
    submit_all(engine, answers[:5])
    with pytest.raises(LimitExceeded, match="max_queue_size = 3"):
        answers[5].submit(engine)
    assert engine.stats().waiting == 5
    with running(engine):
        for answer in answers[:5]:
            answer.wait()
        answer_all(engine, answers[5:])  # sequences that have ended make room


def test_more_requests_than_slots_are_answered_in_the_order_of_arrival(llama: LoadedModel, overlap: bool) -> None:
    begun: dict[Answer, None] = {}
    with unguided_engine(llama, config(overlap=overlap, max_batch_size=2)) as engine:
        answers = [
            ask(tokens(5, seed), ignore_eos=True, max_tokens=9, on_event=lambda one: begun.setdefault(one))
            for seed in range(9)
        ]
        answer_all(engine, answers)
    assert list(begun) == answers
    assert [len(answer.tokens) for answer in answers] == [9] * 9


def test_closing_ends_what_runs_and_what_waits(llama: LoadedModel, overlap: bool) -> None:
    with unguided_engine(llama, config(overlap=overlap, max_batch_size=1)) as engine:
        runs, waits = endless(), endless(2)
        hold = Hold(engine, lambda: bool(runs.tokens))
        submit_all(engine, [runs, waits])
        with hold.reached():
            engine.close(0)
        engine.close(PATIENCE_S)
        assert runs.wait().finish is waits.wait().finish is FinishReason.ABORTED
        assert waits.tokens == []
        with pytest.raises(ShuttingDown):
            engine.submit(endless().request)


def test_whatever_was_accepted_before_the_close_gets_an_end(llama: LoadedModel, overlap: bool) -> None:
    with unguided_engine(llama, config(overlap=overlap, max_queue_size=10_000)) as engine:
        accepted: list[Answer] = []

        def submit_until_closed() -> None:
            try:
                while True:
                    answer = ask(tokens(3, 1), max_tokens=2)
                    answer.submit(engine)
                    accepted.append(answer)
            except (LimitExceeded, ShuttingDown):
                return

        def close() -> None:
            until_false(lambda: len(accepted) <= 50)
            engine.close(PATIENCE_S)

        in_threads([submit_until_closed] * 4 + [close])
        assert all(answer.over for answer in accepted)


def test_threads_may_submit_and_read_counters_at_once(llama: LoadedModel) -> None:
    with unguided_engine(llama, with_drafts(3)) as engine:
        answers = [ask(tokens(6, seed), max_tokens=8, ignore_eos=True) for seed in range(24)]

        def submit(part: list[Answer]) -> None:
            for answer in part:
                answer.submit(engine)
                engine.stats()

        in_threads([lambda part=answers[i::4]: submit(part) for i in range(4)])
        assert [len(answer.wait().tokens) for answer in answers] == [8] * 24
        stats = engine.stats()
    assert (stats.finished, stats.generated_tokens, stats.failed) == ({"LENGTH": 24}, 24 * 8, {})


@pytest.mark.parametrize("running", [True, False])
def test_abort_ends_every_sequence_of_a_request(llama: LoadedModel, running: bool, overlap: bool) -> None:
    with unguided_engine(llama, config(overlap=overlap, max_batch_size=3 if running else 1)) as engine:
        other = ask(tokens(5, 9), max_tokens=60, ignore_eos=True)
        parts = [endless(seed, name="n") for seed in (1, 2)]
        hold = Hold(engine, lambda: len((parts[1] if running else other).tokens) >= 5)
        with held(engine):
            submit_all(engine, [other, *parts])
        with hold.reached():
            assert engine.abort("n")
        assert [part.wait().finish for part in parts] == [FinishReason.ABORTED] * 2
        assert not engine.abort("n")
        assert other.wait().finish is FinishReason.LENGTH


def test_a_dropped_request_says_no_more_and_frees_its_place(llama: LoadedModel, overlap: bool) -> None:
    with unguided_engine(llama, config(overlap=overlap, max_batch_size=1)) as engine:
        gone, line = endless(), endless(2)
        hold = Hold(engine, lambda: len(gone.tokens) >= 3)
        submit_all(engine, [gone, line])
        with hold.reached():
            for each in (line, gone, gone):
                engine.drop(each.request)
        answer_all(engine, [ask(tokens(5, 3))])
        assert not gone.over
        assert line.events == []
        assert engine.stats().finished["DROPPED"] == 2


@pytest.mark.parametrize("what", ["a sink", "a forward"])
def test_a_fault_in_an_iteration_ends_what_was_there_and_nothing_else(
    llama: LoadedModel, caplog: pytest.LogCaptureFixture, overlap: bool, what: str
) -> None:
    def raises(answer: Answer) -> None:
        raise RuntimeError("a fault of the test")

    net = FailsOnce(llama.net)
    model = replace(llama, net=net, fused=replace(llama.fused, forward=None))
    with unguided_engine(model, config(overlap=overlap, max_batch_size=4)) as engine:
        (expected,) = answer_each(engine, [ask(tokens(5, 3))])
        answers, faulty = [endless(seed) for seed in range(3)], ask(tokens(5, 7), max_tokens=1, on_event=raises)
        hold = Hold(engine, lambda: len(answers[2].tokens) >= 5)
        with held(engine):
            submit_all(engine, answers)
        with caplog.at_level(logging.CRITICAL):
            with hold.reached():
                if what == "a forward":
                    net.fails_next = True
                else:
                    faulty.submit(engine)
            for answer in answers:
                assert isinstance(answer.wait().error, InternalError)
            settle(engine)
        engine.check_integrity()
        assert answer_each(engine, [ask(tokens(5, 3))]) == [expected]
        assert engine.stats().failed == {"INTERNAL": 3}


class RaisingPort:
    """A grammar port that is broken."""

    def open(self, *_: object, **__: object) -> None:
        raise RuntimeError("no way to the grammar process")

    close = open


def test_a_broken_way_to_the_grammar_process_does_not_end_the_thread(llama: LoadedModel) -> None:
    settings = with_drafts(3, max_batch_size=2)
    with Segment.create(Layout(2, settings.num_rows, llama.vocab_size)) as segment:
        engine = Engine(settings, llama, EngineEnd(segment), RaisingPort())  # type: ignore[arg-type]
        engine.start()
        ask(tokens(5, 1), grammar="9").submit(engine)
        until_false(lambda: bool(engine.stats().waiting + engine.stats().running))
        assert len(answer_each(engine, [ask(tokens(5, 2), ignore_eos=True)])[0]) == 40
        engine.close()


def test_an_idle_engine_shows_life_to_the_grammar_process(llama: LoadedModel) -> None:
    settings = config()
    with Segment.create(Layout(settings.max_batch_size, settings.num_rows, llama.vocab_size)) as segment:
        grammar = GrammarEnd(segment)
        assert grammar.heartbeat_age_ns() is None
        with running(Engine(settings, llama, EngineEnd(segment))):
            until_false(lambda: grammar.heartbeat_age_ns() is None)
            now_ns = time.monotonic_ns()
            until_false(lambda: time.monotonic_ns() - (grammar.heartbeat_age_ns() or 0) <= now_ns)


def test_an_idle_engine_closes_without_a_wait(llama: LoadedModel) -> None:
    engine = Engine(with_drafts(0), llama)
    engine.heartbeat_s = 2 * PATIENCE_S
    engine.start()
    answer_all(engine, [ask(tokens(5, 1), max_tokens=2)])
    settle(engine)  # the thread waits for a message
    engine.close(PATIENCE_S)
    assert not engine._thread.is_alive()
