"""What a request says about its wait for a slot, and what a server says about its batches, on a whole engine."""

from __future__ import annotations

import time

import pytest

from gpu_engine.api.errors import QueueTimeout
from gpu_engine.model.loader import LoadedModel
from tests.gpu_engine.harness import Answer, Hold, answer_all, ask, config, held, tokens, unguided_engine


def endless(seed: int) -> Answer:
    """Return a request that ends after a second at the earliest."""
    return ask(tokens(5, seed), max_tokens=1000, ignore_eos=True, seed=seed, on_event=lambda answer: time.sleep(0.005))


def test_a_request_that_waits_for_too_long_ends_alone_and_says_for_how_long(llama: LoadedModel, overlap: bool) -> None:
    with unguided_engine(llama, config(max_batch_size=1, overlap=overlap)) as engine:
        runs, hasty, patient = endless(1), ask(tokens(9, 2)), ask(tokens(9, 2))
        hasty.change(max_queue_ms=20)
        hold = Hold(engine, lambda: bool(runs.tokens))
        runs.submit(engine)
        with hold.reached():
            for answer in (hasty, patient):
                answer.submit(engine)
            time.sleep(0.03)  # longer than it waits at most
        error = hasty.wait().error
        assert isinstance(error, QueueTimeout)
        assert str(error).startswith("max_queue_ms: waited ")
        assert "at most 20 ms" in str(error)
        assert hasty.tokens == []
        engine.abort(runs.request.request_id)
        assert patient.wait().tokens
        assert engine.stats().failed == {"DEADLINE_EXCEEDED": 1}


def test_an_idle_engine_ends_a_wait_in_time(llama: LoadedModel) -> None:
    with unguided_engine(llama, config(max_batch_size=1)) as engine:
        first, second = ask(tokens(9, 1)), ask(tokens(9, 2))
        for answer in (first, second):
            answer.change(max_queue_ms=30_000)
        assert all(answer_all(engine, [first, second]))
        assert engine._loop.scheduler.next_due_s > 0


def test_a_request_that_is_never_preempted_keeps_its_slot_and_two_of_them_end(
    llama: LoadedModel, overlap: bool
) -> None:
    def made() -> list[Answer]:
        return [ask(tokens(40, n), max_tokens=150, ignore_eos=True, seed=n) for n in range(4)]

    with unguided_engine(llama, config(overlap=overlap)) as engine:
        expected = answer_all(engine, made())
        assert engine.stats().preemptions == 0
    with unguided_engine(llama, config(overlap=overlap, kv_cache_tokens=256, prefix_cache=False)) as engine:
        answers = made()
        for answer in answers[2:]:  # both together need more pages than there are
            answer.change(never_preempt=True)
        lost: list[str] = []
        taken = engine._loop._slot_lost
        engine._loop._slot_lost = lambda sequence: (lost.append(sequence.request.request_id), taken(sequence))[1]  # type: ignore[method-assign]
        assert answer_all(engine, answers) == expected
        assert lost
        assert not {answer.request.request_id for answer in answers[2:]} & set(lost)


@pytest.mark.parametrize(("starves_s", "first"), [(0.0, "high"), (0.03, "low")])
def test_a_low_priority_starves_no_longer_than_the_setting_says(
    llama: LoadedModel, starves_s: float, first: str
) -> None:
    with unguided_engine(llama, config(max_batch_size=1, max_starvation_s=starves_s)) as engine:
        runs, low, high = (
            endless(1),
            *(ask(tokens(5, n), max_tokens=3, name=name) for n, name in ((2, "low"), (3, "high"))),
        )
        low.change(priority=-1)
        high.change(priority=1)
        waits = engine._loop.scheduler
        hold = Hold(engine, lambda: bool(runs.tokens) and (starves_s == 0 or waits.waiting[0].starving))
        with held(engine):
            runs.submit(engine)
            low.submit(engine)
        with hold.reached():
            assert [sequence.request for sequence in waits.waiting] == [low.request]
            high.submit(engine)
            engine.abort(runs.request.request_id)
        both = [low.wait(), high.wait()]
    order = sorted(both, key=lambda answer: answer.telemetry.scheduled_s)
    assert order[0].request.request_id == first
