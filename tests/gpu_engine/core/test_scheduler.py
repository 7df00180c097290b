"""The scheduler as a pure machine: what it promises after any order of arrivals, endings and outages."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from gpu_engine.api.prefill_shapes import PrefillShapes
from gpu_engine.api.request import Scheduling
from gpu_engine.core.kv_cache import PageAllocator
from gpu_engine.core.scheduler import GrammarState, Plan, Scheduler, Sequence

PAGE, CHUNK, ROWS, SCORED = 16, 32, 4, 24


@dataclass(slots=True, eq=False, kw_only=True, repr=False)
class Named(Sequence):
    name: str


Names = Scheduler[Named]


def scheduler(
    num_slots: int = 2,
    num_pages: int = 16,
    *,
    chunk: int = CHUNK,
    lanes: int = 1,
    tokens_of: Callable[[Named], list[int]] | None = None,
    max_batched_tokens: int = 0,
    max_starvation_s: float = math.inf,
) -> Names:
    return Scheduler(
        num_slots,
        PageAllocator(num_pages, PAGE),
        prefill_chunk=chunk,
        lookahead=ROWS,
        shapes=PrefillShapes(chunk, lanes, chunk),
        tokens_of=tokens_of,
        max_batched_tokens=max_batched_tokens,
        scored_chunk=SCORED,
        max_starvation_s=max_starvation_s,
    )


def sequence(
    name: str,
    length: int = 10,
    *,
    guided: bool = False,
    priority: int = 0,
    salt: str = "",
    max_queue_ms: int | None = None,
) -> Named:
    scheduling = Scheduling(priority=priority, max_queue_ms=max_queue_ms)
    return Named(length, guided, scheduling=scheduling, salt=salt, name=name)


def names(sequences: tuple[Named, ...] | list[Named]) -> list[str]:
    return [s.name for s in sequences]


def act(machine: Names, plan: Plan[Named], emitted: int = 1) -> None:
    """Do what an engine does with a plan."""
    for chunk in plan.prefill:
        chunk.sequence.prefilled = chunk.end
    for s in plan.decode:
        s.length += emitted
        s.prefilled = s.length - 1
    machine.check_integrity()


def prefills(machine: Names) -> list[list[tuple[str, int, int]]]:
    """Return the chunks of each iteration until everything is prefilled; no sequence decodes meanwhile."""
    turns = []
    while (plan := machine.plan()).prefill:
        turns.append([(chunk.sequence.name, chunk.start, chunk.end) for chunk in plan.prefill])
        for chunk in plan.prefill:
            chunk.sequence.prefilled = chunk.end
    return turns


def test_the_first_in_the_queue_gets_the_lowest_free_slot() -> None:
    machine = scheduler(num_slots=2)
    for name in "abc":
        machine.add(sequence(name))
    plan = machine.plan()
    assert [(s.name, s.slot, s.slot_gen) for s in plan.assigned] == [("a", 0, 1), ("b", 1, 1)]
    assert names(machine.waiting) == ["c"]
    machine.remove(plan.assigned[0])
    (running,) = machine.plan().assigned
    assert (running.name, running.slot, running.slot_gen) == ("c", 0, 2)


def test_a_sequence_without_a_slot_neither_decodes_nor_is_shown_with_one() -> None:
    machine, one = scheduler(num_slots=1), sequence("a", 1)
    assert not one.decoding
    assert "waiting" in repr(one)
    machine.add(one)
    machine.plan()
    assert one.decoding
    assert "slot 0 gen 1 pages 1" in repr(one)


@pytest.mark.parametrize(("prefilled", "num_shared", "is_copied"), [(15, 0, True), (16, 1, False), (17, 1, True)])
def test_a_fork_shares_full_pages_and_copies_the_last_part(prefilled: int, num_shared: int, is_copied: bool) -> None:
    machine = scheduler(num_slots=2, num_pages=8)
    source, target = sequence("source", prefilled + 1), sequence("target", prefilled + 1)
    for each in (source, target):
        machine.add(each)
    machine.plan()
    source.prefilled = target.prefilled = prefilled
    copies = machine.fork(source, target)
    assert target.slot_gen == 2
    assert target.pages[:num_shared] == source.pages[:num_shared]
    assert not set(target.pages[num_shared:]) & set(source.pages)
    assert len(target.pages) == len(source.pages) == 2
    assert copies == ((source.pages[num_shared], target.pages[num_shared]),) * is_copied
    machine.check_integrity()


def test_a_fork_without_pages_leaves_the_copy_none() -> None:
    machine = scheduler(num_slots=2, num_pages=4)
    source, target = sequence("source", 20), sequence("target", 20)
    for each in (source, target):
        machine.add(each)
    machine.plan()
    source.prefilled = target.prefilled = 19
    source.length = 4 * PAGE - ROWS + 1
    assert machine.fork(source, target) is None
    assert (target.pages, target.prefilled, target.num_indexed_pages) == ([], 0, 0)


def test_a_prompt_that_has_begun_is_not_searched_again() -> None:
    """Another sequence's pages have changed the index meanwhile; what was prefilled stays."""
    machine = scheduler(num_slots=2, tokens_of=lambda s: list(range(s.length)))
    begun, other = sequence("begun", 80), sequence("other", 80, salt="x")
    for each in (begun, other):
        machine.add(each)
    machine.plan()
    begun.prefilled = other.prefilled = CHUNK
    machine.index_pages(other)
    (chunk,) = machine.plan().prefill
    assert (chunk.sequence.name, chunk.start, chunk.end) == ("begun", CHUNK, 2 * CHUNK)
    assert other.num_indexed_pages == CHUNK // PAGE
    assert begun.num_indexed_pages == 0


