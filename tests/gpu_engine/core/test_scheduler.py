"""The scheduler as a pure machine: what it promises after any order of arrivals, endings and outages."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from gpu_engine.api.prefill_shapes import PrefillShapes
from gpu_engine.core.scheduler import GrammarState, Plan
from tests.gpu_engine.core.schedulers import (
    CHUNK,
    PAGE,
    ROWS,
    SCORED,
    Named,
    Names,
    Turn,
    act,
    added,
    beams,
    chunks,
    names,
    prefills,
    scheduler,
    sequence,
)

ONES = {name: [1] * 200 for name in ("a", "b", "same", "longer")}

# -- slots and the waiting queue ---------------------------------------------------------------------------------------


def test_a_slot_goes_to_the_first_in_the_queue_and_its_owners_are_known_by_their_generation() -> None:
    a, b, c = (sequence(name, 1) for name in "abc")
    assert not a.decoding
    assert "waiting" in repr(a)
    machine = added(scheduler(num_slots=2), a, b, c)
    plan = machine.plan()
    assert [(s.name, s.slot, s.slot_gen) for s in plan.assigned] == [("a", 0, 1), ("b", 1, 1)]
    assert names(machine.waiting) == ["c"]
    assert a.decoding
    assert "slot 0 gen 1 pages 1" in repr(a)
    assert "slot 1 gen 1" in repr(b)
    assert "running=2/2 waiting=1" in repr(machine)
    machine.remove(a)
    assert machine.sequence(0, 1) is None
    assert names(machine.plan().assigned) == ["c"]
    assert (c.slot, c.slot_gen, machine.sequence(0, 1), machine.sequence(0, 2)) == (0, 2, None, c)
    for each in (b, c):
        machine.remove(each)
    assert (machine.allocator.num_used, machine.running) == (0, [])
    with pytest.raises(ValueError, match="deque"):
        machine.remove(a)


def test_no_sequence_overtakes_the_first_in_the_queue_even_if_it_would_fit() -> None:
    machine = added(scheduler(num_slots=3, num_pages=4), sequence("a", 28), sequence("long", 40), sequence("short", 5))
    assert names(machine.plan().assigned) == ["a"]
    machine.remove(machine.waiting[0])
    assert names(machine.plan().assigned) == ["short"]


def test_a_sequence_that_waits_for_longer_than_it_may_leaves_the_queue_and_no_other_does() -> None:
    machine = added(scheduler(num_slots=1), sequence("runs"))
    for name, max_queue_ms in (("patient", None), ("hasty", 2000), ("less hasty", 5000)):
        machine.add(sequence(name, max_queue_ms=max_queue_ms, waits_since_s=1.0))
    assert names(machine.plan(1.0).assigned) == ["runs"]
    assert machine.next_due_s == 3.0
    assert machine.plan(2.9).expired == ()
    (hasty,) = machine.plan(3.0).expired
    assert hasty.name == "hasty"
    machine.remove(hasty)
    assert names(machine.plan(100.0).expired) == ["less hasty"]
    assert names(machine.waiting) == ["patient"]
    assert machine.next_due_s == math.inf
    # One that had a slot does not expire when it is preempted.
    late = sequence("late", max_queue_ms=1000, waits_since_s=100.0)
    machine = added(scheduler(num_slots=1), late)
    machine.plan(100.5)
    machine.preempt(late, 100.6)
    assert machine.plan(109.0).expired == ()
    assert machine.running == [late]


def test_a_starving_sequence_goes_ahead_of_any_priority_that_came_later() -> None:
    machine = scheduler(num_slots=1, max_starvation_s=10.0)
    for name, priority, came_s in (("runs", 0, 0.0), ("low", -5, 1.0), ("lower", -9, 2.0), ("high", 5, 3.0)):
        machine.add(sequence(name, priority=priority, waits_since_s=came_s))
        machine.plan(came_s)
    assert names(machine.waiting) == ["high", "low", "lower"]
    machine.plan(11.0)
    assert names(machine.waiting) == ["low", "high", "lower"]
    machine.plan(12.0)
    machine.add(sequence("higher", priority=9, waits_since_s=12.0))
    assert names(machine.waiting) == ["low", "lower", "higher", "high"]
    assert machine.next_due_s == 13.0
    machine.preempt(machine.running[0], 12.0)
    assert names(machine.waiting) == ["low", "lower", "higher", "high", "runs"]
    low = machine.waiting[0]
    assert names(machine.plan(12.0).assigned) == ["low"]
    assert not low.starving
    machine.preempt(low, 14.0)
    machine.plan(14.0)
    assert not low.starving, "it waits anew"


# -- pages: which sequence gives way -----------------------------------------------------------------------------------


def test_a_running_sequence_has_its_slot_and_pages_until_its_end_whatever_the_priority_of_others() -> None:
    machine = added(scheduler(num_slots=2, num_pages=6), sequence("low", 30, priority=-1))
    act(machine, machine.plan())
    added(machine, sequence("high", 30, priority=1), sequence("also high", 30, priority=1))
    lost = []
    for _ in range(25):
        plan = machine.plan()
        lost += names(plan.preempted)
        act(machine, plan)
    assert lost == ["high"], "the sequence that had its first slot last makes room"
    assert names(machine.running) == ["low"]
    assert names(machine.waiting) == ["high", "also high"], "it waits ahead of the others of its priority"


def test_a_preempted_sequence_waits_after_higher_priorities_and_ahead_of_equal_ones() -> None:
    first, second = sequence("first", 30, priority=1), sequence("second", 30)
    machine = added(scheduler(num_slots=2, num_pages=6), first, second)
    act(machine, machine.plan())
    added(machine, sequence("high", 30, priority=1), sequence("equal", 30))
    machine.preempt(second)
    assert (second.slot, second.pages, second.prefilled) == (-1, [], 0)
    assert names(machine.waiting) == ["high", "second", "equal"]


def test_several_preempted_sequences_of_one_iteration_keep_their_order() -> None:
    machine = added(scheduler(num_slots=4, num_pages=8), *(sequence(name, 12) for name in "abcd"))
    a, *_ = machine.plan().assigned
    while machine.plan().prefill:
        act(machine, machine.plan(), emitted=0)
    machine.allocator.grow(a.pages, 80)  # takes the rest of the pages
    a.length, a.prefilled = 110, 109
    assert names(machine.plan().preempted) == ["d", "c", "b"]
    assert names(machine.waiting) == ["b", "c", "d"]


def test_a_sequence_that_is_never_preempted_has_all_its_pages_before_it_begins() -> None:
    machine = added(
        scheduler(num_slots=3, num_pages=7), *(sequence(name, reserved=60 * (name != "c")) for name in "abc")
    )
    assert names(machine.plan().assigned) == ["a"]
    assert len(machine.running[0].pages) == 4
    machine.remove(machine.running[0])
    assert names(machine.plan().assigned) == ["b", "c"]
    b, c = machine.running
    lost = []
    for _ in range(60 - 10):
        plan = machine.plan()
        lost += names(plan.preempted)
        act(machine, plan)
    assert lost == ["c"], "the older one holds its pages, and the younger one gives way to itself"
    machine.remove(b)
    assert names(machine.plan().assigned) == ["c"]
    assert c.slot >= 0


def test_a_sequence_that_is_cut_is_a_new_owner_of_its_slot_and_is_not_prefilled_again() -> None:
    one, other = sequence("one", 20), sequence("other", 5)
    machine = added(scheduler(), other, one)
    prefills(machine)
    act(machine, machine.plan(), emitted=40)
    act(machine, machine.plan())
    pages = [*one.pages]
    assert (one.slot, one.slot_gen, len(pages)) == (1, 1, 4)
    assert machine.cut(one, 20)
    assert (one.slot, one.slot_gen, one.length, one.prefilled, one.pages) == (1, 2, 20, 19, pages[:2])
    assert (machine.sequence(1, 1), machine.sequence(1, 2)) == (None, one)
    plan = machine.plan()
    assert (plan.prefill, plan.decode) == ((), (other, one))
    machine.check_integrity()


def test_a_sequence_whose_page_others_may_read_is_not_cut() -> None:
    one = sequence("one", 20)
    machine = added(scheduler(texts={"one": list(range(99))}), one)
    prefills(machine)
    act(machine, machine.plan(), emitted=20)
    machine.preempt(one)
    prefills(machine)
    before = repr(one)
    assert one.num_indexed_pages == 2
    assert not machine.cut(one, 2 * PAGE)
    assert repr(one) == before
    assert machine.cut(one, 2 * PAGE + 1)
    group = beams(2, 20)
    machine = added(scheduler(), *group[:1])
    prefills(machine)
    assert not machine.cut(group[0], 10)


# -- beams -------------------------------------------------------------------------------------------------------------


def test_beams_get_their_slots_together_and_lose_them_together() -> None:
    one, group = sequence("one", 20), beams(3, 20)
    machine = added(scheduler(num_slots=3), one, group[0])
    assert names(machine.plan().assigned) == ["one"], "two slots are too few for three beams"
    machine.remove(one)
    assert [(s.name, s.slot, s.order) for s in machine.plan().assigned] == [
        ("beam0", 0, 2), ("beam1", 1, 2), ("beam2", 2, 2)
    ]  # fmt: skip
    assert [len(beam.pages) for beam in group] == [2, 0, 0], "beams without tokens have no pages"
    assert not group[1].decoding
    late = sequence("late")
    machine.add(late)
    assert machine.preempt_youngest(1.0) == tuple(group)
    assert names(machine.waiting) == ["beam0", "late"], "the first waits for all"
    assert [beam.slot for beam in group] == [-1] * 3
    machine.plan()
    machine.remove(group[1])
    assert names(machine.plan().assigned) == ["late"]
    machine.check_integrity()


def test_a_group_without_pages_for_all_of_its_beams_gets_none() -> None:
    group = beams(2, 20)
    group[1].length = 60
    machine, taken = added(scheduler(num_slots=2, num_pages=6), group[0]), list[int]()
    machine.allocator.grow(taken, 1)
    assert machine.plan().idle
    assert (machine.allocator.num_used, group[0].pages, group[1].pages) == (1, [], [])
    machine.allocator.free(taken)
    assert names(machine.plan().assigned) == ["beam0", "beam1"]


@pytest.mark.parametrize(("prefilled", "num_shared", "is_copied"), [(15, 0, True), (16, 1, False), (17, 1, True)])
def test_a_fork_shares_full_pages_and_copies_the_last_part(prefilled: int, num_shared: int, is_copied: bool) -> None:
    source, target = sequence("source", prefilled + 1), sequence("target", prefilled + 1)
    machine = added(scheduler(num_slots=2, num_pages=8), source, target)
    machine.plan()
    source.prefilled = target.prefilled = prefilled
    source.num_indexed_pages = 1
    target.length = 3
    copies = machine.fork(source, target)
    assert (target.slot_gen, target.length, target.prefilled) == (2, prefilled + 1, prefilled)
    assert target.num_indexed_pages == num_shared
    assert target.pages[:num_shared] == source.pages[:num_shared]
    assert not set(target.pages[num_shared:]) & set(source.pages)
    assert len(target.pages) == len(source.pages) == 2
    assert copies == ((source.pages[num_shared], target.pages[num_shared]),) * is_copied


def test_a_fork_without_pages_leaves_the_copy_none_and_a_cleared_beam_keeps_its_slot() -> None:
    source, target = sequence("source", 20), sequence("target", 20)
    machine = added(scheduler(num_slots=2, num_pages=4), source, target)
    machine.plan()
    source.prefilled = target.prefilled = 19
    source.length = 4 * PAGE - ROWS + 1
    assert machine.fork(source, target) is None
    assert (target.pages, target.prefilled, target.num_indexed_pages) == ([], 0, 0)
    source.deferred = True
    machine.clear(source)
    assert (source.slot, source.pages, source.length, source.prefilled, source.num_indexed_pages) == (0, [], 0, 0, 0)
    assert (source.held, source.deferred, machine.allocator.num_used) == (True, False, 0)


# -- prompts in chunks -------------------------------------------------------------------------------------------------

PREFILLS: dict[str, tuple[dict[str, Any], dict[str, int], list[Turn]]] = {
    "cut at multiples of the chunk, oldest first": (
        {"chunk": 32},
        {"a": 70, "b": 33},
        [[("a", 0, 32)], [("a", 32, 64)], [("a", 64, 69)], [("b", 0, 32)]],
    ),
    "younger ones go along while they fit together": (
        {"chunk": 128, "lanes": 8},
        {"a": 140, "b": 31, "c": 65, "d": 34, "e": 33, "f": 1},
        # c and d are longer: three or more of them would not fit.
        [[("a", 0, 128)], [("a", 128, 139), ("b", 0, 30), ("e", 0, 32)], [("c", 0, 64), ("d", 0, 33)]],
    ),
    "as many go along as there are lanes": (
        {"chunk": 256, "lanes": 3},
        dict.fromkeys("abcdefg", 20),
        [[(name, 0, 19) for name in part] for part in ("abc", "def", "g")],
    ),
}


@pytest.mark.parametrize("what", PREFILLS)
def test_chunks_of_prompts(what: str) -> None:
    options, lengths, expected = PREFILLS[what]
    machine = added(scheduler(num_slots=7, **options), *(sequence(name, n) for name, n in lengths.items()))
    assert prefills(machine) == expected


@pytest.mark.parametrize("mixed", [0, 60])
def test_one_scored_prompt_at_a_time_has_separate_chunks_next_to_the_others(mixed: int) -> None:
    machine = scheduler(num_slots=4, chunk=64, lanes=4, max_batched_tokens=mixed)
    added(machine, *(sequence(name, n, scored=name in "ac") for name, n in zip("abcd", (60, 30, 30, 30), strict=True)))
    seen = []
    while not (plan := machine.plan()).idle and len(plan.decode) < 4:
        assert plan.scored is not None
        seen.append([(plan.scored.sequence.name, plan.scored.start, plan.scored.end), *chunks(plan)])
        act(machine, plan, emitted=0)
    # The scored chunk has a part of a mixed forward's budget.
    others = [("b", 0, 29), ("d", 0, 7)] if mixed else [("b", 0, 29), ("d", 0, 29)]
    rest = [("d", 7, 29)] if mixed else []
    assert seen == [
        [("a", 0, 24), *others],
        [("a", 24, 48), *rest],
        [("a", 48, 59)],
        [("c", 0, 24)],
        [("c", 24, 29)],
    ]


def test_a_scored_chunk_may_take_the_whole_budget_of_a_forward() -> None:
    machine = added(scheduler(max_batched_tokens=16), sequence("scored", 60, scored=True), sequence("other", 20))
    plan = machine.plan()
    assert plan.scored is not None
    assert (plan.scored.end, plan.prefill) == (SCORED, ())


LINE = st.lists(st.integers(1, 200), min_size=1, max_size=12)


@settings(max_examples=40)
@given(lengths=LINE, chunk=st.sampled_from([20, 32, 64, 100, 256]), lanes=st.sampled_from([2, 4, 16]))
def test_company_neither_delays_a_prompt_nor_changes_its_chunks(lengths: list[int], chunk: int, lanes: int) -> None:
    def turns(of: list[int], lanes: int) -> list[Turn]:
        machine = scheduler(num_slots=len(of), num_pages=300, chunk=chunk, lanes=lanes)
        return prefills(added(machine, *(sequence(str(at), length) for at, length in enumerate(of))))

    def ends(name: str, turns: list[Turn]) -> list[tuple[int, int]]:
        return [(number, end) for number, turn in enumerate(turns) for other, _, end in turn if other == name]

    alone, together = turns(lengths, 1), turns(lengths, lanes)
    shapes = PrefillShapes(chunk, lanes, chunk)
    for turn in together:
        assert shapes.of(len(turn), max(end - start for _, start, end in turn)) in shapes.every
    assert sorted(part for turn in together for part in turn) == sorted(part for turn in alone for part in turn)
    for count in range(1, len(lengths)):
        before = turns(lengths[:count], lanes)
        for name in map(str, range(count)):
            assert ends(name, together) == ends(name, before), "later arrivals change nothing"


def test_prompts_share_a_budget_and_decode_in_the_forward_that_ends_them() -> None:
    machine = scheduler(num_slots=5, max_batched_tokens=50)
    added(machine, *(sequence(name, n) for name, n in (("a", 31), ("b", 81), ("c", 6), ("d", 1))))
    guided = sequence("guided", 1, guided=True)
    machine.add(guided)
    seen = []
    while (plan := machine.plan()).prefill:
        seen.append((chunks(plan), names(plan.decode)))
        act(machine, plan)
    assert seen == [
        ([("a", 0, 30), ("b", 0, 19)], ["a", "d"]),  # d has no prompt to prefill, and one token of the budget
        ([("b", 19, 67)], ["a", "d"]),
        ([("b", 67, 80), ("c", 0, 5)], ["a", "b", "c", "d"]),
    ]
    assert guided.grammar_state is GrammarState.OPENING, "it has no matcher yet, so it never decoded"


@settings(max_examples=50)
@given(lengths=LINE, budget=st.sampled_from([16, 20, 64, 250]))
def test_every_token_is_prefilled_once_and_within_the_budget(lengths: list[int], budget: int) -> None:
    machine = scheduler(num_slots=len(lengths), num_pages=400, max_batched_tokens=budget)
    added(machine, *(sequence(str(at), length) for at, length in enumerate(lengths)))
    ended = dict.fromkeys(map(str, range(len(lengths))), 0)
    decoded = set()
    while (plan := machine.plan()).prefill:
        assert sum(c.end - c.start for c in plan.prefill) + sum(s.decoding for s in plan.decode) <= budget
        for chunk in plan.prefill:
            assert chunk.start == ended[chunk.sequence.name] < chunk.end
            ended[chunk.sequence.name] = chunk.end
        decoded |= set(names(plan.decode))
        act(machine, plan)
    assert ended == {str(at): length - 1 for at, length in enumerate(lengths)}
    assert decoded | set(names(machine.plan().decode)) == set(ended)


@pytest.mark.parametrize(
    ("length", "fields", "begins"),
    [
        (33, {"early": True}, [True]),
        (100, {"early": True}, [False, True]),
        (32, {"early": True}, [False]),
        (90, {"early": True}, [False, False]),
        (33, {"early": False}, [False]),
        (33, {"early": True, "held": True}, [False]),
    ],
    ids=["one chunk", "the last chunk", "a short prompt", "a short last chunk", "not early", "held"],
)
def test_an_early_sequence_is_in_the_batch_of_its_last_chunk_before_its_matcher_is_open(
    length: int, fields: dict[str, bool], begins: list[bool]
) -> None:
    guided = sequence("g", length, guided=True)
    for name, value in fields.items():
        setattr(guided, name, value)
    machine = added(scheduler(max_batched_tokens=64), guided)
    found = []
    while (plan := machine.plan()).prefill:
        found.append(names(plan.decode) == ["g"])
        act(machine, plan, emitted=0)
    assert found == begins
    assert guided.grammar_state is GrammarState.OPENING
    assert not machine.plan().decode, "after the prompt it waits for its matcher"


def test_a_guided_sequence_prefills_but_does_not_decode_before_its_matcher_is_open() -> None:
    guided = sequence("g", 10, guided=True)
    machine = added(scheduler(), guided)
    act(machine, machine.plan())
    assert guided.grammar_state is GrammarState.OPENING
    assert guided.prefilled == 9
    assert machine.plan().idle
    guided.grammar_state = GrammarState.OPEN
    assert names(machine.plan().decode) == ["g"]
    for field in ("deferred", "ended", "held"):
        setattr(guided, field, True)
        assert machine.plan().idle
        setattr(guided, field, False)
    guided.grammar_state = GrammarState.LOST
    assert machine.plan().idle


# -- the prefix cache --------------------------------------------------------------------------------------------------


def test_a_prompt_that_begins_like_another_is_prefilled_from_where_they_part() -> None:
    texts = {"a": [1] * 99, "same": [1] * 99, "longer": [1] * 70 + [2] * 30, "other": [1] * 20 + [2] * 20}
    machine = added(scheduler(num_slots=4, texts=texts), sequence("a", 70))
    assert prefills(machine) == [[("a", 0, 32)], [("a", 32, 64)], [("a", 64, 69)]]
    machine.remove(machine.running[0])
    added(machine, sequence("same", 70), sequence("longer", 100), sequence("other", 40))
    assert prefills(machine) == [
        [("same", 64, 69)],
        [("longer", 64, 96)],
        [("longer", 96, 99)],
        [("other", 16, 32)],
        [("other", 32, 39)],
    ]
    assert machine.num_cached_tokens == 64 + 64 + 16


def test_a_page_without_its_last_key_is_not_shared_and_a_cached_prompt_keeps_its_last_token_as_input() -> None:
    machine = scheduler(num_slots=1, texts=ONES)
    # The key of the last token is the first step's.
    for length, start, rest in ((2 * PAGE, 0, [("a", 0, 31)]), (40, PAGE, [("a", 16, 32)]), (33, 32, [])):
        machine.add(sequence("a", length))
        plan = machine.plan()
        assert chunks(plan) == rest
        (one,) = machine.running
        assert one.prefilled == start
        prefills(machine)
        assert machine.plan().decode == (one,)
        machine.remove(one)


@pytest.mark.parametrize("mixed", [0, 200])
def test_two_salts_never_share_a_page(mixed: int) -> None:
    machine = scheduler(
        num_slots=4, chunk=256, lanes=4, tokens_of=lambda one: [1] * one.length, max_batched_tokens=mixed
    )
    a, b, c, again = (
        sequence(name, 50, salt=salt) for name, salt in (("a", "x"), ("b", "y"), ("c", ""), ("again", "x"))
    )
    plan = added(machine, a, b, c, again).plan()
    waits = {"again"} if mixed else set()
    assert set(names(each.sequence for each in plan.prefill)) == {"a", "b", "c", "again"} - waits
    for one in (a, b, c):
        one.prefilled = one.prefill_end
        machine.index_pages(one)
    machine.remove(again)
    added(machine, again).plan()
    assert again.pages[:3] == a.pages[:3], "equal salts share"
    assert not set(a.pages) & set(b.pages) | set(a.pages) & set(c.pages) | set(b.pages) & set(c.pages)
    machine.check_integrity()


def test_sequences_admitted_together_find_the_pages_of_the_first() -> None:
    machine = added(
        scheduler(num_slots=3, texts=ONES),
        *(sequence(n, size) for n, size in (("a", 70), ("same", 65), ("longer", 80))),
    )
    assert prefills(machine) == [[("a", 0, 32)], [("a", 32, 64)], [("a", 64, 69)], [("longer", 64, 79)]]
    assert sorted(names(machine.plan().decode)) == ["a", "longer", "same"]
    assert machine.num_cached_tokens == 128
    assert machine.allocator.num_used == 4 + 1 + 1 + 2, "four pages of all, and what each needs beyond"


@pytest.mark.parametrize(
    ("budget", "texts", "expected"),
    [
        pytest.param(
            200,
            {"a": [1] * 60, "b": [1] * 40 + [2] * 10, "c": [3] * 30},
            [[("a", 0, 59), ("c", 0, 29)], [("b", 32, 49)]],
            id="begins as one in the same forward",
        ),
        pytest.param(
            50,
            {"a": [1] * 80, "b": [1] * 70 + [2] * 10},
            [[("a", 0, 50)], [("a", 50, 79)], [("b", 64, 79)]],
            id="its pages are computed and not indexed yet",
        ),
    ],
)
def test_a_prompt_waits_for_pages_of_an_older_one(
    budget: int, texts: dict[str, list[int]], expected: list[Turn]
) -> None:
    machine = scheduler(num_slots=3, max_batched_tokens=budget, texts=texts)
    added(machine, *(sequence(name, len(text)) for name, text in texts.items()))
    assert prefills(machine) == expected


def test_a_prompt_that_has_begun_is_not_searched_again() -> None:
    """Another sequence's pages have changed the index meanwhile; what was prefilled stays."""
    begun, other = sequence("a", 80), sequence("b", 80, salt="x")
    machine = added(scheduler(texts=ONES), begun, other)
    machine.plan()
    begun.prefilled = other.prefilled = CHUNK
    machine.index_pages(other)
    assert chunks(machine.plan()) == [("a", CHUNK, 2 * CHUNK)]
    assert other.num_indexed_pages == CHUNK // PAGE
    assert begun.num_indexed_pages == 0


