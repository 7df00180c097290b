"""Which pages of the prefix cache also have a snapshot: the recurrent layers' state after the page's last token.

A model with recurrent layers resumes a cached prefix only where such a state was kept, so `PageAllocator.match_prefix`
cuts its result to the last page with a snapshot. There is a fixed number of places; a new snapshot takes the place of
the least recently used one. Invariant: a page with a snapshot is indexed, and no two pages have one place. Pure: no
tensors.

Not responsible for: the memory of the states (see model/states.py), the choice of pages (see scheduler.py), the index
of pages (see kv_cache.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence


class StateSnapshots:
    """Owned by the `PageAllocator`, which drops the snapshot of each page that leaves its index."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self._places: OrderedDict[int, int] = OrderedDict()
        """Place by page, least recently used first."""
        self._free = list(range(num_places - 1, -1, -1))

    def cut(self, pages: Sequence[int]) -> int:
        """Return how many of a prefix's `pages` there are up to the last one with a snapshot, which is used now."""
        for count in range(len(pages), 0, -1):
            if pages[count - 1] in self._places:
                self._places.move_to_end(pages[count - 1])
                return count
        return 0

    def place_of(self, page: int) -> int:
        """Return the place of a page's snapshot. Raises KeyError if it has none."""
        return self._places[page]

    def add(self, page: int) -> int | None:
        """Return a place for the snapshot of an indexed page; None if it has one, or there are no places."""
        if page in self._places or not self.num_places:
            return None
        place = self._free.pop() if self._free else self._places.popitem(last=False)[1]
        self._places[page] = place
        return place

    def drop(self, page: int) -> None:
        """Forget the snapshot of a page that leaves the index, if it has one."""
        place = self._places.pop(page, None)
        if place is not None:
            self._free.append(place)

    def clear(self) -> None:
        """Forget every snapshot."""
        self._free += self._places.values()
        self._places.clear()

    def __len__(self) -> int:
        return len(self._places)

    def check_integrity(self, indexed: Container[int]) -> None:
        """Assert the invariant; `indexed` has the pages of the index."""
        assert sorted([*self._free, *self._places.values()]) == list(range(self.num_places)), "a place is lost"
        assert all(page in indexed for page in self._places), "a page with a snapshot is not indexed"

    def __repr__(self) -> str:
        return f"<StateSnapshots {len(self)}/{self.num_places}>"