def test_no_sequence_overtakes_the_first_in_the_queue_even_if_it_would_fit() -> None:
    machine = scheduler(num_slots=3, num_pages=4)
    for name, length in (("a", 28), ("long", 40), ("short", 5)):
        machine.add(sequence(name, length))
    assert names(machine.plan().assigned) == ["a"]
    assert names(machine.waiting) == ["long", "short"]


def test_a_higher_priority_leaves_the_queue_first_and_equal_ones_in_the_order_of_arrival() -> None:
    machine = scheduler(num_slots=1)
    for name, priority in (("a", 0), ("low", -5), ("b", 0), ("high", 9), ("c", 0), ("higher", 10), ("low too", -5)):
        machine.add(sequence(name, priority=priority))
    order = []
    while machine.waiting:
        (one,) = machine.plan().assigned
        order.append(one.name)
        machine.remove(one)
    assert order == ["higher", "high", "a", "b", "c", "low", "low too"]


def test_a_running_sequence_has_its_slot_and_pages_until_its_end_whatever_the_priority_of_others() -> None:
    machine = scheduler(num_slots=2, num_pages=6)
    machine.add(sequence("low", 30, priority=-1))
    act(machine, machine.plan())
    machine.add(sequence("high", 30, priority=1))
    machine.add(sequence("also high", 30, priority=1))
    lost = []
    for _ in range(25):
        plan = machine.plan()
        lost += names(plan.preempted)
        act(machine, plan)
    assert lost == ["high"], "the sequence that had its first slot last makes room"
    assert names(machine.running) == ["low"]
    assert names(machine.waiting) == ["high", "also high"], "it waits in front of those of its priority"


def test_a_preempted_sequence_waits_behind_higher_priorities() -> None:
    machine = scheduler(num_slots=2, num_pages=6)
    for name, priority in (("first", 1), ("second", 0)):
        machine.add(sequence(name, 30, priority=priority))
    act(machine, machine.plan())
    second = machine.running[1]
    machine.add(sequence("high", 30, priority=1))
    machine.add(sequence("equal", 30))
    machine.preempt(second)
    assert names(machine.waiting) == ["high", "second", "equal"]


def test_a_sequence_that_waits_for_longer_than_it_may_leaves_the_queue_and_no_other_does() -> None:
    machine = scheduler(num_slots=1)
    machine.add(sequence("runs"))
    for name, max_queue_ms in (("patient", None), ("hasty", 2000), ("less hasty", 5000)):
        one = sequence(name, max_queue_ms=max_queue_ms)
        one.waits_since_s = 1.0
        machine.add(one)
    assert names(machine.plan(1.0).assigned) == ["runs"]
    assert machine.next_due_s == 3.0
    assert machine.plan(2.9).expired == ()
    (hasty,) = machine.plan(3.0).expired
    assert hasty.name == "hasty"
    machine.remove(hasty)
    assert names(machine.plan(100.0).expired) == ["less hasty"]
    assert names(machine.waiting) == ["patient"]
    assert machine.next_due_s == math.inf


