"""Which page of the KV cache belongs to whom: a free list of page numbers, counts of owners, and what is kept.

One invariant: a page is free, or owned, by one sequence or by several that begin with the same tokens, or kept: nobody
owns it, its tokens are known, and it is the next owner's who begins with them, or free when pages run out. Pure: no
tensors, no I/O; the pages themselves are the model's. Not here: which tokens a page holds (`prefix_index.py`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from gpu_engine.core.prefix_index import PrefixIndex


class PageAllocator:
    """Hands out pages of `page_size` tokens. Used by the engine thread alone."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._owners = [0] * num_pages
        self._known = PrefixIndex(page_size)
        self._kept: OrderedDict[int, None] = OrderedDict()
        """The next to be given up first. A page stands before its parent: it is given back before, and used less."""

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages hold `num_tokens`."""
        return -(-num_tokens // self.page_size)

    def grow(self, pages: list[int], num_tokens: int) -> bool:
        """Append pages to `pages` until they hold `num_tokens`; False and no change when too few are free or kept."""
        missing = self.pages_for(num_tokens) - len(pages)
        if missing > len(self._free) + len(self._kept):
            return False
        for _ in range(missing):
            page = self._free.pop() if self._free else self._give_up()
            self._owners[page] = 1
            pages.append(page)
        return True

    def share(self, tokens: Sequence[int]) -> list[int]:
        """Return the full pages that hold the first `tokens` already: the caller's, too, to read and to `free`."""
        pages = self._known.find(tokens)
        for page in pages:
            if not self._owners[page]:
                del self._kept[page]
            self._owners[page] += 1
        return pages

    @property
    def known(self) -> int:
        """While this stands, `share` finds no more than before."""
        return self._known.added

    @property
    def left(self) -> int:
        """Pages that `grow` may hand out."""
        return len(self._free) + len(self._kept)

    def remember(self, tokens: Sequence[int], pages: Sequence[int], noted: int = 0) -> int:
        """Note that the caller's `pages` hold `tokens`, those in full pages for good: nobody writes there any more.

        Of the first `noted` pages that was noted before; returned is how many it now is.
        """
        return self._known.add(tokens, pages, noted)

    def forget(self) -> None:
        """What the pages hold is not to be relied on: nobody is to find it. Not while two own the same page."""
        self._known.clear()
        # In this order: another thread that asks for `used` is never told less than none.
        kept = list(self._kept)
        self._kept.clear()
        self._free.extend(kept)

    def free(self, pages: list[int]) -> None:
        """Take the pages back and empty the list."""
        for page in reversed(pages):
            self._owners[page] -= 1
            if not self._owners[page]:
                if page in self._known:
                    self._kept[page] = None
                else:
                    self._free.append(page)
        pages.clear()

    def _give_up(self) -> int:
        page, _ = self._kept.popitem(last=False)
        self._known.remove(page)
        return page

    @property
    def used(self) -> int:
        """Pages that have an owner."""
        return self.num_pages - len(self._free) - len(self._kept)

    @property
    def kept(self) -> int:
        """Pages that have none, and whose tokens are known."""
        return len(self._kept)

    def check_integrity(self, owned: list[list[int]]) -> None:
        """Assert that every page is free, kept, or in the lists of as many owners as it has, and once in each."""
        assert all(len(set(pages)) == len(pages) for pages in owned), "a page is in a sequence twice"
        owners = Counter(page for pages in owned for page in pages)
        assert all(self._owners[page] == owners[page] for page in range(self.num_pages)), "an owner is not counted"
        assert all(count == 1 or page in self._known for page, count in owners.items()), "a page has two owners"
        pages = sorted([*self._free, *self._kept, *owners])
        assert pages == list(range(self.num_pages)), "a page is lost or has two owners"
        assert all(page in self._known for page in self._kept), "a page is kept for nothing"
        self._known.check_integrity()

    def __repr__(self) -> str:
        return f"<PageAllocator {self.used}/{self.num_pages} pages of {self.page_size} used, {self.kept} kept>"
