"""The page allocator: a page is free, kept for its tokens, or has as many owners as begin with them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_engine.core.kv_cache import PageAllocator


def test_pages_are_rounded_up_and_growth_is_all_or_nothing() -> None:
    allocator, mine, theirs = PageAllocator(4, 16), list[int](), list[int]()
    assert [allocator.pages_for(n) for n in (0, 1, 16, 17, 32, 33)] == [0, 1, 1, 2, 2, 3]
    assert allocator.grow(mine, 40)
    assert not allocator.grow(theirs, 17)
    assert theirs == []
    assert allocator.grow(theirs, 16)
    assert not set(mine) & set(theirs)
    before = list(mine)
    assert allocator.grow(mine, 5)
    assert mine == before, "what is long enough neither grows nor shrinks"
    assert "4/4 pages of 16" in repr(allocator)
    allocator.free(mine)
    assert mine == []
    assert allocator.grow(mine, 48)
    allocator.check_integrity([mine, theirs])


def test_a_lost_page_and_a_page_of_two_owners_that_is_not_indexed_are_noticed() -> None:
    allocator = PageAllocator(3, 4)
    mine: list[int] = []
    assert allocator.grow(mine, 8)
    indexed = grown(allocator, [1, 2, 3, 4])
    for owners in ([mine], [mine, mine[:1], indexed], [mine, indexed, indexed], [mine, indexed * 2]):
        with pytest.raises(AssertionError):
            allocator.check_integrity(owners)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 100)), max_size=60))
def test_any_sequence_of_growth_and_freeing_keeps_every_page(actions: list[tuple[int, int]]) -> None:
    allocator = PageAllocator(12, 16)
    owners: list[list[int]] = [[] for _ in range(5)]
    for owner, num_tokens in actions:
        if num_tokens == 0:
            allocator.free(owners[owner])
        else:
            fits = allocator.pages_for(num_tokens) - len(owners[owner]) <= 12 - allocator.num_used
            assert allocator.grow(owners[owner], num_tokens) == fits
            assert not fits or len(owners[owner]) * 16 >= num_tokens
        allocator.check_integrity(owners)


def grown(allocator: PageAllocator, tokens: list[int], length: int = 0) -> list[int]:
    """Return the pages of one that begins with `tokens`, which hold them."""
    pages = allocator.match_prefix(tokens)
    assert allocator.grow(pages, max(length, len(tokens)))
    allocator.insert(tokens, pages)
    return pages


def test_sequences_with_the_same_beginning_share_full_pages_and_no_others() -> None:
    allocator = PageAllocator(10, 4)
    first = grown(allocator, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    same = grown(allocator, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    other = grown(allocator, [1, 2, 3, 4, 0, 6, 7, 8])
    assert same[:2] == first[:2]
    assert same[2] != first[2]
    assert other[0] == first[0]
    assert other[1] not in first
    assert allocator.match_prefix([2, 3, 4, 5]) == []
    assert allocator.num_used == 5
    allocator.check_integrity([first, same, other])


def test_kept_pages_are_found_until_pages_run_out_and_then_the_oldest_goes_from_its_end() -> None:
    allocator = PageAllocator(6, 4)
    old = grown(allocator, [1, 1, 1, 1, 2, 2, 2, 2])
    new = grown(allocator, [5, 5, 5, 5, 6, 6, 6, 6])
    was_old, was_new = list(old), list(new)
    allocator.free(old)
    allocator.free(new)
    assert (allocator.num_used, allocator.num_cached) == (0, 4)
    taken: list[int] = []
    assert allocator.grow(taken, 12)
    assert taken[2] == was_old[1], "two were free; of the older sequence the end goes first"
    assert allocator.match_prefix([1, 1, 1, 1, 2, 2, 2, 2, 3]) == was_old[:1]
    again = allocator.match_prefix([5, 5, 5, 5, 6, 6, 6, 6])
    assert again == was_new
    assert not allocator.grow(again, 12), "the others are in use"
    allocator.check_integrity([taken, was_old[:1], again])


def test_of_two_that_were_filled_at_once_one_is_known_and_nothing_hangs_on_the_other() -> None:
    allocator = PageAllocator(8, 4)
    first, second = list[int](), list[int]()
    assert allocator.grow(first, 4)
    assert allocator.grow(second, 8)
    allocator.insert([1, 2, 3, 4], first)
    allocator.insert([1, 2, 3, 4, 5, 6, 7, 8], second)
    assert allocator.match_prefix([1, 2, 3, 4, 5, 6, 7, 8]) == first
    allocator.free(second)
    assert allocator.num_cached == 0
    allocator.check_integrity([first, first])


def test_what_is_forgotten_is_not_found_and_not_lost() -> None:
    allocator = PageAllocator(4, 4)
    owned, gone = grown(allocator, [1, 2, 3, 4]), grown(allocator, [5, 6, 7, 8])
    allocator.free(gone)
    allocator.clear_index()
    assert allocator.match_prefix([1, 2, 3, 4]) == allocator.match_prefix([5, 6, 7, 8]) == []
    assert (allocator.num_used, allocator.num_cached) == (1, 0)
    allocator.check_integrity([owned])
    allocator.free(owned)
    allocator.check_integrity([])
    assert grown(allocator, list(range(16)))


SAID = st.lists(st.integers(0, 1), max_size=14)


@given(st.lists(st.tuples(st.integers(0, 3), SAID, st.integers(0, 8)), max_size=60))
def test_whatever_is_shared_holds_what_it_should(actions: list[tuple[int, list[int], int]]) -> None:
    """Each owner writes its tokens into its pages; an owner of a shared page finds its own tokens there."""
    allocator = PageAllocator(9, 2)
    written: dict[int, tuple[int, ...]] = {}
    owners: list[list[int]] = [[] for _ in range(4)]
    for owner, tokens, more in actions:
        if owners[owner]:
            allocator.free(owners[owner])
        elif tokens:
            pages = allocator.match_prefix(tokens)
            for at, page in enumerate(pages):
                assert written[page] == tuple(tokens[: 2 * at + 2]), "keys depend on all tokens before"
            shared = len(pages)
            if allocator.grow(pages, len(tokens) + more):
                for at, page in enumerate(pages[shared:], shared):
                    written[page] = tuple(tokens[: 2 * at + 2])
                allocator.insert(tokens, pages)
                owners[owner] = pages
            else:
                allocator.free(pages)
        if more == 8 and not any(owners):
            allocator.clear_index()
        allocator.check_integrity(owners)


class Told:
    """`PageEvents` that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def stored(self, page: int, parent: int | str, tokens: tuple[int, ...]) -> None:
        self.events.append(("stored", page, parent, tokens))

    def removed(self, page: int) -> None:
        self.events.append(("removed", page))

    def reset(self, pages: Sequence[tuple[int, tuple[int | str, tuple[int, ...]]]]) -> None:
        self.events.append(("reset", *pages))


def test_a_watcher_is_told_what_is_indexed_and_then_every_change() -> None:
    allocator, told = PageAllocator(3, 16), Told()
    mine = grown(allocator, [1] * 16 + [2] * 16)
    first, second = mine
    allocator.watch(told)
    allocator.free(mine)  # a page without an owner stays cached
    other: list[int] = []
    assert allocator.grow(other, 33)
    allocator.insert([3] * 16, other)
    allocator.clear_index()
    allocator.watch(None)
    allocator.insert([4] * 16, other[1:])
    assert told.events == [
        ("reset", (first, ("", (1,) * 16)), (second, (first, (2,) * 16))),
        ("removed", second),  # a page leaves before its parent
        ("removed", first),
        ("stored", other[0], "", (3,) * 16),
        ("reset",),
    ]
