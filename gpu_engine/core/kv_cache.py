"""Page accounting of the KV cache: free pages, owners of each page, and the index that finds pages by their tokens.

A page is in exactly one of three states:

    free     no owner, and its contents are unknown
    used     one owner, or several sequences that begin with the same tokens
    cached   no owner, but its tokens are indexed: `match_prefix` may give it an owner again, `grow` may evict it

Invariant: every page number is in one state, and the owner count of a page equals the number of lists that hold it. A
page that is indexed is never written again. Pure: no tensors, no I/O.

Not responsible for: the choice of sequences (see scheduler.py), the tensors of keys and values (see model/).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import KeysView, Sequence

from gpu_engine.api.ports import PageEvents
from gpu_engine.api.request import Salt
from gpu_engine.core.state_snapshots import StateSnapshots

_Key = tuple[int | Salt, tuple[int, ...]]
"""(the page before this one, or for the first one the salt; the tokens of this page)."""


class PageAllocator:
    """Hands out pages of `page_size` tokens. Used only by the engine thread; other threads may read the counts."""

    def __init__(self, num_pages: int, page_size: int, snapshots: StateSnapshots | None = None) -> None:
        """Args: see below.

        num_pages: numbered from 0.
        page_size: tokens of a page.
        snapshots: of a model with recurrent layers, whose prefixes are found up to a snapshot; None: up to any page.
        """
        self.num_pages, self.page_size, self.snapshots = num_pages, page_size, snapshots
        self._free = list(range(num_pages - 1, -1, -1))
        self._owners = [0] * num_pages
        self._index = PrefixIndex(page_size)
        self._shared: set[int] = set()
        """Pages that `share` gave another owner, until they have none."""
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Pages without an owner in the order of eviction, least recently freed first. A page precedes its parent."""

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def grow(self, pages: list[int], num_tokens: int) -> bool:
        """Append pages to the caller's `pages` until they hold `num_tokens` tokens.

        Cached pages are evicted when no page is free. Returns False, and changes nothing, when fewer pages are
        available than are missing.
        """
        missing = self.pages_for(num_tokens) - len(pages)
        if missing > self.num_available:
            return False
        for _ in range(missing):
            page = self._free.pop() if self._free else self._evict()
            self._owners[page] = 1
            pages.append(page)
        return True

    def share(self, pages: Sequence[int]) -> list[int]:
        """Return a list of the same full pages, which are never written again; the holder of the list owns them as
        well."""
        for page in pages:
            self._owners[page] += 1
        self._shared.update(pages)
        return list(pages)

    def match_prefix(self, tokens: Sequence[int], salt: Salt = "") -> list[int]:
        """Return the full pages that already hold the first of `tokens`; the caller becomes an owner of each.

        Pages are found only with the salt with which they were indexed, and with `snapshots` only up to one of these.

        The caller reads these pages, never writes them, and releases them with `free`.
        """
        pages = self._index.find(tokens, salt)
        if self.snapshots is not None:
            del pages[self.snapshots.cut(pages) :]
        for page in pages:
            if not self._owners[page]:
                del self._cached[page]
            self._owners[page] += 1
        return pages

    def insert(self, tokens: Sequence[int], pages: Sequence[int], num_indexed: int = 0, salt: Salt = "") -> int:
        """Index the full pages among the caller's `pages`, which hold `tokens`; these pages are never written again.

        The first `num_indexed` pages are in the index already. Returns how many are in it afterwards.
        """
        return self._index.add(tokens, pages, num_indexed, salt)

    def num_indexed(self, tokens: Sequence[int], salt: Salt = "") -> int:
        """Return how many full pages of `tokens` are indexed, with a snapshot or without."""
        return len(self._index.find(tokens, salt))

    def adopt(self, tokens: Sequence[int], pages: list[int], salt: Salt = "") -> int:
        """Replace each of the caller's full `pages`, which hold `tokens`, for which another page with the same tokens
        is indexed, by that page; return how many are indexed.

        The caller has filled its pages itself, because the prefix had no snapshot. It must not have steps in flight.
        """
        indexed = self._index.find(tokens, salt)
        for at, page in enumerate(indexed):
            if pages[at] != page:
                if not self._owners[page]:
                    del self._cached[page]
                self._owners[page] += 1
                pages[at], replaced = page, pages[at]
                self.free([replaced])
        return len(indexed)

    def add_snapshot(self, tokens: Sequence[int], salt: Salt = "") -> int | None:
        """Return a place for the state after `tokens`, which end with a page; None if it has one already, if no such
        page is indexed, or if there are no places.

        The page need not be the caller's: another one with the same tokens may be the indexed one.
        """
        assert len(tokens) % self.page_size == 0, len(tokens)
        pages = self._index.find(tokens, salt)
        if self.snapshots is None or not pages or len(pages) * self.page_size < len(tokens):
            return None
        return self.snapshots.add(pages[-1])

    def free(self, pages: list[int]) -> None:
        """Give up the caller's ownership of `pages` and empty the list. Indexed pages without an owner stay cached."""
        for page in reversed(pages):
            self._owners[page] -= 1
            if not self._owners[page]:
                if self._shared:
                    self._shared.discard(page)
                if page in self._index:
                    self._cached[page] = None
                else:
                    self._free.append(page)
        pages.clear()

    def clear_index(self) -> None:
        """Drop the index of every page, after a failed step for example. Not while two sequences own the same page."""
        self._index.clear()
        if self.snapshots is not None:
            self.snapshots.clear()
        # Cleared before the pages become free: another thread that reads `num_used` meanwhile never sees less than 0.
        cached = list(self._cached)
        self._cached.clear()
        self._free.extend(cached)

    def watch(self, events: PageEvents | None) -> None:
        """Report the indexed pages to `events`, and from now on every change of the index; None: stop reporting."""
        self._index.watch(events)

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        self._index.remove(page)
        if self.snapshots is not None:
            self.snapshots.drop(page)
        return page

    @property
    def index_version(self) -> int:
        """Changes whenever a page is indexed; while it is unchanged, `match_prefix` finds no more than before."""
        return self._index.version

    @property
    def num_available(self) -> int:
        """Pages that `grow` can hand out: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Pages that have an owner."""
        return self.num_pages - self.num_available

    @property
    def num_cached(self) -> int:
        """Pages without an owner whose tokens are indexed."""
        return len(self._cached)

    def check_integrity(self, owned: list[list[int]]) -> None:
        """Assert the invariant of this module; `owned` has the page list of every owner."""
        assert all(len(set(pages)) == len(pages) for pages in owned), "a page is in one sequence twice"
        owners = Counter(page for pages in owned for page in pages)
        assert all(self._owners[page] == owners[page] for page in range(self.num_pages)), "an owner is not counted"
        may_share = [page in self._index or page in self._shared or count == 1 for page, count in owners.items()]
        assert all(may_share), "a page has two owners"
        assert self._shared <= owners.keys(), "a page without an owner is shared"
        pages = sorted([*self._free, *self._cached, *owners])
        assert pages == list(range(self.num_pages)), "a page is lost or has two owners"
        assert all(page in self._index for page in self._cached), "a cached page is not indexed"
        self._index.check_integrity()
        if self.snapshots is not None:
            self.snapshots.check_integrity(self._index.pages)

    def __repr__(self) -> str:
        counts = f"{self.num_used}/{self.num_pages} pages of {self.page_size} used, {self.num_cached} cached"
        return f"<PageAllocator {counts}>"


