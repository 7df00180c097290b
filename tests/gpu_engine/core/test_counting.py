"""What a scrape says of a real engine is what the engine did."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from gpu_engine.core.engine import Engine
from gpu_engine.model.loader import LoadedModel
from gpu_engine.ops.metrics_engine import EngineCollector
from tests.gpu_engine.harness import UNHURRIED_MS, answer_all, ask, settle, tokens, with_drafts
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
