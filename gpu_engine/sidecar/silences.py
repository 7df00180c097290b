"""What is said of a grammar process that goes silent for moments: one line at a time, and how often it was since.

On a busy machine such moments come many times a minute and mean little; one may still be the first sign of trouble. One
invariant: between two lines lie `every_s` at least, and every silence that ended is in the next line. Used on the event
loop. Not here: who finds it silent, and what pauses then (grammar_link.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Silences:
    """Counts silences. `line` has to be asked for now and then."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, every_s: float = 30.0) -> None:
        """Args: `clock` gives seconds that never go back."""
        self._clock, self._every_s = clock, every_s
        self._since_s: float | None = None
        self._said_s: float | None = None
        self._untold: list[float] = []
        self.count = 0
        """Silences that began."""

    def begin(self, silent_s: float) -> None:
        """It is found silent, for `silent_s` by now."""
        self.count += 1
        self._since_s = self._clock() - silent_s

    def end(self) -> float:
        """It is heard again; return how long it was silent, in seconds."""
        since_s, self._since_s = self._since_s, None
        if since_s is None:
            return 0.0
        self._untold.append(self._clock() - since_s)
        return self._untold[-1]

    def lost(self) -> None:
        """It will not be heard again: a line of its own says so."""
        self._since_s = None

    def line(self) -> str:
        """Return what is to be said now; "": nothing."""
        now_s, said_s, untold = self._clock(), self._said_s, self._untold
        if not untold or (said_s is not None and now_s < said_s + self._every_s):
            return ""
        self._said_s, self._untold = now_s, []
        if said_s is None or len(untold) == 1:
            return f"was silent for {max(untold):.2f} s; guided requests paused for so long"
        return (
            f"was silent {len(untold)} times in the last {now_s - said_s:.0f} s, for {max(untold):.2f} s at most and "
            f"{sum(untold):.2f} s in all; guided requests paused for so long"
        )

    def __repr__(self) -> str:
        return f"<Silences {self.count} untold={len(self._untold)}>"
