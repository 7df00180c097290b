"""Which page of the KV cache belongs to whom: a free list of page numbers, nothing more.

One invariant: a page is free or has exactly one owner. Pure: no tensors, no I/O; the pages themselves are the model's.
"""

from __future__ import annotations


class PageAllocator:
    """Hands out pages of `page_size` tokens. Used by the engine thread alone."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages - 1, -1, -1))

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages hold `num_tokens`."""
        return -(-num_tokens // self.page_size)

    def grow(self, pages: list[int], num_tokens: int) -> bool:
        """Append pages to `pages` until they hold `num_tokens`; False and no change when too few are free."""
        missing = self.pages_for(num_tokens) - len(pages)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            pages.append(self._free.pop())
        return True

    def free(self, pages: list[int]) -> None:
        """Take the pages back and empty the list."""
        self._free.extend(reversed(pages))
        pages.clear()

    @property
    def used(self) -> int:
        """Pages that have an owner."""
        return self.num_pages - len(self._free)

    def check_integrity(self, owned: list[list[int]]) -> None:
        """Assert that the owners' lists and the free list hold every page once."""
        pages = sorted([*self._free, *(p for pages in owned for p in pages)])
        assert pages == list(range(self.num_pages)), "a page is lost or has two owners"

    def __repr__(self) -> str:
        return f"<PageAllocator {self.used}/{self.num_pages} pages of {self.page_size} used>"
