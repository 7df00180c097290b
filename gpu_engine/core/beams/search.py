"""The decision of a beam search: from each beam's candidates to the beams that go on and the answers that are complete.

The rule is the same as in transformers' `generate(num_beams=...)`. The best candidates are ranked by their sum of
log-probabilities. One that ends its answer is a hypothesis if it is among the first `width`; the best others are the
next beams. A hypothesis's score is its sum divided by its length to the power of the length penalty, and the best
`width` are kept. Sums and scores are float32, as they are there.

Invariant: pure; equal inputs give equal decisions, and ties go to the better beam, then to the lower token id. Not
responsible for: slots, pages and matchers (see groups.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gpu_engine.api.request import BeamParams, EarlyStopping
from gpu_engine.step.outcomes import Candidates


@dataclass(slots=True)
class Beam:
    """An answer that goes on."""

    token_ids: list[int]
    score: float
    """Sum of log-probabilities."""


class Child(NamedTuple):
    """A beam of the next step: a beam of this one, by its number, and a token that follows it."""

    parent: int
    token: int


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An answer that has ended."""

    token_ids: tuple[int, ...]
    score: float
    """Sum of log-probabilities over length ** length_penalty."""
    stopped: bool
    """Its last token is a stop token; else it has `max_tokens` tokens."""
    closed: bool
    """The grammar process narrowed the row of its last token."""


class BeamSearch:
    """One search. `beams` are the answers that go on, best first; at first only the empty one.

    Args:
        params: the request's parameters.
        max_tokens: the most tokens of an answer, at least 1.
        stop_ids: tokens that end an answer.
        guided: an answer without a stop token is incomplete, and worse than any complete one.
    """

    def __init__(self, params: BeamParams, max_tokens: int, stop_ids: Collection[int], *, guided: bool) -> None:
        self._params, self._max_tokens, self._stop_ids, self._guided = params, max_tokens, frozenset(stop_ids), guided
        self.beams = [Beam([], 0.0)]
        self._length = 0
        self._hypotheses: list[Hypothesis] = []
        """Best first, at most `width`."""
        self.done = False
        """`hypotheses` are final."""

    @property
    def hypotheses(self) -> list[Hypothesis]:
        """The best ended answers that are to be returned, best first; fewer where fewer are legal."""
        return self._hypotheses[: self._params.num_returned]

    def advance(self, found: Sequence[Candidates]) -> list[Child]:
        """Extend the beams by one token. `found[i]` has the best candidates of `beams[i]`, at least `width` of them and
        every stop token among the first `width`, or all that are legal.

        Returns where each of the new `beams` comes from.
        """
        assert len(found) == len(self.beams), (len(found), len(self.beams))
        assert not self.done
        self._length += 1
        width, at_limit = self._params.width, self._length >= self._max_tokens
        children: list[Child] = []
        beams: list[Beam] = []
        ended: list[Hypothesis] = []
        for rank, (score, i, token) in enumerate(self._ranked(found)):
            stopped = token in self._stop_ids
            if stopped or at_limit:
                if rank < width:
                    ids = (*self.beams[i].token_ids, token)
                    ended.append(Hypothesis(ids, self._over_length(score, self._length), stopped, found[i].closes))
            elif len(beams) < width:
                children.append(Child(i, token))
                beams.append(Beam([*self.beams[i].token_ids, token], score))
            elif rank >= width:
                break
        self.beams = beams
        self._hypotheses = sorted(self._hypotheses + ended, key=self._order)[:width]
        self.done = not beams or (len(self._hypotheses) == width and not self._may_improve())
        return children

    def _ranked(self, found: Sequence[Candidates]) -> list[tuple[float, int, int]]:
        """Return (sum, beam, token) of every candidate, best first."""
        sums = [
            (float(np.float32(beam.score) + np.float32(logprob)), i, token)
            for i, (beam, candidates) in enumerate(zip(self.beams, found, strict=True))
            for token, logprob in candidates.tokens
        ]
        return sorted(sums, key=lambda each: (-each[0], each[1], each[2]))

    def _may_improve(self) -> bool:
        """Return whether a beam may still become one of the hypotheses, of which there is the full number."""
        params = self._params
        if params.early_stopping is EarlyStopping.AT_ONCE:
            return False
        never = params.early_stopping is EarlyStopping.NEVER and params.length_penalty > 0
        best = self._over_length(self.beams[0].score, self._max_tokens if never else self._length)
        worst = self._hypotheses[-1]
        return best > worst.score or self._is_incomplete(worst)

    def _over_length(self, score: float, length: int) -> float:
        return float(np.float32(score) / np.float32(float(length) ** self._params.length_penalty))

    def _is_incomplete(self, hypothesis: Hypothesis) -> bool:
        return self._guided and not hypothesis.stopped

    def _order(self, hypothesis: Hypothesis) -> tuple[bool, float]:
        return self._is_incomplete(hypothesis), -hypothesis.score

    def __repr__(self) -> str:
        return f"<BeamSearch {self._params} {len(self.beams)} beams of {self._length}, {len(self._hypotheses)} ended>"