def test_a_sequence_that_had_a_slot_does_not_expire_when_it_is_preempted() -> None:
    machine = scheduler(num_slots=1)
    one = sequence("a", max_queue_ms=1000)
    machine.add(one)
    machine.plan(0.5)
    machine.preempt(one, 0.6)
    assert machine.plan(9.0).expired == ()
    assert names(machine.running) == ["a"]


def test_a_starving_sequence_goes_in_front_of_any_priority_that_came_later() -> None:
    machine = scheduler(num_slots=1, max_starvation_s=10.0)
    for name, priority, came_s in (("runs", 0, 0.0), ("low", -5, 1.0), ("lower", -9, 2.0), ("high", 5, 3.0)):
        one = sequence(name, priority=priority)
        one.waits_since_s = came_s
        machine.add(one)
        machine.plan(came_s)
    assert names(machine.waiting) == ["high", "low", "lower"]
    machine.plan(11.0)
    assert names(machine.waiting) == ["low", "high", "lower"]
    machine.plan(12.0)
    late = sequence("higher", priority=9)
    late.waits_since_s = 12.0
    machine.add(late)
    assert names(machine.waiting) == ["low", "lower", "higher", "high"]
    machine.preempt(machine.running[0], 12.0)
    assert names(machine.waiting) == ["low", "lower", "higher", "high", "runs"]


def test_a_sequence_that_is_never_preempted_has_all_its_pages_before_it_begins() -> None:
    machine = scheduler(num_slots=3, num_pages=7)
    for name, reserved in (("a", 60), ("b", 60), ("c", 0)):
        one = sequence(name, 10)
        one.reserved = reserved
        machine.add(one)
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


@pytest.mark.parametrize("mixed", [0, 60])
def test_one_scored_prompt_at_a_time_has_a_chunk_of_its_own_beside_the_others(mixed: int) -> None:
    machine = scheduler(num_slots=4, num_pages=40, chunk=64, lanes=4, max_batched_tokens=mixed)
    for name, length in (("a", 60), ("b", 30), ("c", 30), ("d", 30)):
        one = sequence(name, length)
        one.scored = name in "ac"
        machine.add(one)
    seen = []
    while not (plan := machine.plan()).idle and len(plan.decode) < 4:
        assert plan.scored is not None
        chunks = (plan.scored, *plan.prefill)
        seen.append([(chunk.sequence.name, chunk.start, chunk.end) for chunk in chunks])
        for chunk in chunks:
            chunk.sequence.prefilled = chunk.end
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


def test_a_prompt_is_cut_at_multiples_of_the_chunk_and_oldest_first() -> None:
    machine = scheduler()
    machine.add(sequence("a", 70))
    machine.add(sequence("b", 33))
    assert prefills(machine) == [[("a", 0, 32)], [("a", 32, 64)], [("a", 64, 69)], [("b", 0, 32)]]


def test_the_next_chunks_of_those_behind_go_along_while_they_fit_together() -> None:
    machine = scheduler(num_slots=6, num_pages=40, chunk=128, lanes=8)
    for name, length in (("a", 140), ("b", 31), ("c", 65), ("d", 34), ("e", 33), ("f", 1)):
        machine.add(sequence(name, length))
    assert prefills(machine) == [
        [("a", 0, 128)],
        [("a", 128, 139), ("b", 0, 30), ("e", 0, 32)],  # c and d are longer: three or more of them would not fit
        [("c", 0, 64), ("d", 0, 33)],
    ]


def test_as_many_go_along_as_there_are_lanes() -> None:
    machine = scheduler(num_slots=7, num_pages=40, chunk=256, lanes=3)
    for name in "abcdefg":
        machine.add(sequence(name, 20))
    assert [[name for name, _, _ in turn] for turn in prefills(machine)] == [["a", "b", "c"], ["d", "e", "f"], ["g"]]


LINE = st.lists(st.integers(1, 200), min_size=1, max_size=12)


