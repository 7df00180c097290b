"""A graph of many lanes has fewer rows than one of few: longer proposals are cut there, and no token changes."""

from __future__ import annotations

import pytest

from gpu_engine.model.loader import LoadedModel
from shared_mem.layout import Stage
from tests.gpu_engine.device.device_engine import guided_device_engine
from tests.gpu_engine.device.device_requests import INTERPRETED, PATIENT, SMALL, on_cpu
from tests.gpu_engine.harness import Answer, Hold, ask, config, executor_of, tokens
from tests.gpu_engine.toy_sidecar import Automaton, ToyGrammar

pytestmark = INTERPRETED


def longest(grammar: ToyGrammar) -> int:
    """Return the largest number of drafts that one step verified."""
    return max(len(record.drafts) for record in grammar.sidecar.records if record.stage == Stage.VERIFY)


def cut_short(grammar: ToyGrammar, proposed: list[int]) -> int:
    """Return how often a step verified fewer drafts than were `proposed` to the step before it, in order."""
    counts, open_, cut = iter(proposed), dict[int, int](), 0
    for record in grammar.sidecar.records:
        if record.stage == Stage.PROPOSE:
            open_[record.slot] = min(next(counts), record.need_rows.bit_count())
        elif record.stage == Stage.VERIFY:
            cut += open_.pop(record.slot, 0) > len(record.drafts)
    return cut


@pytest.mark.slow
def test_drafts_beyond_the_rows_of_a_larger_bucket_are_dropped(llama: LoadedModel) -> None:
    def six() -> list[Answer]:
        return [ask(tokens(8, seed), grammar="18", max_tokens=20) for seed in range(6)]

    expected = on_cpu(llama, six())
    fields = {"drafter": "ngram", "num_draft_tokens": 2, "jump_forward_tokens": 15, **PATIENT}
    settings = config(device="cuda", **{**SMALL, "max_batch_size": 6}, **fields)
    with guided_device_engine(llama, settings) as (engine, grammar, _):
        runner = executor_of(engine).runner
        most: dict[tuple[int, bool], int] = {}
        for lanes, rows, guided in runner.launcher.captured:  # type: ignore[attr-defined]
            most[lanes, guided] = max(rows, most.get((lanes, guided), 0))
        assert most == {(b, g): 16 if g and b <= 4 else 3 for b in (1, 2, 4, 6) for g in (True, False)}
        # Each proposal is one right token and fourteen that are rarely right.
        proposed: list[int] = []

        def proposes(automaton: Automaton, emitted: list[int]) -> list[int]:
            rest = next((ids[len(emitted) :] for ids in expected if emitted and ids[: len(emitted)] == emitted), [])
            proposed.append(15)
            return [*rest[:1], *range(65, 79), 79][:15]

        grammar.sidecar.proposes = proposes
        answers = six()
        hold = Hold(engine, lambda: min(len(made.tokens) for made in answers[:3]) >= 3)
        for made in answers[:3]:
            made.submit(engine)
        # One of the others is prefilled in each iteration, while the first ones have many drafts.
        with hold.reached():
            for made in answers[3:]:
                made.submit(engine)
        assert [made.wait().tokens for made in answers] == expected
        assert engine.stats().deferred_rows == 0
        assert longest(grammar) > 7
        assert cut_short(grammar, proposed) > 0
