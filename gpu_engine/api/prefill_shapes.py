"""The shapes of a prefill: the next chunks of several sequences, padded to one of a few (lanes, tokens).

Libraries plan by shape, and a device may load a kernel when a shape is first used. So there are few shapes, and a
warm-up runs each of them.

The invariant: `of` returns one of `every`. Pure functions.

Not responsible for: which sequences share a prefill (core/scheduler.py), or padding (step/prompt_rows.py).
"""

from __future__ import annotations

from dataclasses import dataclass

STEP = 32
"""Padded lengths are multiples of this number of tokens."""
LANES = 16
"""The most sequences that a GPU prefills in one forward."""


def padded(length: int) -> int:
    """Return the padded length of a chunk that runs by itself."""
    return -(-length // STEP) * STEP


@dataclass(frozen=True, slots=True)
class PrefillShapes:
    """Lanes are powers of two. Lengths are multiples of STEP up to 8 * STEP, then four per octave: at most a fifth is
    padding. With 16 lanes there are 15 shapes for 256 tokens, and 60 for 2048.
    """

    budget: int
    """The most tokens of one forward, padding included; a single chunk may exceed it by its padding."""
    lanes: int
    """The most sequences of one forward."""
    longest: int
    """The most tokens of one chunk."""

    def of(self, count: int, longest: int) -> tuple[int, int] | None:
        """Return (B, P) for a forward over `count` chunks of at most `longest` tokens; None if it exceeds the
        budget."""
        steps = -(-longest // STEP)
        unit = 1 << max(0, (steps - 1).bit_length() - 3)
        length = min(-(-steps // unit) * unit * STEP, padded(self.longest))
        lanes = 1 << (count - 1).bit_length()
        fits = count == 1 or (count <= self.lanes and lanes * length <= self.budget)
        return (lanes, length) if fits else None

    @property
    def every(self) -> tuple[tuple[int, int], ...]:
        """All shapes, the largest first: the smaller ones then reuse its memory."""
        lengths = range(STEP, padded(self.longest) + 1, STEP)
        shapes = {self.of(count, length) for count in range(1, self.lanes + 1) for length in lengths}
        return tuple(sorted((s for s in shapes if s), key=lambda s: (s[0] * s[1], s), reverse=True))