@given(lengths=LINE, chunk=st.sampled_from([20, 32, 64, 100, 256]), lanes=st.sampled_from([2, 4, 16]))
def test_company_neither_delays_a_prompt_nor_changes_its_chunks(lengths: list[int], chunk: int, lanes: int) -> None:
    def turns(of: list[int], lanes: int) -> list[list[tuple[str, int, int]]]:
        machine = scheduler(num_slots=len(of), num_pages=300, chunk=chunk, lanes=lanes)
        for at, length in enumerate(of):
            machine.add(sequence(str(at), length))
        return prefills(machine)

    alone, together = turns(lengths, 1), turns(lengths, lanes)
    shapes = PrefillShapes(chunk, lanes, chunk)
    for turn in together:
        assert shapes.of(len(turn), max(end - start for _, start, end in turn)) in shapes.every
    flat = [part for turn in together for part in turn]
    assert sorted(flat) == sorted(part for turn in alone for part in turn)
    for count in range(1, len(lengths)):
        before = turns(lengths[:count], lanes)
        for name in map(str, range(count)):
            assert ends(name, together) == ends(name, before), "later arrivals change nothing"


def test_prompts_share_a_budget_and_decode_in_the_forward_that_ends_them() -> None:
    machine = scheduler(num_slots=4, num_pages=40, max_batched_tokens=50)
    for name, length in (("a", 31), ("b", 81), ("c", 6), ("d", 1)):
        machine.add(sequence(name, length))
    seen = []
    while (plan := machine.plan()).prefill:
        seen.append(([(c.sequence.name, c.start, c.end) for c in plan.prefill], names(plan.decode)))
        act(machine, plan)
    assert seen == [
        ([("a", 0, 30), ("b", 0, 19)], ["a", "d"]),  # d has no prompt to prefill, and one token of the budget
        ([("b", 19, 67)], ["a", "d"]),
        ([("b", 67, 80), ("c", 0, 5)], ["a", "b", "c", "d"]),
    ]


@given(lengths=LINE, budget=st.sampled_from([16, 20, 64, 250]))
def test_every_token_is_prefilled_once_and_within_the_budget(lengths: list[int], budget: int) -> None:
    machine = scheduler(num_slots=len(lengths), num_pages=400, max_batched_tokens=budget)
    for at, length in enumerate(lengths):
        machine.add(sequence(str(at), length))
    ended = dict.fromkeys(map(str, range(len(lengths))), 0)
    decoded = set()
    while (plan := machine.plan()).prefill:
        assert sum(c.end - c.start for c in plan.prefill) + sum(s.decoding for s in plan.decode) <= budget
        for chunk in plan.prefill:
            assert chunk.start == ended[chunk.sequence.name] < chunk.end
            ended[chunk.sequence.name] = chunk.end
        decoded |= {s.name for s in plan.decode}
        act(machine, plan)
    assert ended == {str(at): length - 1 for at, length in enumerate(lengths)}
    assert decoded | {s.name for s in machine.plan().decode} == set(ended)


def test_a_guided_prompt_that_ends_before_its_matcher_is_there_does_not_decode() -> None:
    machine = scheduler(max_batched_tokens=64)
    machine.add(sequence("guided", 20, guided=True))
    plan = machine.plan()
    assert [c.end for c in plan.prefill] == [19]
    assert plan.decode == ()


def test_a_prompt_that_begins_as_one_in_the_same_forward_waits_for_its_pages() -> None:
    texts = {"a": [1] * 60, "b": [1] * 40 + [2] * 10, "c": [3] * 30}
    machine = scheduler(
        num_slots=3, num_pages=40, max_batched_tokens=200, tokens_of=lambda s: texts[s.name][: s.length]
    )
    for name, text in texts.items():
        machine.add(sequence(name, len(text)))
    plan = machine.plan()
    assert [c.sequence.name for c in plan.prefill] == ["a", "c"]
    for chunk in plan.prefill:
        chunk.sequence.prefilled = chunk.end
        machine.index_pages(chunk.sequence)
    (chunk,) = machine.plan().prefill
    assert (chunk.sequence.name, chunk.start, chunk.end) == ("b", 32, 49)


