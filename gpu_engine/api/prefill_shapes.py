"""Which shapes a prefill may have: the next chunks of several sequences, padded to one of a few (lanes, tokens).

Libraries plan by shape, and a device may load a kernel at the first use of one, so there are few and a warm-up runs
them all. One invariant: what `of` returns is one of `every`. Pure. Not here: who is in one (scheduler.py), padding
(model/prefill.py).
"""

from __future__ import annotations

from dataclasses import dataclass

STEP = 32
"""Padded lengths are multiples of this."""
LANES = 16
"""Most sequences that a GPU prefills in one forward."""


def padded(length: int) -> int:
    """Return the padded length of a chunk that runs alone."""
    return -(-length // STEP) * STEP


@dataclass(frozen=True, slots=True)
class PrefillShapes:
    """Powers of two of lanes; lengths by STEP up to 8 of them, then four an octave, so that a fifth is padding at most.

    With 16 lanes that are 15 shapes for 256 tokens and 60 for 2048.
    """

    budget: int
    """Tokens of one forward, padding included; a single chunk may be longer by its padding."""
    lanes: int
    """Most sequences of one forward."""
    longest: int
    """Tokens of the longest chunk."""

    def of(self, count: int, longest: int) -> tuple[int, int] | None:
        """Return (B, P) of a forward over `count` chunks of at most `longest` tokens; None: one must not be so big."""
        steps = -(-longest // STEP)
        unit = 1 << max(0, (steps - 1).bit_length() - 3)
        length = min(-(-steps // unit) * unit * STEP, padded(self.longest))
        lanes = 1 << (count - 1).bit_length()
        fits = count == 1 or (count <= self.lanes and lanes * length <= self.budget)
        return (lanes, length) if fits else None

    @property
    def every(self) -> tuple[tuple[int, int], ...]:
        """All of them, those of the most tokens first: the later ones fit into their memory."""
        lengths = range(STEP, padded(self.longest) + 1, STEP)
        shapes = {self.of(count, length) for count in range(1, self.lanes + 1) for length in lengths}
        return tuple(sorted((s for s in shapes if s), key=lambda s: (s[0] * s[1], s), reverse=True))