class PrefixIndex:
    """Finds full pages by the tokens of a sequence, from its first token on.

    A trie of pages in one table, like vLLM's block hashes, but keyed by the page before in place of its hash: it
    compares tokens, not hashes. Invariant: an indexed page holds the keys and values of its tokens after the tokens of
    its parent, and its parent is indexed as well. A page must therefore be removed before its parent. Each salt has its
    own trie, so no page is found with two salts.
    """

    def __init__(self, page_size: int) -> None:
        self._size = page_size
        self._pages: dict[_Key, int] = {}
        self._keys: dict[int, _Key] = {}
        """A page comes after its parent."""
        self._events: PageEvents | None = None
        self.version = 0
        """Counts pages added; while it is unchanged, `find` returns no more pages than before."""

    def find(self, tokens: Sequence[int], salt: Salt = "") -> list[int]:
        """Return the longest run of full pages, indexed with `salt`, that hold the first of `tokens`."""
        matched: list[int] = []
        parent: int | Salt = salt
        for at in range(0, len(tokens) - self._size + 1, self._size):
            page = self._pages.get((parent, tuple(tokens[at : at + self._size])))
            if page is None:
                break
            matched.append(page)
            parent = page
        return matched

    def add(self, tokens: Sequence[int], pages: Sequence[int], num_indexed: int = 0, salt: Salt = "") -> int:
        """Index the full pages among `pages`, the first `num_indexed` of which are indexed; return how many then are.

        Where another page with the same tokens is indexed already, the entry of that page is unchanged and the rest of
        `pages` is left out: their parent would be a page that their owner does not own.
        """
        parent: int | Salt = pages[num_indexed - 1] if num_indexed else salt
        for at in range(num_indexed, len(tokens) // self._size):
            page, key = pages[at], (parent, tuple(tokens[at * self._size : (at + 1) * self._size]))
            assert self._keys.get(page, key) == key, "a page was written again while it was indexed"
            if self._pages.setdefault(key, page) != page:
                return at
            self._keys[page] = key
            self.version += 1
            if self._events is not None:
                self._events.stored(page, *key)
            parent = page
        return max(num_indexed, len(tokens) // self._size)

    def remove(self, page: int) -> None:
        """Remove one page, none of whose children is indexed."""
        del self._pages[self._keys.pop(page)]
        if self._events is not None:
            self._events.removed(page)

    def clear(self) -> None:
        """Remove every page."""
        self._pages.clear()
        self._keys.clear()
        if self._events is not None:
            self._events.reset(())

    def watch(self, events: PageEvents | None) -> None:
        """Report the indexed pages, and then every change, to `events`; None: stop reporting."""
        self._events = events
        if events is not None:
            events.reset(tuple(self._keys.items()))

    @property
    def pages(self) -> KeysView[int]:
        """The indexed pages."""
        return self._keys.keys()

    def __contains__(self, page: int) -> bool:
        return page in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def check_integrity(self) -> None:
        """Assert that both tables agree and that every parent is indexed."""
        assert {page: key for key, page in self._pages.items()} == self._keys
        assert all(not isinstance(parent, int) or parent in self._keys for parent, _ in self._pages), (
            "a parent was removed first"
        )

    def __repr__(self) -> str:
        return f"<PrefixIndex {len(self)} pages of {self._size}>"