def test_a_prompt_waits_for_pages_that_an_older_one_has_computed_but_not_indexed() -> None:
    texts = {"a": [1] * 80, "b": [1] * 70 + [2] * 10}
    machine = scheduler(num_pages=40, max_batched_tokens=50, tokens_of=lambda s: texts[s.name][: s.length])
    for name, text in texts.items():
        machine.add(sequence(name, len(text)))
    turns = []
    while (plan := machine.plan()).prefill:
        turns.append([(c.sequence.name, c.start, c.end) for c in plan.prefill])
        for chunk in plan.prefill:
            chunk.sequence.prefilled = chunk.end
            if chunk.end == chunk.sequence.prefill_end:
                machine.index_pages(chunk.sequence)
    assert turns == [[("a", 0, 50)], [("a", 50, 79)], [("b", 64, 79)]]


def ends(name: str, turns: list[list[tuple[str, int, int]]]) -> list[tuple[int, int]]:
    """Return (turn, end) of each chunk of a sequence."""
    return [(number, end) for number, turn in enumerate(turns) for other, _, end in turn if other == name]


def test_decoding_goes_on_while_another_prompt_is_prefilled() -> None:
    machine = scheduler()
    machine.add(sequence("a", 1))
    machine.add(sequence("b", 100))
    for _ in range(3):
        plan = machine.plan()
        assert names(plan.decode) == ["a"]
        assert plan.prefill
        act(machine, plan)


def test_a_guided_sequence_prefills_but_does_not_decode_before_its_matcher_is_open() -> None:
    machine = scheduler()
    guided = sequence("g", 10, guided=True)
    machine.add(guided)
    act(machine, machine.plan())
    assert guided.grammar_state is GrammarState.OPENING
    assert guided.prefilled == 9
    assert machine.plan().idle
    guided.grammar_state = GrammarState.OPEN
    assert names(machine.plan().decode) == ["g"]
    guided.deferred = True
    assert machine.plan().idle
    guided.deferred, guided.grammar_state = False, GrammarState.LOST
    assert machine.plan().idle


def test_pages_run_out_and_the_youngest_gives_way_then_comes_back_and_ends() -> None:
    machine = scheduler(num_slots=3, num_pages=9)
    for name in "abc":
        machine.add(sequence(name, 30))
    preempted: list[str] = []
    gens: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    ended: list[str] = []
    for _ in range(500):
        plan = machine.plan()
        preempted += names(plan.preempted)
        for s in plan.preempted:
            assert (s.slot, s.pages, s.prefilled) == (-1, [], 0)
        for s in plan.assigned:
            gens[s.name].append(s.slot_gen)
        act(machine, plan)
        for s in list(machine.running):
            if s.length >= 100:
                machine.remove(s)
                ended.append(s.name)
        if len(ended) == 3:
            break
    assert ended == ["a", "b", "c"]
    assert preempted[0] == "c"
    assert "a" not in preempted
    assert len(gens["c"]) == 1 + preempted.count("c")
    assert machine.allocator.num_used == 0


def test_a_preempted_sequence_waits_in_front_of_new_ones() -> None:
    machine = scheduler(num_slots=2, num_pages=5)
    for name in "abc":
        machine.add(sequence(name, 20))
    act(machine, machine.plan())
    while not (plan := machine.plan()).preempted:
        act(machine, plan, emitted=ROWS)
    assert names(plan.preempted) == ["b"]
    assert plan.assigned == ()
    assert names(machine.waiting) == ["b", "c"]


def test_several_preempted_sequences_of_one_iteration_keep_their_order() -> None:
    machine = scheduler(num_slots=4, num_pages=8)
    for name in "abcd":
        machine.add(sequence(name, 12))
    plan = machine.plan()
    assert len(plan.assigned) == 4
    (a, *_) = plan.assigned
    while machine.plan().prefill:
        act(machine, machine.plan(), emitted=0)
    machine.allocator.grow(a.pages, 80)  # takes the rest of the pages
    a.length = 110
    a.prefilled = 109
    plan = machine.plan()
    assert names(plan.preempted) == ["d", "c", "b"]
    assert names(machine.waiting) == ["b", "c", "d"]


