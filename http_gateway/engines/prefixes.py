"""Which engine has seen the beginning of a prompt: a bounded table of hashes of blocks.

A prompt is cut into blocks of BLOCK_BYTES, and each block is known by a hash of all bytes up to its end, as a prefix
cache knows pages. Invariant: at most `capacity` blocks are held, the least recently used are forgotten first; prompts
themselves are not kept. A hash that is wrong costs a prefill and no correctness.

Not responsible for: the decision (see fleet.py).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

BLOCK_BYTES = 256
"""About four pages of 16 tokens."""
MAX_BLOCKS = 128
"""Only the first 32 KiB of a longer prompt are compared."""


class Prefixes:
    """Hash of a block -> the engine that last prefilled it."""

    def __init__(self, capacity: int = 1 << 16) -> None:
        self._owners: OrderedDict[bytes, str] = OrderedDict()
        self._capacity = capacity

    def longest(self, blocks: list[bytes]) -> tuple[str, int]:
        """Return the engine that has the longest beginning, and its number of blocks; ("", 0): none has any."""
        for number in range(len(blocks), 0, -1):
            if (owner := self._owners.get(blocks[number - 1])) is not None:
                return owner, number
        return "", 0

    def insert(self, blocks: list[bytes], owner: str) -> None:
        """Note that `owner` has prefilled the blocks."""
        for block in blocks:
            self._owners[block] = owner
            self._owners.move_to_end(block)
        while len(self._owners) > self._capacity:
            self._owners.popitem(last=False)

    def __len__(self) -> int:
        return len(self._owners)

    def __repr__(self) -> str:
        return f"<Prefixes {len(self)} of {self._capacity} blocks>"


def blocks_of(prompt: bytes) -> list[bytes]:
    """Return the hash of each whole block of the prompt, with all that is before it."""
    end = min(len(prompt) - len(prompt) % BLOCK_BYTES, BLOCK_BYTES * MAX_BLOCKS)
    digest, blocks = hashlib.blake2b(digest_size=12), []
    for start in range(0, end, BLOCK_BYTES):
        digest.update(prompt[start : start + BLOCK_BYTES])
        blocks.append(digest.digest())
    return blocks
