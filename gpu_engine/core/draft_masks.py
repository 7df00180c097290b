"""Whether drafts are held to the grammar: on, off, or measured (auto). Pure: no clock, no chance, no thread.

A masked draft is accepted more often, and costs its row's wait in front of the draw. `auto` compares both ways of
drafting on the traffic that there is: now and then a window of steps drafts the other way, the window behind it the
chosen way, and the two are compared. The invariant: tokens count for the way in which their drafts were drawn, which
was in an earlier step. Not here: how a row is asked for (sync.py), and who knows how a lane's drafts were drawn
(loop.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from gpu_engine.api.config import EngineConfig

WINDOW = 16
"""Steps of a window."""
LEAST = 64
"""Lanes' steps of either way without which nothing is decided."""
REST, LONGEST_REST = 96, 1536
"""Steps from one comparison to the next: an eighth of the steps, or a hundredth, explore. Doubled while it is clear."""
KEPT = 0.95
"""Share of the earlier comparisons that stays in the sums when one is added: some twenty weigh."""
CLEAR = 2.0
"""Standard errors between gain and cost that count as a clear answer."""


class MaskPolicy(Protocol):
    """What the loop asks and tells. Used by the engine thread alone."""

    @property
    def on(self) -> bool:
        """The step that is launched next masks its drafts."""

    def lane(self, masked: bool | None, tokens: int) -> None:
        """Of the step that is being told: a lane emitted so many tokens.

        `masked`: how the drafts that it verified were drawn; None: masks could not matter to it.
        """

    def told(self, *, masked: bool, step_ms: float, draft_ms: float) -> None:
        """End the telling of a step; its drafts behind were drawn so, and their rows held it up for `draft_ms`."""

    def stats(self) -> dict[str, float]:
        """Return counters and the last comparison; the names are fields of `EngineStats`."""


@dataclass(slots=True)
class _Way:
    """What was measured of one way of drafting. Sums, of which older parts fade."""

    lanes: float = 0.0
    tokens: float = 0.0
    squares: float = 0.0
    step_ms: float = 0.0
    draft_ms: float = 0.0

    def fade(self) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) * KEPT)

    @property
    def mean(self) -> float:
        """Tokens that a step brings to a lane."""
        return self.tokens / self.lanes if self.lanes else 0.0

    @property
    def error(self) -> float:
        """Standard error of `mean`."""
        return (max(self.squares / self.lanes - self.mean**2, 0.0) / self.lanes) ** 0.5 if self.lanes else 0.0

    @property
    def exposed(self) -> float:
        """Share of the steps' time that drafts' rows held up, below 1."""
        return min(self.draft_ms / self.step_ms, 0.99) if self.step_ms else 0.0


class DraftMasks:
    """The policy of one engine.

    Args:
        mode: "on", "off" or "auto".
    """

    def __init__(self, mode: str = "auto") -> None:
        assert mode in ("on", "off", "auto"), mode
        self.mode = mode
        self.gain = self.cost = 1.0
        """Of the last comparison: tokens of masked over those of unmasked drafting, and the same of a step's time."""
        self.switches = 0
        """Times that the answer changed."""
        self._chosen = mode != "off"
        self._steps = {True: 0, False: 0}
        """Steps by how they drew, since the start."""
        self._ways = {True: _Way(), False: _Way()}
        self._others = 0.0
        """Tokens of lanes that masks do nothing for, in the same steps: their time is spent, too. It fades, too."""
        self._beside = 0.0
        """The same, of the step that is being told."""
        self._windows, self._left, self._rest = 1, WINDOW, 0
        """Windows to come of this comparison: the chosen way, before it the other one. 0: at rest."""
        self._matters = False
        """The step that is being told has a lane to which masks matter."""

    @classmethod
    def of(cls, config: EngineConfig) -> DraftMasks:
        """Return the policy of an engine; without a drafting network nothing is ever masked."""
        return cls(config.draft_masks if config.drafts_by_net else "off")

    @property
    def on(self) -> bool:
        """See `MaskPolicy.on`."""
        return self._chosen if self._windows < 2 else not self._chosen

    def lane(self, masked: bool | None, tokens: int) -> None:
        """See `MaskPolicy.lane`."""
        self._matters |= masked is not None
        if masked is None:
            self._beside += tokens
            return
        if self.mode != "auto" or not self._windows:
            return
        way = self._ways[masked]
        way.lanes += 1
        way.tokens += tokens
        way.squares += tokens * tokens

    def told(self, *, masked: bool, step_ms: float, draft_ms: float) -> None:
        """See `MaskPolicy.told`. A step in which masks mattered to nobody is none of a window."""
        beside, self._beside = self._beside, 0.0
        if not self._matters:
            return
        self._matters = False
        self._steps[masked] += 1
        if self.mode != "auto":
            return
        if self._windows:
            way = self._ways[masked]
            way.step_ms += step_ms
            way.draft_ms += draft_ms
            self._others += beside
        self._left -= 1
        if not self._left:
            self._turn()

    def _turn(self) -> None:
        """Go on to the next window, to a rest, or to the next comparison."""
        if self._windows == 1:
            self._compare()
            self._windows = 0 if self._rest else 2
            self._left = self._rest or WINDOW
        elif self._windows == 2:
            self._windows, self._left = 1, WINDOW
        else:
            self._windows, self._left = 2, WINDOW

    def _compare(self) -> None:
        """Choose, and say how long that stands."""
        on, off = self._ways[True], self._ways[False]
        lanes = on.lanes + off.lanes
        others = self._others / lanes if lanes else 0.0
        if min(on.lanes, off.lanes) >= LEAST and off.mean + others > 0:
            self.gain = (on.mean + others) / (off.mean + others)
            self.cost = (1 - off.exposed) / (1 - on.exposed)
            # Of a quotient: the relative errors of both add up as squares.
            error = math.hypot(on.error, self.gain * off.error) / (off.mean + others)
            before, self._chosen = self._chosen, self.gain > self.cost
            self.switches += before != self._chosen
            clear = before == self._chosen and abs(self.gain - self.cost) > CLEAR * error
            self._rest = min(2 * self._rest, LONGEST_REST) if clear and self._rest else REST
        for way in (on, off):
            way.fade()
        self._others *= KEPT

    def stats(self) -> dict[str, float]:
        """See `MaskPolicy.stats`."""
        return {
            "draft_masks": int(self._chosen),
            "masked_steps": self._steps[True],
            "unmasked_steps": self._steps[False],
            "mask_gain": self.gain,
            "mask_cost": self.cost,
            "mask_switches": self.switches,
        }

    def __repr__(self) -> str:
        chosen, exploring = "on" if self._chosen else "off", self._windows == 2
        measured = f" gain={self.gain:.3f} cost={self.cost:.3f} rest={self._rest}" if self.mode == "auto" else ""
        return f"<DraftMasks {self.mode}: {chosen}{' (tries the other way)' if exploring else ''}{measured}>"