def test_a_sequence_can_be_removed_from_the_queue_and_from_a_slot() -> None:
    machine = scheduler(num_slots=1)
    a, b = sequence("a"), sequence("b")
    machine.add(a)
    machine.add(b)
    machine.plan()
    machine.remove(b)
    assert machine.waiting == []
    assert machine.sequence(0, 1) is a
    machine.remove(a)
    assert machine.sequence(0, 1) is None
    assert machine.allocator.num_used == 0
    with pytest.raises(ValueError, match="deque"):
        machine.remove(a)


def test_an_owner_of_a_slot_is_known_by_its_generation() -> None:
    machine = scheduler(num_slots=1)
    a, b = sequence("a"), sequence("b")
    machine.add(a)
    machine.plan()
    machine.remove(a)
    machine.add(b)
    machine.plan()
    assert machine.sequence(0, 1) is None
    assert machine.sequence(0, 2) is b
    assert "running=1/1" in repr(machine)
    assert "slot 0 gen 2" in repr(b)


def test_a_prompt_that_begins_like_another_is_prefilled_from_where_they_part() -> None:
    said = {"a": [1] * 70, "same": [1] * 70, "longer": [1] * 70 + [2] * 30, "other": [1] * 20 + [2] * 20}
    machine = scheduler(num_slots=4, num_pages=40, tokens_of=lambda one: (said[one.name] + [9] * 99)[: one.length])
    machine.add(sequence("a", 70))
    assert prefills(machine) == [[("a", 0, 32)], [("a", 32, 64)], [("a", 64, 69)]]
    for name in ("same", "longer", "other"):
        machine.add(sequence(name, len(said[name])))
    # Not before it is all there: what is prefilled at the same time is not shared.
    assert machine.plan().prefill[0].start == 0
    machine.remove(machine.running[0])
    for name in ("same", "longer", "other"):
        machine.remove(next(s for s in machine.running if s.name == name))
        machine.add(sequence(name, len(said[name])))
    assert prefills(machine) == [
        [("same", 64, 69)],
        [("longer", 64, 96)],
        [("longer", 96, 99)],
        [("other", 16, 32)],
        [("other", 32, 39)],
    ]
    machine.check_integrity()


@pytest.mark.parametrize("mixed", [0, 200])
def test_two_salts_never_share_a_page(mixed: int) -> None:
    tokens_of: Callable[[Named], list[int]] = lambda one: [1] * one.length  # noqa: E731
    machine = scheduler(num_slots=4, num_pages=40, chunk=256, lanes=4, tokens_of=tokens_of, max_batched_tokens=mixed)
    for name, salt in (("a", "x"), ("b", "y"), ("c", ""), ("again", "x")):
        machine.add(sequence(name, 50, salt=salt))
    turns = prefills(machine)
    starts = {name: start for turn in turns for name, start, _ in turn}
    a, b, c, again = (next(s for s in machine.running if s.name == name) for name in ("a", "b", "c", "again"))
    assert starts["a"] == starts["b"] == starts["c"] == 0
    waits = {"again"} if mixed else set()
    assert {name for name, _, _ in turns[0]} == {"a", "b", "c", "again"} - waits, "no salt waits for another's pages"
    for one in (a, b, c):
        machine.index_pages(one)
    machine.remove(again)
    machine.add(again)
    machine.plan()
    assert again.pages[:3] == a.pages[:3], "equal salts share"
    assert not set(a.pages) & set(b.pages) | set(a.pages) & set(c.pages) | set(b.pages) & set(c.pages)
    machine.check_integrity()


def test_a_prompt_that_is_cached_as_a_whole_keeps_its_last_token_as_input() -> None:
    machine = scheduler(num_slots=1, tokens_of=lambda one: [1] * one.length)
    for _ in range(2):
        machine.add(sequence("a", 33))
        prefilled = prefills(machine)
        (one,) = machine.plan().decode
        assert (one.prefilled, one.prefill_end) == (32, 32)
        machine.remove(one)
    assert prefilled == []


