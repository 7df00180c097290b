"""The suffix index is bounded in bytes, and a scope drafts for itself alone."""

from __future__ import annotations

import pytest

from gpu_engine.api.request import SuffixScope
from gpu_engine.drafters.suffix_index import MAX_SCOPE_TOKENS, OVERHEAD_BYTES, SuffixIndex
from kernels.suffix import BYTES_PER_TOKEN, MIN_CAPACITY

SMALLEST = MIN_CAPACITY * BYTES_PER_TOKEN + OVERHEAD_BYTES


def scope(name: str, *seeds: tuple[int, ...]) -> SuffixScope:
    return SuffixScope(name.encode(), seeds)


def test_a_slot_has_the_ring_of_its_scope_and_no_other() -> None:
    index = SuffixIndex(1 << 20, 3)
    index.add(scope("a"), [1, 2, 3])
    index.add(scope("b"), [1, 2, 3])
    for slot, name in enumerate(("a", "b", "a")):
        index.assign(slot, scope(name))
    of_a, of_b, also_a = index.rings_S.tolist()
    assert of_a == also_a != of_b != 0
    index.assign(0, None)
    assert index.rings_S[0] == 0
    index.assign(0, scope("unknown"))
    assert index.rings_S[0] == 0


def test_a_ring_that_is_made_or_grows_later_reaches_the_slots_of_its_scope() -> None:
    index = SuffixIndex(1 << 20, 2)
    index.assign(0, scope("a"))
    index.assign(1, scope("b"))
    index.add(scope("a"), [1, 2, 3])
    first = index.rings_S.tolist()
    assert (first[0] != 0, first[1]) == (True, 0)
    index.add(scope("a"), list(range(MIN_CAPACITY)))
    assert index.rings_S[0] not in (0, first[0])


def test_a_new_scope_begins_with_its_seeds_once() -> None:
    index = SuffixIndex(1 << 20, 2)
    index.assign(0, scope("a", (1, 2, 3), (4, 5)))
    index.assign(1, scope("a", (1, 2, 3), (4, 5)))
    assert index._rings[b"a"].num_tokens == 4 + 3
    assert index.rings_S[0] == index.rings_S[1] != 0


def test_the_least_recently_used_scope_is_dropped_and_its_slots_lose_it() -> None:
    index = SuffixIndex(3 * SMALLEST, 3)
    for slot, name in enumerate("abc"):
        index.add(scope(name), [1, 2, 3])
        index.assign(slot, scope(name))
    index.assign(0, scope("a"))  # a is used again, so b is the oldest
    index.add(scope("d"), [1, 2, 3])
    assert (index.num_scopes, index.evicted_scopes) == (3, 1)
    assert [address != 0 for address in index.rings_S.tolist()] == [True, False, True]


def test_bytes_stay_within_the_limit_while_scopes_grow() -> None:
    max_bytes = 10 * SMALLEST
    index = SuffixIndex(max_bytes, 1)
    for number in range(400):
        index.add(scope(str(number % 7)), list(range(10 + number)))
        assert index.num_bytes <= max_bytes
        assert index.num_bytes == sum(ring.num_bytes + OVERHEAD_BYTES for ring in index._rings.values())
    assert index.evicted_scopes > 0


def test_one_scope_never_has_more_than_its_share() -> None:
    index = SuffixIndex(1 << 30, 1)
    for _ in range(40):
        index.add(scope("a"), list(range(4000)))
    assert index._rings[b"a"].capacity == MAX_SCOPE_TOKENS


@pytest.mark.parametrize("max_bytes", [1, SMALLEST - 1])
def test_an_index_without_room_for_one_ring_keeps_nothing(max_bytes: int) -> None:
    index = SuffixIndex(max_bytes, 1)
    index.assign(0, scope("a", (1, 2, 3)))
    index.add(scope("a"), [1, 2, 3])
    assert (index.num_scopes, index.num_bytes, int(index.rings_S[0])) == (0, 0, 0)
