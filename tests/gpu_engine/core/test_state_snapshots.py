"""Prefixes of a model with recurrent layers: resumed where a state was kept, and only there."""

from __future__ import annotations

from gpu_engine.core.kv_cache import PageAllocator
from gpu_engine.core.scheduler import Scheduler
from gpu_engine.core.state_snapshots import StateSnapshots
from tests.gpu_engine.core.schedulers import PAGE, ROWS, Named, added, chunks, scheduler, sequence

INTERVAL = 64


def hybrid(texts: dict[str, list[int]], *, num_snapshots: int = 8, num_pages: int = 40) -> Scheduler[Named]:
    snapshots = StateSnapshots(num_snapshots)
    return scheduler(num_pages=num_pages, texts=texts, snapshots=snapshots, snapshot_interval=INTERVAL)


def prefill(machine: Scheduler[Named], one: Named) -> tuple[int, list[tuple[int, int]], list[int]]:
    """Give a sequence its slot and prefill it; return the place that it resumed from, its chunks and its snapshots."""
    added(machine, one)
    taken, kept = list[tuple[int, int]](), list[int]()
    while one not in (plan := machine.plan()).decode:
        for _, start, end in chunks(plan):
            taken.append((start, end))
            one.prefilled = end
            if machine.place_of_snapshot(one) is not None:
                kept.append(end)
    machine.index_pages(one)
    return one.restores, taken, kept


def test_a_prompt_keeps_states_at_intervals_at_its_end_and_where_it_leaves_an_earlier_one() -> None:
    system = list(range(90))
    texts = {"first": [*system, *[200] * 40], "second": [*system, *[201] * 40], "third": [*system, *[202] * 40]}
    machine = hybrid(texts)
    first, second, third = (sequence(name, 130) for name in texts)
    # Chunks are of 32 tokens. The last of the 129 tokens to prefill are one after the last full page.
    assert prefill(machine, first) == (-1, [(0, 32), (32, 64), (64, 96), (96, 128), (128, 129)], [64, 128])
    machine.remove(first)
    # Five full pages are equal, and there is a state after four of them: the other is kept this time.
    place, taken, kept = prefill(machine, second)
    assert place >= 0
    assert (taken, kept) == ([(64, 80), (80, 96), (96, 128), (128, 129)], [80, 128])
    machine.remove(second)
    assert prefill(machine, third)[1] == [(80, 96), (96, 128), (128, 129)]
    again = sequence("second", 130)
    assert prefill(machine, again)[1] == [(128, 129)]
    assert again.pages[:5] == third.pages[:5]  # of the first one, which the others took in place of their own
    machine.check_integrity()


def test_a_prefix_without_a_state_is_prefilled_again_and_then_has_one() -> None:
    texts = {name: [*range(40)] for name in "abc"} | {"other": [7] * 40}
    machine = hybrid(texts, num_snapshots=1)
    for name, resumed, kept in (("a", False, [32]), ("b", True, []), ("other", False, [32]), ("c", False, [32])):
        one = sequence(name, 40)
        place, _, ends = prefill(machine, one)
        assert ((place >= 0), ends) == (resumed, kept), name
        machine.remove(one)
        machine.check_integrity()


def test_the_least_recently_used_state_goes_first_and_an_evicted_page_takes_its_state_along() -> None:
    allocator = PageAllocator(6, 4, StateSnapshots(2))
    texts = [[at] * 4 for at in range(3)]
    places = []
    for text in texts[:2]:
        pages: list[int] = []
        assert allocator.grow(pages, 4)
        allocator.insert(text, pages)
        places.append(allocator.add_snapshot(text))
        allocator.free(pages)
    assert sorted(p for p in places if p is not None) == [0, 1]
    assert allocator.add_snapshot(texts[0]) is None  # it has one
    assert allocator.add_snapshot(texts[2]) is None  # its page is not indexed
    allocator.free(allocator.match_prefix(texts[0]))
    pages = []
    assert allocator.grow(pages, 4)
    allocator.insert(texts[2], pages)
    assert allocator.add_snapshot(texts[2]) == places[1]
    assert allocator.match_prefix(texts[1]) == []
    allocator.free(pages)
    everything: list[int] = []
    assert allocator.grow(everything, 6 * 4)
    assert allocator.snapshots is not None
    assert len(allocator.snapshots) == 0
    allocator.check_integrity([everything])
    allocator.free(everything)


def test_a_second_search_keeps_what_was_resumed_if_its_state_has_gone() -> None:
    texts = {name: [*range(40)] for name in ("a", "b")} | {"c": [7] * 60}
    machine = hybrid(texts, num_snapshots=1, num_pages=60)
    first = sequence("a", 40)
    prefill(machine, first)
    machine.remove(first)
    late, other = sequence("b", 40), sequence("c", 60)
    added(machine, other, late)
    plan = machine.plan()
    assert chunks(plan) == [("c", 0, 32)]  # one lane: the older sequence goes first
    assert late.restores >= 0
    late.restores, other.prefilled = -1, 32
    for end in (48, 59):
        plan = machine.plan()
        assert chunks(plan)[0] == ("c", other.prefilled, end)
        other.prefilled = end
        machine.place_of_snapshot(other)
    machine.index_pages(other)
    plan = machine.plan()
    assert chunks(plan) == [("b", 32, 39)]
    assert (late.prefilled, late.restores) == (32, -1)
    assert len(late.pages) == -(-(40 + ROWS) // PAGE)
    machine.check_integrity()
