"""The compiled grammars in memory: whose are dropped for whose."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grammar_service.compile.owned_cache import OwnedCache, Owner
from grammar_service.errors import LimitExceeded

NOBODY = Owner()


def test_the_least_recently_used_goes_first() -> None:
    cache: OwnedCache[int] = OwnedCache(30)
    for key in "abc":
        cache.put(key, ord(key), 10, NOBODY)
    assert cache.get("a") == ord("a")
    cache.put("d", 1, 10, NOBODY)
    assert [cache.get(key) is None for key in "abcd"] == [False, True, False, False]
    assert (len(cache), cache.num_bytes) == (3, 30)


def test_a_flood_of_one_owner_drops_its_own_grammars() -> None:
    cache: OwnedCache[int] = OwnedCache(100)
    for i in range(3):
        cache.put(f"b{i}", i, 10, Owner("beta"))
    for i in range(50):
        cache.put(f"a{i}", i, 10, Owner("acme"))
    assert [cache.get(f"b{i}") for i in range(3)] == [0, 1, 2]
    assert cache.num_bytes == 100


def test_an_owner_s_bound_drops_its_own_oldest() -> None:
    cache: OwnedCache[int] = OwnedCache(1000)
    mine = Owner("acme", 25)
    cache.put("b", 0, 500, Owner("beta"))
    for i in range(4):
        cache.put(f"a{i}", i, 10, mine)
    assert [cache.get(key) for key in ("a0", "a1", "a2", "a3", "b")] == [None, None, 2, 3, 0]


def test_a_grammar_above_a_bound_is_refused_by_the_name_of_that_and_nothing_is_dropped() -> None:
    cache: OwnedCache[int] = OwnedCache(100)
    cache.put("a", 1, 10, Owner("acme", 20))
    with pytest.raises(
        LimitExceeded, match="compiled_grammar_bytes: the compiled grammar has 21 bytes, the limit is 20"
    ):
        cache.put("b", 1, 21, Owner("acme", 20))
    with pytest.raises(LimitExceeded, match="cache_bytes: the compiled grammar has 101 bytes, the limit is 100"):
        cache.put("b", 1, 101, Owner("acme"))
    assert cache.get("a") == 1


def test_a_new_grammar_is_not_the_one_that_goes() -> None:
    cache: OwnedCache[int] = OwnedCache(100)
    for i in range(4):
        cache.put(f"a{i}", i, 10, Owner("acme"))
    cache.put("b", 1, 61, Owner("beta"))
    assert cache.get("b") == 1
    assert cache.num_bytes == 91


def test_what_is_in_use_is_kept() -> None:
    cache: OwnedCache[int] = OwnedCache(100)
    for key in "abc":
        cache.put(key, 1, 10, Owner(key))
    assert cache.clear({"b"}) == (2, 20)
    assert (len(cache), cache.num_bytes) == (1, 10)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20), st.integers(0, 40), st.sampled_from((0, 50)))))
def test_no_bound_is_exceeded_and_the_last_one_is_there(puts: list[tuple[str, int, int, int]]) -> None:
    cache: OwnedCache[int] = OwnedCache(100)
    sizes: dict[str, int] = {}
    for i, (name, key, size, bound) in enumerate(puts):
        owned = f"{name}{key}"
        cache.put(owned, i, size, Owner(name, bound))
        sizes[owned] = size
        assert cache.get(owned) == i
        kept = {each: bytes_ for each, bytes_ in sizes.items() if cache.get(each) is not None}
        assert sum(kept.values()) == cache.num_bytes <= 100
        if bound:
            assert sum(bytes_ for each, bytes_ in kept.items() if each[0] == name) <= bound
