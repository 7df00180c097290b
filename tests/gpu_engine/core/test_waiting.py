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


def test_a_request_that_waits_for_too_long_ends_and_says_for_how_long(llama: LoadedModel, overlap: bool) -> None:
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


def test_a_request_that_is_never_preempted_keeps_its_slot_and_two_of_them_end(
    llama: LoadedModel, overlap: bool
) -> None:
    lost: set[str] = set()

    def made() -> list[Answer]:
        return [ask(tokens(40, n), max_tokens=150, ignore_eos=True, seed=n) for n in range(4)]

    with unguided_engine(llama, config(overlap=overlap)) as engine:
        expected = answer_all(engine, made())
        assert engine.stats().preemptions == 0
    with unguided_engine(llama, config(overlap=overlap, kv_cache_tokens=256, prefix_cache=False)) as engine:

        def look(answer: Answer) -> None:
            lost.update(s.request_id for s in engine.sequence_stats() if s.generated_tokens and s.slot is None)

        answers = made()
        for answer in answers:
            answer.on_event = look
        for answer in answers[2:]:  # both together need more pages than there are
            answer.change(never_preempt=True)
        assert answer_all(engine, answers) == expected
    assert lost
    assert not {answer.request.request_id for answer in answers[2:]} & lost


@pytest.mark.parametrize(("starves_s", "first"), [(0.0, "high"), (0.03, "low")])
def test_a_low_priority_starves_no_longer_than_the_setting_says(
    llama: LoadedModel, starves_s: float, first: str
) -> None:
    with unguided_engine(llama, config(max_batch_size=1, max_starvation_s=starves_s)) as engine:
        runs = endless(1)
        low, high = (ask(tokens(5, n), max_tokens=3, name=name) for n, name in ((2, "low"), (3, "high")))
        low.change(priority=-1)
        high.change(priority=1)
        seen: list[float] = []

        def waited() -> bool:
            """The wait was long enough in an earlier iteration, so the plan of this one has seen it."""
            if runs.tokens and time.monotonic() > submitted_s + starves_s:
                seen.append(time.monotonic())
            return len(seen) > 1

        hold = Hold(engine, waited)
        with held(engine):
            runs.submit(engine)
            low.submit(engine)
            submitted_s = time.monotonic()
        with hold.reached():
            assert [each.request_id for each in engine.sequence_stats() if each.slot is None] == ["low"]
            high.submit(engine)
            engine.abort(runs.request.request_id)
        both = [low.wait(), high.wait()]
    order = sorted(both, key=lambda answer: answer.telemetry.scheduled_s)
    assert order[0].request.request_id == first
