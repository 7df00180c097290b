"""What a scrape, the ring of iterations and the statistics of sequences say of a real engine is what it did."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from gpu_engine.api.stats import SequenceStats, Stage
from gpu_engine.core.engine import Engine
from gpu_engine.model.loader import LoadedModel
from gpu_engine.ops.metrics_engine import EngineCollector
from tests.gpu_engine.harness import (
    UNHURRIED_MS,
    Answer,
    answer_all,
    ask,
    settle,
    tokens,
    unguided_engine,
    with_drafts,
)
from tests.gpu_engine.toy_sidecar import guided_engine


def value(engine: Engine, name: str, **labels: str) -> float:
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine.stats, drafter="ngram", page_size=16, about={"model": "tiny"}))
    found = registry.get_sample_value(f"lockstep_{name}", labels)
    assert found is not None
    return found


def test_tokens_steps_drafts_and_times_add_up(llama: LoadedModel, overlap: bool) -> None:
    free, guided = ask(tokens(30, 1, repeat=10), max_tokens=40, ignore_eos=True), ask(tokens(20, 2), grammar="20")
    with guided_engine(llama, with_drafts(3, overlap=overlap, row_timeout_ms=UNHURRIED_MS)) as (engine, _):
        produced = sum(map(len, answer_all(engine, [free, guided])))
        settle(engine)
        telemetry = [answer.telemetry for answer in (free, guided)]
        assert value(engine, "info", model="tiny") == 1
        assert value(engine, "prompt_tokens_total") == 29 + 19
        assert value(engine, "generation_tokens_total") == produced
        assert value(engine, "tokens_per_step_sum") == produced
        assert value(engine, "tokens_per_step_count") == sum(times.steps for times in telemetry)
        assert value(engine, "step_seconds_count") == engine.stats().steps
        assert 0 < value(engine, "mask_wait_seconds_count") <= engine.stats().steps
        drafts = [value(engine, f"{kind}_total", drafter="ngram") for kind in ("draft_tokens", "accepted_draft_tokens")]
        assert drafts == [
            sum(times.draft_tokens for times in telemetry),
            sum(times.accepted_draft_tokens for times in telemetry),
        ]
        # Between n emissions of a sequence there are n - 1 gaps.
        emissions = sum(sum(bool(event.token_ids) for event in answer.events) for answer in (free, guided))
        assert value(engine, "inter_token_latency_seconds_count") == emissions - 2
        for answer in (free, guided):
            times = answer.telemetry
            assert answer.request.arrived_s <= times.scheduled_s <= times.prefilled_s <= times.first_token_s
            assert times.first_token_s <= times.last_token_s <= times.finished_s


@pytest.mark.parametrize(("trouble", "counter"), [("dead", "dead_ends_total"), ("error", "matcher_errors_total")])
def test_a_guided_end_without_a_legal_token_is_counted_by_its_cause(
    llama: LoadedModel, trouble: str, counter: str
) -> None:
    with guided_engine(llama, with_drafts(3, row_timeout_ms=UNHURRIED_MS)) as (engine, _):
        answer_all(engine, [ask(tokens(20, 3), grammar=f"50 {trouble} 5"), ask(tokens(20, 3), grammar="10")])
        assert value(engine, counter) == 1
        assert value(engine, "dead_ends_total") + value(engine, "matcher_errors_total") == 1


def test_the_iterations_of_an_engine_add_up_to_its_counters(llama: LoadedModel, overlap: bool) -> None:
    with unguided_engine(llama, with_drafts(3, overlap=overlap, max_batch_size=2)) as engine:
        answers = [ask(tokens(40, i, repeat=10), max_tokens=12, drafts=3) for i in range(5)]
        answer_all(engine, answers)
        answer_all(engine, [ask(tokens(5, 9), max_tokens=1)])
        settle(engine)
        stats = engine.stats()
        found, end = engine.iterations.since(0)
    assert [each.number for each in found] == list(range(end))
    for name in ("generated_tokens", "draft_tokens", "accepted_draft_tokens", "prefill_tokens"):
        assert sum(getattr(each, name) for each in found) == getattr(stats, name), name
    assert sum(len(answer.tokens) for answer in answers) + 1 == stats.generated_tokens
    assert max(each.running for each in found) == max(each.decoding for each in found) == 2
    assert max(each.waiting for each in found) == 3
    assert all(each.seconds > 0 and each.parked == 0 and each.preempted == 0 for each in found)
    assert max(each.pages_used for each in found) > 0
    assert [each.ended_s for each in found] == sorted(each.ended_s for each in found)


def test_an_engine_says_what_each_sequence_is_doing(llama: LoadedModel) -> None:
    seen: list[list[SequenceStats]] = []
    running: list[Engine] = []

    def look(answer: Answer) -> None:
        if not seen and len(answer.tokens) >= 4:
            seen.append(running[0].sequence_stats())

    with unguided_engine(llama, with_drafts(0, max_batch_size=1)) as engine:
        running.append(engine)
        first = ask(tokens(20, 1), name="a", max_tokens=30, on_event=look)
        second = ask(tokens(6, 2), name="b", max_tokens=2)
        second.change(client_id="team")
        answer_all(engine, [first, second])
        assert engine.sequence_stats() == []
    decodes, waits = seen[0]
    assert (decodes.request_id, decodes.stage, decodes.slot, decodes.prompt_tokens) == ("a", Stage.DECODE, 0, 20)
    assert decodes.prefilled_tokens == 20
    assert 4 <= decodes.generated_tokens < 30
    assert decodes.pages > 0
    assert waits == SequenceStats("b", 0, "team", Stage.WAITING, 6, 0, 0, None, 0)