def test_a_blocked_queue_is_not_searched_again() -> None:
    asked: list[str] = []

    def tokens_of(one: Named) -> list[int]:
        asked.append(one.name)
        return [1] * one.length

    machine = added(scheduler(num_pages=6, tokens_of=tokens_of), sequence("a", 80), sequence("b", 80))
    prefills(machine)
    asked.clear()
    for _ in range(5):
        assert names(machine.waiting) == ["b"]
        act(machine, machine.plan(), emitted=0)
    assert asked == []
    machine.remove(machine.running[0])
    assert names(machine.plan().assigned) == ["b"]


def test_a_preempted_sequence_finds_its_pages_that_were_not_evicted() -> None:
    a, b = sequence("a", 40), sequence("b", 33)
    machine = added(scheduler(num_pages=7, texts={"a": [97] * 99, "b": [98] * 99}), a, b)
    prefills(machine)
    act(machine, machine.plan(), emitted=20)
    act(machine, machine.plan())
    assert machine.waiting == [b]
    machine.remove(a)
    plan = machine.plan()
    assert plan.assigned == (b,)
    assert chunks(plan) == [("b", 48, 52)]


# -- any order of everything -------------------------------------------------------------------------------------------

MAX_LENGTH = 90


class Turns(RuleBasedStateMachine):
    """Arrivals, turns, grammars that open, park and get lost, endings: in any order."""

    alive = Bundle("alive")
    salts: tuple[str, ...] = ("",)
    chunk, lanes = CHUNK, 1
    tokens_of: Any = None
    starves_s = math.inf
    waits = False
    """Some sequences reserve pages, and some wait for a bounded time."""

    def __init__(self) -> None:
        super().__init__()
        # One sequence of full length always fits, as the engine's configuration makes sure.
        pages = -(-(MAX_LENGTH + ROWS) // PAGE) + 2
        self.machine: Names = scheduler(
            num_slots=3,
            num_pages=pages,
            chunk=self.chunk,
            lanes=self.lanes,
            tokens_of=self.tokens_of,
            max_starvation_s=self.starves_s,
        )
        self.now_s = 0.0
        self.count = 0
        self.gens: dict[int, int] = {}

    @rule(
        target=alive,
        length=st.integers(1, MAX_LENGTH),
        guided=st.booleans(),
        scored=st.booleans(),
        priority=st.integers(-1, 1),
        more=st.none() | st.integers(0, MAX_LENGTH),
        max_queue_ms=st.sampled_from([None, 2000, 7000]),
    )
    def arrive(
        self, length: int, guided: bool, scored: bool, priority: int, more: int | None, max_queue_ms: int | None
    ) -> Named:
        self.count += 1
        new = sequence(
            str(self.count),
            length,
            guided=guided,
            priority=priority,
            scored=scored,
            salt=self.salts[self.count % len(self.salts)],
            max_queue_ms=max_queue_ms if self.waits else None,
            waits_since_s=self.now_s,
            reserved=min(length + more, MAX_LENGTH) if self.waits and more is not None else 0,
        )
        line = names(self.machine.waiting)
        self.machine.add(new)
        assert names([s for s in self.machine.waiting if s is not new]) == line
        behind = [s for s in self.machine.waiting[self.machine.waiting.index(new) + 1 :] if s.priority >= priority]
        assert not behind
        return new

    @rule(gone=consumes(alive))
    def leave(self, gone: Named) -> None:
        if gone.slot >= 0 or gone in self.machine.waiting:
            self.machine.remove(gone)
        assert gone.slot == -1
        assert gone.pages == []

    @precondition(lambda self: self.machine.running)
    @rule(data=st.data())
    def cut(self, data: Any) -> None:
        one = data.draw(st.sampled_from(self.machine.running))
        if one.prefilled < one.prefill_end:
            return
        length = data.draw(st.integers(1, one.length))
        if self.machine.cut(one, length):
            self.gens[one.slot] += 1
            assert (one.slot_gen, one.length, one.prefilled) == (self.gens[one.slot], length, length - 1)
        else:
            self.machine.preempt(one, self.now_s)
            one.length = length

    @rule(emitted=st.integers(0, ROWS))
    def turn(self, emitted: int) -> None:
        line = self.machine.waiting
        self.now_s += 1.0
        plan = self.machine.plan(self.now_s)
        assert not (plan.preempted and plan.assigned)
        for s in plan.expired:
            assert s in line
            assert not s.order
            assert self.now_s >= s.waits_since_s + s.scheduling.max_queue_s
            self.machine.remove(s)
        self.in_order(plan, [s for s in line if s not in plan.expired])
        for s in plan.assigned:
            assert s.slot_gen == self.gens.get(s.slot, 0) + 1
            self.gens[s.slot] = s.slot_gen
            assert s.grammar_state is (GrammarState.OPENING if s.guided else GrammarState.UNCONSTRAINED)
        for s in plan.preempted:
            assert not s.reserved
            assert all(other.order < s.order for other in self.machine.running if not other.reserved)
        for s in plan.decode:
            assert len(s.pages) * PAGE >= s.length + ROWS
            assert s.prefilled >= s.length - 1
        for chunk in (*plan.prefill, *([plan.scored] if plan.scored else ())):
            size = SCORED if chunk is plan.scored else self.chunk
            assert chunk.sequence.scored == (chunk is plan.scored)
            assert chunk.start == chunk.sequence.prefilled
            assert chunk.start < chunk.end <= chunk.sequence.prefill_end
            assert chunk.end - chunk.start <= size
            assert chunk.end % size == 0 or chunk.end == chunk.sequence.prefill_end
            assert len(chunk.sequence.pages) * PAGE >= chunk.end
            self.wrote(chunk.sequence, chunk.start, chunk.end)
            chunk.sequence.prefilled = chunk.end
            if chunk.end == chunk.sequence.prefill_end:
                self.machine.index_pages(chunk.sequence)
        for s in plan.decode:
            assert not s.scored or s.num_cached_tokens == 0
            s.scored = s.scored and not emitted
            end = s.length + ROWS - 1
            most = s.reserved or MAX_LENGTH
            s.length = min(s.length + emitted, most)
            self.wrote(s, s.prefilled, end)  # drafts as well, of which all but `emitted` - 1 are wrong
            s.prefilled = s.length - 1
            if s.length == most:
                self.machine.remove(s)

    def in_order(self, plan: Plan[Named], line: list[Named]) -> None:
        """Check that sequences got their slots in the order of the queue `line`, starving ones first."""
        starving = [s for s in line if self.now_s >= s.waits_since_s + self.starves_s]
        line = sorted(starving, key=lambda s: s.waits_since_s) + [s for s in line if s not in starving]
        assert names(plan.assigned) == names(line[: len(plan.assigned)])

    def wrote(self, one: Named, start: int, end: int) -> None:
        """Hear that the keys of positions [start, end) are written."""

    @precondition(lambda self: self.machine.running)
    @rule(data=st.data())
    def grammar_news(self, data: Any) -> None:
        one = data.draw(st.sampled_from(self.machine.running))
        if one.guided:
            one.grammar_state = data.draw(st.sampled_from([GrammarState.OPENING, GrammarState.OPEN, GrammarState.LOST]))
            one.deferred = one.grammar_state is GrammarState.OPEN and data.draw(st.booleans())

    @invariant()
    def whole(self) -> None:
        self.machine.check_integrity()
        starving = [s.starving for s in self.machine.waiting]
        assert starving == sorted(starving, reverse=True)
        priorities = [s.priority for s in self.machine.waiting if not s.starving]
        assert priorities == sorted(priorities, reverse=True)

    def teardown(self) -> None:
        """No sequence starves: when every grammar answers, every sequence ends."""
        for _ in range(2000):
            for s in self.machine.running:
                s.grammar_state, s.deferred = GrammarState.OPEN if s.guided else GrammarState.UNCONSTRAINED, False
            if not self.machine.running and not self.machine.waiting:
                return
            self.turn(1)
            self.machine.check_integrity()
        raise AssertionError(f"{self.machine} does not come to an end")


class TurnsThatShare(Turns):
    """The same where several are prefilled at once, every other one begins with the same tokens, and half of these go
    on with the same; with sequences that reserve their pages, a bound on starving, and waits that end."""

    chunk, lanes = 2 * CHUNK, 4
    salts = ("", "a", "b")
    starves_s, waits = 5.0, True

    def __init__(self) -> None:
        super().__init__()
        self.cells: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}
        """(page, place in it) -> the writer's salt, and tokens up to there, on all of which keys depend."""

    @staticmethod
    def tokens_of(one: Named) -> list[int]:
        number = int(one.name)
        return [number % 2] * min(one.length, 40) + [number % 4] * (one.length - 40)

    def wrote(self, one: Named, start: int, end: int) -> None:
        written = [*self.tokens_of(one)[: one.length - 1], *[-1] * 2 * ROWS]
        for at in range(start, end):
            self.cells[one.pages[at // PAGE], at % PAGE] = one.salt, tuple(written[: at + 1])

    @invariant()
    def each_reads_keys_of_its_own_tokens(self) -> None:
        for one in self.machine.running:
            said = self.tokens_of(one)
            for at in range(one.prefilled):
                assert self.cells[one.pages[at // PAGE], at % PAGE] == (one.salt, tuple(said[: at + 1])), (one, at)


TestTurns, TestTurnsThatShare = Turns.TestCase, TurnsThatShare.TestCase
TestTurns.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestTurnsThatShare.settings = settings(TestTurns.settings, max_examples=60)


def test_the_check_of_integrity_sees_a_waiting_sequence_with_pages() -> None:
    machine = added(scheduler(), waiting := sequence("one"))
    machine.check_integrity()
    assert machine.allocator.grow(waiting.pages, 10)
    with pytest.raises(AssertionError):
        machine.check_integrity([waiting.pages])
