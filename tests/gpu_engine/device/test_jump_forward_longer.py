"""Captured steps with more jump-forward tokens than K: the tokens are those of a CPU without drafts."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from gpu_engine.model.loader import LoadedModel
from shared_mem.layout import Stage
from tests.gpu_engine import eagle
from tests.gpu_engine.device.device_engine import guided_device_engine
from tests.gpu_engine.device.device_requests import INTERPRETED, PATIENT, SMALL
from tests.gpu_engine.drafters.proposals import Proposes
from tests.gpu_engine.harness import (
    Answer,
    Hold,
    answer_all,
    answer_each,
    ask,
    config,
    executor_of,
    tokens,
    with_drafts,
)
from tests.gpu_engine.step.random_budget import RandomBudget
from tests.gpu_engine.toy_sidecar import Automaton, ToyGrammar, guided_engine

pytestmark = INTERPRETED

GUIDED = [
    partial(ask, tokens(20, 1, repeat=8), grammar="14", max_tokens=30),
    partial(ask, tokens(7, 2), max_tokens=6, ignore_eos=True),
    partial(ask, tokens(11, 3), grammar="17", max_tokens=12, temperature=1.0, seed=3),
    partial(ask, tokens(57, 4), grammar="30", max_tokens=40),
    partial(ask, tokens(9, 5), grammar="1", max_tokens=9),
    partial(ask, tokens(8, 6), grammar="13", max_tokens=20, temperature=0.5, seed=6),
]
"""Requests that end by a stop token, by `max_tokens` and by the model's length; one is unguided."""


@pytest.fixture(scope="module")
def expected(llama: LoadedModel) -> list[list[int]]:
    with guided_engine(llama, with_drafts(0, **SMALL)) as (engine, _):
        emitted = answer_each(engine, [make() for make in GUIDED])
    assert [len(ids) for ids in emitted] == [15, 6, 12, 7, 2, 14]
    return emitted


def sometimes(expected: list[list[int]]) -> Proposes:
    """Return a proposer that varies with the number of tokens.

    It proposes the whole rest and more, five right tokens and two wrong ones, only wrong ones, or nothing.
    """

    def proposes(automaton: Automaton, emitted: list[int]) -> list[int]:
        rest = next((ids[len(emitted) :] for ids in expected if emitted and ids[: len(emitted)] == emitted), [])
        return ([*rest, 65, 66], [*rest[:5], 67, 68], [len(emitted), 65, 66], [])[len(emitted) % 4]

    return proposes


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
@pytest.mark.parametrize(
    ("sync", "drafter", "num_drafts"), [("host_callback", "ngram", 2), ("device_flag", "grammar", 1)]
)
def test_tokens_equal_those_of_a_cpu(
    llama: LoadedModel, expected: list[list[int]], sync: str, drafter: str, num_drafts: int
) -> None:
    settings = config(
        device="cuda",
        sync=sync,
        drafter=drafter,
        num_draft_tokens=num_drafts,
        jump_forward_tokens=7,
        **SMALL,
        **PATIENT,
    )
    with guided_device_engine(llama, settings) as (engine, grammar, _):
        grammar.sidecar.proposes = sometimes(expected)
        assert answer_all(engine, [make() for make in GUIDED]) == expected
        stats = engine.stats()
        assert longest(grammar) == 7
    assert stats.deferred_rows == 0
    assert stats.jump_forward_tokens > stats.accepted_jump_forward_tokens > 12


@pytest.mark.slow
@pytest.mark.parametrize(("drafts_by", "masks"), [("model", "on"), ("model", "off"), ("eagle3", "on")])
def test_a_draft_net_continues_after_many_jump_forward_tokens(
    llama: LoadedModel, expected: list[list[int]], tmp_path: Path, drafts_by: str, masks: str
) -> None:
    folder = Path(llama.name)
    if drafts_by == "eagle3":
        eagle.save_random(folder, tmp_path / "eagle3")
        folder = tmp_path / "eagle3"
    settings = with_drafts(
        2, device="cuda", draft_model=str(folder), draft_masks=masks, jump_forward_tokens=5, **SMALL, **PATIENT
    )
    with guided_device_engine(llama, settings) as (engine, grammar, _):
        grammar.sidecar.proposes = sometimes(expected)
        assert answer_all(engine, [make() for make in GUIDED]) == expected
        stats = engine.stats()
        assert longest(grammar) == 5
    assert stats.deferred_rows == 0
    assert stats.accepted_jump_forward_tokens > 12


@pytest.mark.slow
def test_a_draft_model_processes_jump_forward_tokens(llama: LoadedModel, expected: list[list[int]]) -> None:
    fields = {"draft_model": llama.name, "draft_masks": "on", "jump_forward_tokens": 5}
    settings = with_drafts(2, device="cuda", **fields, **SMALL, **PATIENT)
    with guided_device_engine(llama, settings) as (engine, grammar, _):
        propose = sometimes(expected)
        grammar.sidecar.proposes = lambda automaton, emitted: (
            propose(automaton, emitted)[:5] if len(emitted) % 4 == 1 else []
        )
        assert answer_all(engine, [make() for make in GUIDED]) == expected
        stats = engine.stats()
    drawn, accepted = (
        stats.draft_tokens - stats.jump_forward_tokens,
        stats.accepted_draft_tokens - stats.accepted_jump_forward_tokens,
    )
    assert accepted >= 0.8 * drawn > 5


@pytest.mark.slow
def test_drafts_beyond_the_rows_of_a_larger_bucket_are_dropped(llama: LoadedModel) -> None:
    def six() -> list[Answer]:
        return [ask(tokens(8, seed), grammar="18", max_tokens=20) for seed in range(6)]

    with guided_engine(llama, with_drafts(0, **SMALL)) as (engine, _):
        expected = answer_each(engine, six())
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


@pytest.mark.slow
def test_any_choice_among_captured_steps_gives_the_same_tokens(llama: LoadedModel, expected: list[list[int]]) -> None:
    fields = {"drafter": "ngram", "num_draft_tokens": 7, "jump_forward_tokens": 1, **PATIENT}
    with guided_device_engine(llama, config(device="cuda", **{**SMALL, **fields})) as (engine, _, _):
        runner = executor_of(engine).runner
        shapes = {rows for _, rows, _ in runner.launcher.captured}  # type: ignore[attr-defined]
        assert shapes == {1, 4, 8}
        runner.budget = RandomBudget(seed=2)
        assert answer_all(engine, [make() for make in GUIDED]) == expected
