"""The compiled grammars in memory, bounded in bytes for all owners together and for each owner.

Invariant: the sums equal the sums over the entries. An owner that exceeds its own bound loses its own least recently
used grammars; where all together exceed theirs, the owner with the most bytes does. So no owner evicts another that has
less than itself. With one owner this is plain least recently used.

Not responsible for: what an entry is (see compiler.py), files (see disk_cache.py).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

from grammar_service.errors import LimitExceeded

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose grammars are kept apart from others'."""

    name: str = ""
    max_bytes: int = 0
    """The owner's bound in bytes; 0: none."""


@dataclass(frozen=True, slots=True)
class _Kept(Generic[Value]):
    value: Value
    size: int
    owner: str


class OwnedCache(Generic[Value]):
    """Values by key, in memory. Used on one event loop.

    Args:
        max_bytes: the most bytes of all values.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, _Kept[Value]] = OrderedDict()
        """The least recently used first."""
        self._owned: Counter[str] = Counter()
        """Bytes by owner."""
        self.num_bytes = 0

    def get(self, key: str) -> Value | None:
        """Return the value, which is the most recently used one now."""
        kept = self._kept.get(key)
        if kept is None:
            return None
        self._kept.move_to_end(key)
        return kept.value

    def put(self, key: str, value: Value, size: int, owner: Owner) -> None:
        """Keep a value. Raises LimitExceeded for one that is larger than a bound."""
        for name, limit in (("cache_bytes", self._max_bytes), ("compiled_grammar_bytes", owner.max_bytes)):
            if size > limit and (limit or name == "cache_bytes"):
                raise LimitExceeded(f"{name}: the compiled grammar has {size} bytes, the limit is {limit}")
        if key in self._kept:
            self._drop(key)
        # Room is made first, so that the new value is not the one that goes.
        while owner.max_bytes and self._owned[owner.name] + size > owner.max_bytes:
            self._evict(owner.name)
        while self.num_bytes + size > self._max_bytes:
            self._evict(max(self._owned, key=lambda name: self._owned[name]))
        self._kept[key] = _Kept(value, size, owner.name)
        self._owned[owner.name] += size
        self.num_bytes += size

    def clear(self, in_use: Collection[str] = ()) -> tuple[int, int]:
        """Drop every value whose key is not `in_use`; return how many, and their bytes."""
        gone = [key for key in self._kept if key not in in_use]
        before = self.num_bytes
        for key in gone:
            self._drop(key)
        return len(gone), before - self.num_bytes

    def _evict(self, owner: str) -> None:
        self._drop(next(key for key, kept in self._kept.items() if kept.owner == owner))

    def _drop(self, key: str) -> None:
        kept = self._kept.pop(key)
        self.num_bytes -= kept.size
        self._owned[kept.owner] -= kept.size
        if not self._owned[kept.owner]:
            del self._owned[kept.owner]

    def __len__(self) -> int:
        return len(self._kept)

    def __repr__(self) -> str:
        return f"<OwnedCache {len(self)} values, {self.num_bytes} bytes, {len(self._owned)} owners>"
