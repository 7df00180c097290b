"""The suffix index: earlier answers by scope, in which a drafter looks for the end of a sequence.

A scope is a grammar of one client, or of all clients; text of one scope drafts for no other. Each scope has a ring of
tokens; the newest answers overwrite the oldest (SuffixDecoding, Oliaro et al. 2024, arXiv 2411.04975, keeps a tree of
all of them). Invariant: the rings have at most `max_bytes` together; the least recently used scope is dropped first,
and no slot has the address of a dropped ring. Used on the engine's thread. Not responsible for: the search (see
kernels/suffix.py), the choice of a scope (see front/suffix_scopes.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch

from gpu_engine.api.request import SuffixScope
from kernels.suffix import BYTES_PER_TOKEN, MIN_CAPACITY, SuffixRing

MAX_SCOPE_TOKENS = 1 << 16
"""Of one scope: some hundreds of answers. Older ones say less of the next."""
OVERHEAD_BYTES = 1024
"""Estimated size of a scope without its ring."""


class SuffixIndex:
    """Rings of answers by scope. `num_slots` sequences run at a time."""

    def __init__(self, max_bytes: int, num_slots: int) -> None:
        assert max_bytes > 0, max_bytes
        self._max_bytes = max_bytes
        largest = MIN_CAPACITY
        while largest < MAX_SCOPE_TOKENS and 2 * largest * BYTES_PER_TOKEN + OVERHEAD_BYTES <= max_bytes:
            largest *= 2
        self._max_capacity = largest
        self._rings: OrderedDict[bytes, SuffixRing] = OrderedDict()
        """The most recently used last."""
        self._scopes: list[bytes | None] = [None] * num_slots
        self.rings_S = torch.zeros(num_slots, dtype=torch.int64)
        """int64 [S], address of the ring of each slot's scope; 0: the scope has none, or the sequence no scope."""
        self.num_bytes = 0
        self.evicted_scopes = 0

    @property
    def num_scopes(self) -> int:
        """Scopes with a ring."""
        return len(self._rings)

    def assign(self, slot: int, scope: SuffixScope | None) -> None:
        """Let the slot's sequence look into its scope, which begins with the scope's seeds; None: into none."""
        self._scopes[slot] = scope.key if scope else None
        self.rings_S[slot] = 0
        if scope is None:
            return
        if scope.key in self._rings:
            self._rings.move_to_end(scope.key)
            self.rings_S[slot] = self._rings[scope.key].address
        else:
            for seed in scope.seeds:
                self._add(scope.key, seed)

    def add(self, scope: SuffixScope, token_ids: Sequence[int]) -> None:
        """Add an answer."""
        if scope.key not in self._rings:
            for seed in scope.seeds:
                self._add(scope.key, seed)
        self._add(scope.key, token_ids)

    def _add(self, key: bytes, token_ids: Sequence[int]) -> None:
        ring = self._rings.get(key)
        needed = (ring.num_tokens if ring else 0) + len(token_ids) + 1
        if ring is None or (needed > ring.capacity < self._max_capacity):
            ring = self._replace(key, ring, needed)
        if ring is not None:
            ring.add(token_ids)
            self._rings.move_to_end(key)

    def _replace(self, key: bytes, ring: SuffixRing | None, needed: int) -> SuffixRing | None:
        """Return a ring of the scope with room for `needed` tokens, or the largest that may be; None: not even the
        smallest fits."""
        capacity = MIN_CAPACITY
        while capacity < min(needed, self._max_capacity):
            capacity *= 2
        old_bytes = _size(ring.capacity) if ring else 0
        if ring is not None:
            self._rings.move_to_end(key)
        while self.num_bytes - old_bytes + _size(capacity) > self._max_bytes and len(self._rings) > (ring is not None):
            self._evict()
        if self.num_bytes - old_bytes + _size(capacity) > self._max_bytes:
            return ring
        larger = SuffixRing(capacity) if ring is None else ring.grown(capacity)
        self._rings[key] = larger
        self.num_bytes += _size(capacity) - old_bytes
        self._set_address(key, larger.address)
        return larger

    def _evict(self) -> None:
        key, ring = self._rings.popitem(last=False)
        self.num_bytes -= _size(ring.capacity)
        self.evicted_scopes += 1
        self._set_address(key, 0)

    def _set_address(self, key: bytes, address: int) -> None:
        for slot, scope in enumerate(self._scopes):
            if scope == key:
                self.rings_S[slot] = address

    def __repr__(self) -> str:
        return f"<SuffixIndex {len(self._rings)} scopes, {self.num_bytes} of {self._max_bytes} bytes>"


def _size(capacity: int) -> int:
    return capacity * BYTES_PER_TOKEN + OVERHEAD_BYTES