def test_sequences_admitted_together_find_the_pages_of_the_first() -> None:
    machine = scheduler(num_slots=3, num_pages=30, tokens_of=lambda one: [1] * one.length)
    for name, length in (("a", 70), ("same", 65), ("longer", 80)):
        machine.add(sequence(name, length))
    seen = []
    while (plan := machine.plan()).prefill:
        seen += [(chunk.sequence.name, chunk.start, chunk.end) for chunk in plan.prefill]
        for chunk in plan.prefill:
            chunk.sequence.prefilled = chunk.end
            if chunk.end == chunk.sequence.prefill_end:
                machine.index_pages(chunk.sequence)
        machine.check_integrity()
    assert seen == [("a", 0, 32), ("a", 32, 64), ("a", 64, 69), ("longer", 64, 79)]
    assert sorted(names(plan.decode)) == ["a", "longer", "same"]
    assert machine.num_cached_tokens == 128
    assert machine.allocator.num_used == 4 + 1 + 1 + 2, "four pages of all, and what each needs beyond"


def test_a_page_without_its_last_key_is_not_shared() -> None:
    machine = scheduler(num_slots=1, tokens_of=lambda one: [1] * one.length)
    machine.add(sequence("a", 2 * PAGE))  # the key of its last token is its first step's
    prefills(machine)
    machine.remove(machine.running[0])
    machine.add(sequence("b", 40))
    assert [chunk.start for chunk in machine.plan().prefill] == [PAGE]


def test_a_blocked_queue_is_not_searched_again() -> None:
    asked: list[str] = []

    def tokens_of(one: Named) -> list[int]:
        asked.append(one.name)
        return [1] * one.length

    machine = scheduler(num_slots=2, num_pages=6, tokens_of=tokens_of)
    for name in "ab":
        machine.add(sequence(name, 80))
    prefills(machine)
    asked.clear()
    for _ in range(5):
        assert names(machine.waiting) == ["b"]
        act(machine, machine.plan(), emitted=0)
    assert asked == []
    machine.remove(machine.running[0])
    assert names(machine.plan().assigned) == ["b"]


def test_a_preempted_sequence_finds_its_pages_that_were_not_evicted() -> None:
    machine = scheduler(num_slots=2, num_pages=7, tokens_of=lambda one: [ord(one.name)] * one.length)
    machine.add(sequence("a", 40))
    machine.add(sequence("b", 33))
    prefills(machine)
    a, b = machine.running
    act(machine, machine.plan(), emitted=20)
    act(machine, machine.plan())
    assert machine.waiting == [b]
    machine.remove(a)
    plan = machine.plan()
    assert plan.assigned == (b,)
    assert b.prefilled == 48
    assert [(chunk.start, chunk.end) for chunk in plan.prefill] == [(48, 52)]


MAX_LENGTH = 90


class Turns(RuleBasedStateMachine):
    """Arrivals, turns, grammars that open, park and get lost, endings: in any order."""

    alive = Bundle("alive")
    salts: tuple[str, ...] = ("",)
    chunk, lanes = CHUNK, 1
    tokens_of: Callable[[Named], list[int]] | None = None
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
        salt = self.salts[self.count % len(self.salts)]
        patience = max_queue_ms if self.waits else None
        new = sequence(str(self.count), length, guided=guided, priority=priority, salt=salt, max_queue_ms=patience)
        new.scored, new.waits_since_s = scored, self.now_s
        if self.waits:
            new.reserved = 0 if more is None else min(length + more, MAX_LENGTH)
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


class TurnsOfSeveral(Turns):
    """The same where several are prefilled at once."""

    chunk, lanes = 2 * CHUNK, 4


class TurnsThatShare(TurnsOfSeveral):
    """The same where every other one begins with the same tokens, and half of these go on with the same."""

    salts = ("", "a", "b")

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
    def everybody_reads_keys_of_its_own_tokens(self) -> None:
        for one in self.machine.running:
            said = self.tokens_of(one)
            for at in range(one.prefilled):
                assert self.cells[one.pages[at // PAGE], at % PAGE] == (one.salt, tuple(said[: at + 1])), (one, at)


class TurnsThatWait(TurnsThatShare):
    """The same with sequences that reserve their pages, a bound on starving, and waits that end."""

    starves_s, waits = 5.0, True


TestTurns = Turns.TestCase
TestTurnsThatWait = TurnsThatWait.TestCase
TestTurnsOfSeveral = TurnsOfSeveral.TestCase
TestTurnsThatShare = TurnsThatShare.TestCase
TestTurns.settings = TestTurnsOfSeveral.settings = TestTurnsThatShare.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestTurnsThatWait.settings = TestTurns.settings
