"""Masks of drafts that come and go in the middle of answers: the tokens are those of one token a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from gpu_engine.core.draft_masks import WINDOW, DraftMasks
from gpu_engine.model.loader import LoadedModel
from shared_mem.layout import Stage
from tests.fakes import EOS
from tests.gpu_engine.core.test_guided import legal, made
from tests.gpu_engine.harness import answer_all, answer_each, answer_staggered, ask, config, tokens, with_drafts
from tests.gpu_engine.toy_sidecar import guided_engine

PATIENT = {"row_timeout_ms": 2000.0, "draft_timeout_ms": 2000.0}


@dataclass(eq=False)
class Turns:
    """A `MaskPolicy` that masks every other step that is told, and notes what it is told."""

    on: bool = True
    lanes: Counter[bool | None] = field(default_factory=Counter)
    tokens: Counter[bool | None] = field(default_factory=Counter)
    draft_ms: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})

    def lane(self, masked: bool | None, tokens: int) -> None:
        self.lanes[masked] += 1
        self.tokens[masked] += tokens

    def told(self, *, masked: bool, step_ms: float, draft_ms: float) -> None:
        assert 0 <= draft_ms <= step_ms
        self.draft_ms[masked] += draft_ms
        self.on = not self.on

    def stats(self) -> dict[str, float]:
        return {"mask_switches": 1}


@pytest.fixture(scope="module")
def expected(llama: LoadedModel) -> list[list[int]]:
    """One request at a time, one token a step."""
    answers = made()
    with guided_engine(llama, with_drafts(0, **PATIENT)) as (engine, _):
        answer_each(engine, answers)
    return [answer.tokens for answer in answers]


@pytest.mark.parametrize("drafts_by", ["same", "other", "trained eagle3", "random eagle3"])
@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("answer", [answer_all, answer_staggered])
def test_tokens_do_not_depend_on_masks_that_come_and_go(
    llama: LoadedModel,
    draft_models: dict[str, str],
    expected: list[list[int]],
    drafts_by: str,
    forced: bool,
    answer: object,
    overlap: bool,
) -> None:
    settings = with_drafts(3, draft_model=draft_models[drafts_by], jump_forward=forced, overlap=overlap, **PATIENT)
    turns = Turns()
    with guided_engine(llama, settings, turns) as (engine, grammar):
        assert answer(engine, made()) == expected  # type: ignore[operator]
        stats = engine.stats()
        records = grammar.sidecar.records
    assert stats.deferred_rows == 0
    assert min(turns.lanes[True], turns.lanes[False]) > 10
    assert sum(turns.tokens.values()) == sum(map(len, expected))
    assert any(record.stage not in (Stage.VERIFY, Stage.PROPOSE) for record in records)


@pytest.mark.parametrize("masks", ["on", "off", "auto"])
def test_rows_are_asked_for_by_whoever_needs_them_first(
    llama: LoadedModel, draft_models: dict[str, str], masks: str, overlap: bool
) -> None:
    settings = with_drafts(3, draft_model=draft_models["same"], draft_masks=masks, overlap=overlap, **PATIENT)
    with guided_engine(llama, settings) as (engine, grammar):
        answers = [ask(tokens(20, seed), grammar="90", max_tokens=120) for seed in range(3)]
        answer_all(engine, answers)
        records = grammar.sidecar.records
        stats = engine.stats()
    assert all(map(legal, answers))
    # No row stands behind a stop: nobody gets one, so it is asked for again.
    wanted = [record for record in records if EOS not in record.drafts]
    verified = Counter(record.need_rows.bit_count() for record in wanted if record.stage == Stage.VERIFY)
    drafted = sum(record.stage not in (Stage.VERIFY, Stage.PROPOSE) for record in records)
    if masks == "on":
        assert set(verified) == {1}
        assert (stats.unmasked_steps, stats.draft_masks) == (0, 1)
    elif masks == "off":
        assert drafted == 0
        assert (stats.masked_steps, stats.draft_masks) == (0, 0)
    else:
        assert min(stats.masked_steps, stats.unmasked_steps) > WINDOW // 2
        assert verified[1] > 3
        assert verified[4] > 3
        assert drafted > 0
    # A row stands behind a number of tokens: no two records ask for the same one unless tokens were rejected between.
    rows = Counter(
        (record.slot, record.commit_pos + len(record.committed) + row, record.drafts[:row])
        for record in wanted
        for row in range(4)
        if record.need_rows >> row & 1 and record.stage != Stage.PROPOSE
    )
    assert set(rows.values()) == {1}


def test_tokens_count_for_the_way_in_which_their_drafts_were_drawn(
    llama: LoadedModel, draft_models: dict[str, str], overlap: bool
) -> None:
    """The target as its own drafter is right wherever its drafts are masked, and wherever they need no mask."""
    settings = with_drafts(
        3, draft_model=draft_models["same"], jump_forward=False, overlap=overlap, max_batch_size=1, **PATIENT
    )
    turns = Turns()
    with guided_engine(llama, settings, turns) as (engine, _):
        answers = [ask(tokens(20, seed), grammar="90", max_tokens=80) for seed in range(4)]
        answer_each(engine, answers)
    # All of an answer but its first step: four tokens a step, but for the last one.
    assert turns.tokens[True] >= 4 * turns.lanes[True] - 4 * len(answers)
    assert turns.tokens[False] / turns.lanes[False] < 3.5
    # The first step of an answer verifies no draft; an overlapped one behind the end emits nothing, and is not told.
    assert turns.lanes[None] == len(answers)
    assert turns.draft_ms[True] > 0 == turns.draft_ms[False]


def test_lanes_without_a_grammar_or_without_drafts_are_not_compared(
    llama: LoadedModel, draft_models: dict[str, str]
) -> None:
    turns = Turns()
    settings = with_drafts(3, draft_model=draft_models["same"], **PATIENT)
    with guided_engine(llama, settings, turns) as (engine, _):
        answer_each(engine, [ask(tokens(9, 1), grammar="20", drafts=0), ask(tokens(9, 2), ignore_eos=True)])
    assert set(turns.lanes) == {None}


def test_without_a_drafting_network_nothing_is_masked(llama: LoadedModel) -> None:
    with guided_engine(llama, with_drafts(3, **PATIENT)) as (engine, _):
        answer_each(engine, [ask(tokens(20, 3), grammar="31", max_tokens=90)])
        stats = engine.stats()
    assert (stats.draft_masks, stats.masked_steps, stats.unmasked_steps) == (0, 0, 0)
    assert repr(DraftMasks.of(config())) == "<DraftMasks off: off>"


def test_what_a_policy_says_is_among_the_counters(llama: LoadedModel, draft_models: dict[str, str]) -> None:
    settings = with_drafts(3, draft_model=draft_models["same"], **PATIENT)
    with guided_engine(llama, settings, Turns()) as (engine, _):
        answer_each(engine, [ask(tokens(20, 3), grammar="31", max_tokens=90)])
        assert engine.stats().mask_switches == 1


def steps(policy: DraftMasks, count: int, on: float, off: float, exposed: float, *, lanes: int = 1) -> list[bool]:
    """Tell `count` steps whose drafts are verified in the step behind; return how each of them drew."""
    tokens, drew = tokens_of(on, off), []
    before = policy.on
    for _ in range(count):
        drew.append(policy.on)
        for _ in range(lanes):
            policy.lane(before, next(tokens[before]))
        policy.told(masked=policy.on, step_ms=10.0, draft_ms=10.0 * exposed if policy.on else 0.0)
        before = drew[-1]
    return drew


def tokens_of(on: float, off: float) -> dict[bool, Iterator[int]]:
    """Return whole numbers of these means."""

    def of(mean: float) -> Iterator[int]:
        total = 0.0
        while True:
            whole = int(total + mean) - int(total)
            total += mean
            yield whole

    return {True: of(on), False: of(off)}


@pytest.mark.parametrize(
    ("on", "off", "exposed", "answer"),
    [(3.0, 2.5, 0.02, True), (3.0, 2.9, 0.2, False), (2.0, 2.0, 0.01, False), (2.5, 2.6, 0.0, False)],
)
def test_masks_are_on_while_they_bring_more_than_they_cost(on: float, off: float, exposed: float, answer: bool) -> None:
    policy = DraftMasks()
    drew = steps(policy, 6000, on, off, exposed)
    stats = policy.stats()
    assert stats["draft_masks"] == answer
    assert stats["mask_gain"] == pytest.approx(on / off, rel=0.03)
    assert stats["mask_cost"] == pytest.approx(1 / (1 - exposed))
    assert stats["mask_switches"] == (not answer)
    assert (stats["masked_steps"], stats["unmasked_steps"]) == (drew.count(True), drew.count(False))
    # Once it knows, a hundredth of the steps explores.
    assert drew[3000:].count(not answer) <= 4 * WINDOW
    assert drew[3000:].count(not answer) >= WINDOW


def test_the_answer_follows_the_traffic() -> None:
    policy = DraftMasks()
    steps(policy, 4000, 3.0, 2.0, 0.05)
    assert policy.stats()["draft_masks"] == 1
    steps(policy, 40_000, 2.0, 2.0, 0.3)
    assert policy.stats()["draft_masks"] == 0
    steps(policy, 40_000, 3.0, 2.0, 0.05)
    assert policy.stats()["draft_masks"] == 1
    assert policy.stats()["mask_switches"] == 2


def test_lanes_that_masks_do_nothing_for_pay_for_them() -> None:
    """A gain of a tenth for one lane is one of a hundredth for ten, and does not pay for a twentieth of their time."""
    alone, among = DraftMasks(), DraftMasks()
    for policy, others in ((alone, 0), (among, 9)):
        before, counts = True, tokens_of(2.2, 2.0)
        for _ in range(3000):
            drew = policy.on
            policy.lane(before, next(counts[before]))
            for _ in range(others):
                policy.lane(None, 2)
            policy.told(masked=drew, step_ms=10.0, draft_ms=0.5 * drew)
            before = drew
    assert alone.stats()["draft_masks"] == 1
    assert among.stats()["draft_masks"] == 0
    assert among.stats()["mask_gain"] == pytest.approx(1.01, abs=0.005)


def test_steps_in_which_masks_matter_to_nobody_are_no_part_of_a_comparison() -> None:
    policy = DraftMasks()
    for _ in range(1000):
        policy.lane(None, 1)
        policy.told(masked=policy.on, step_ms=10.0, draft_ms=0.0)
    assert policy.stats() == DraftMasks().stats()
    assert repr(policy) == "<DraftMasks auto: on gain=1.000 cost=1.000 rest=0>"


def test_steps_in_which_masks_matter_to_nobody_do_not_hide_what_masks_bring() -> None:
    policy = DraftMasks()
    for _ in range(300):
        # Masked drafting is twice as good and takes a tenth more; five steps of free text come for every guided one.
        policy.lane(policy.on, 4 if policy.on else 2)
        policy.lane(None, 1)
        policy.told(masked=policy.on, step_ms=10.0, draft_ms=1.0 if policy.on else 0.0)
        for _ in range(5):
            for _ in range(8):
                policy.lane(None, 1)
            policy.told(masked=policy.on, step_ms=10.0, draft_ms=0.0)
    stats = policy.stats()
    assert stats["draft_masks"] == 1
    assert stats["mask_gain"] == pytest.approx((4 + 1) / (2 + 1), rel=0.05)


def test_another_word_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="draft_masks: 'true' is not on, off or auto"):
        config(draft_masks="true")


@pytest.mark.parametrize("mode", ["on", "off"])
def test_who_is_told_what_to_do_does_not_explore(mode: str) -> None:
    policy = DraftMasks(mode)
    assert set(steps(policy, 2000, 1.0 if mode == "on" else 5.0, 3.0, 0.5)) == {mode == "on"}
    assert policy.stats()["mask_switches"] == 0
