"""Which pages hold which tokens: full pages of earlier sequences, found again by the tokens from the start on.

One invariant: a page that is in here holds the keys and values of its tokens behind those of its parent, and its parent
is in here, too; so whoever gives a page up takes it out before its parent. Tokens are compared, not hashes of them.
Pure. Not here: who owns a page, and which is given up first (`kv_cache.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

_Key = tuple[int, tuple[int, ...]]
"""(page before this one, or _ROOT; tokens of this one)"""
_ROOT = -1


class PrefixIndex:
    """A trie of pages, kept as one table (as vLLM's block hashes are, with the page before in place of its hash)."""

    def __init__(self, page_size: int) -> None:
        self._size = page_size
        self._pages: dict[_Key, int] = {}
        self._keys: dict[int, _Key] = {}
        self.added = 0
        """Counts up: while it stands, nothing is found that was not found before."""

    def find(self, tokens: Sequence[int]) -> list[int]:
        """Return the pages that hold the first tokens, as many full ones as are known in a row."""
        found: list[int] = []
        parent = _ROOT
        for at in range(0, len(tokens) - self._size + 1, self._size):
            page = self._pages.get((parent, tuple(tokens[at : at + self._size])))
            if page is None:
                break
            found.append(page)
            parent = page
        return found

    def add(self, tokens: Sequence[int], pages: Sequence[int], noted: int = 0) -> int:
        """Note what the full ones of `pages` hold, the first `noted` of which are in here; return how many then are.

        Where another page is known to hold the same, that one stands for it, and what lies behind is not noted: its
        parent would be a page that its owner does not own.
        """
        parent = pages[noted - 1] if noted else _ROOT
        for at in range(noted, len(tokens) // self._size):
            page, key = pages[at], (parent, tuple(tokens[at * self._size : (at + 1) * self._size]))
            assert self._keys.get(page, key) == key, "a page was written again while it was known"
            if self._pages.setdefault(key, page) != page:
                return at
            self._keys[page] = key
            self.added += 1
            parent = page
        return max(noted, len(tokens) // self._size)

    def remove(self, page: int) -> None:
        """Forget one page. None of its children may be left."""
        del self._pages[self._keys.pop(page)]

    def clear(self) -> None:
        """Forget all."""
        self._pages.clear()
        self._keys.clear()

    def __contains__(self, page: int) -> bool:
        return page in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def check_integrity(self) -> None:
        """Assert that both tables say the same and every parent is known."""
        assert {page: key for key, page in self._pages.items()} == self._keys
        assert all(parent == _ROOT or parent in self._keys for parent, _ in self._pages), "a parent was given up first"

    def __repr__(self) -> str:
        return f"<PrefixIndex {len(self)} pages of {self._size}>"
