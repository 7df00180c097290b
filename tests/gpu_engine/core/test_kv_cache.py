"""The page allocator: a page is free or has one owner."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_engine.kv_cache import PageAllocator


@pytest.mark.parametrize(("num_tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_pages_are_rounded_up(num_tokens: int, pages: int) -> None:
    assert PageAllocator(4, 16).pages_for(num_tokens) == pages


def test_growth_is_all_or_nothing() -> None:
    allocator = PageAllocator(4, 16)
    mine: list[int] = []
    assert allocator.grow(mine, 40)
    theirs: list[int] = []
    assert not allocator.grow(theirs, 17)
    assert theirs == []
    assert allocator.grow(theirs, 16)
    assert not set(mine) & set(theirs)
    assert allocator.used == 4


def test_what_is_long_enough_does_not_grow_and_never_shrinks() -> None:
    allocator = PageAllocator(2, 16)
    mine: list[int] = []
    assert allocator.grow(mine, 32)
    before = list(mine)
    assert allocator.grow(mine, 5)
    assert mine == before


def test_freed_pages_come_back() -> None:
    allocator = PageAllocator(3, 16)
    mine: list[int] = []
    assert allocator.grow(mine, 48)
    allocator.free(mine)
    assert mine == []
    assert allocator.used == 0
    assert allocator.grow(mine, 48)
    allocator.check_integrity([mine])


def test_a_lost_page_and_a_page_with_two_owners_are_noticed() -> None:
    allocator = PageAllocator(3, 16)
    mine: list[int] = []
    assert allocator.grow(mine, 32)
    with pytest.raises(AssertionError):
        allocator.check_integrity([])
    with pytest.raises(AssertionError):
        allocator.check_integrity([mine, mine[:1]])
    assert "2/3 pages of 16" in repr(allocator)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 100)), max_size=60))
def test_any_sequence_of_growth_and_freeing_keeps_every_page(actions: list[tuple[int, int]]) -> None:
    allocator = PageAllocator(12, 16)
    owners: list[list[int]] = [[] for _ in range(5)]
    for owner, num_tokens in actions:
        if num_tokens == 0:
            allocator.free(owners[owner])
        else:
            fits = allocator.pages_for(num_tokens) - len(owners[owner]) <= 12 - allocator.used
            assert allocator.grow(owners[owner], num_tokens) == fits
            assert not fits or len(owners[owner]) * 16 >= num_tokens
        allocator.check_integrity(owners)
