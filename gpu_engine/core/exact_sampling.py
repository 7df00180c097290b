"""Answers from the model's own distribution, given that the whole answer is in the grammar (`sampling.grammar_exact`).

A mask at every token samples another distribution: it gives a beginning its whole probability even if nearly nothing
that the model would write after it is in the grammar. Here an answer is sampled in tries, and most tries are
rejected.

Let p(t | s) be the probability of token t after the answer s under the sampler without the grammar: temperature,
biases, bans and penalties, but no mask. P(x) is the product of p over the tokens of x, the end token included. The
wanted distribution is pi(x) = P(x) / P(G), where G are the answers that the masks allow to their end, within
`max_tokens`.

A *mass* w(s) is an upper bound of the probability that an answer which begins with s ends in G. It is 1 for a prefix
that no try has reached. For any other prefix it is the sum of p(t | s) w(st) over the tokens t that the mask allows
after s, 0 where `max_tokens` is reached. One try:

    draw        after a known prefix s, token t with probability p(t | s) w(st) / w(s), which is 0 for an illegal token
    arrive      at a prefix s for the first time: its mask gives w(s); reject the try with probability 1 - w(s)
    end         at the end token the answer is accepted, unless the try was rejected

After the try the masses on its way are computed anew, from its last prefix to the first, for the next try.

Why it is exact. Fix the masses at the beginning of a try. It draws and accepts x with the product of its draws and of
its arrivals. Over the known prefixes of x the factors w(st) / w(s) cancel, up to a first arrival at a prefix of mass
1, and after that each arrival's w(s) cancels the divisor of the next draw. So a try returns x with probability P(x) /
w(empty), for every x in G. Given that it returns an answer, this is pi, whatever the masses are and whatever the
tries before have taught. By induction the first accepted answer has the distribution pi. The same holds given that an
answer is accepted within a bound, if the bound is looked at only between two tries: how many tries there were depends
only on rejected ones. A try succeeds with probability P(G) / w(empty), which rises as w(empty) falls towards P(G).

A rejected try may go on to its end (`explores`): the masses on its way are upper bounds however it was chosen, and
the next tries know them. A token's noise is keyed by the seed of its try and its position, and the coin of an arrival
by the same two, so the answer depends on the seed, and not on drafts, batches, preemptions or the life of the grammar
process.

The numbers are floats of 32 bits, and the noise has 23 random bits: a token whose share of a draw is below 1e-7 is
drawn with a wrong probability.

Used only by the engine thread. Not responsible for: the draw itself (see kernels/native/accept.h), slots and pages of
the next try (see loop.py).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from gpu_engine.api.request import FinishReason, GrammarExact
from kernels.step_tensors import PREFIX

MAX_PREFIXES = 1 << 15
"""The most prefixes that a sequence knows. Later ones keep the mass 1, which is exact as well, and needs more tries."""
_FIRST_PREFIXES = 256
_MASK_64 = (1 << 64) - 1
_TRY, _COIN = 0x8CB92BA72F3D8DD7, 0xD1342543DE82EF95
"""Constants that keep the seeds of tries and coins apart from the seeds of the n sequences of a request."""


class Verdict(enum.Enum):
    """What becomes of a sequence after a step."""

    GO_ON = enum.auto()
    """The try goes on."""
    ACCEPTED = enum.auto()
    """The answer is complete and accepted."""
    AGAIN = enum.auto()
    """The try is over: the answer begins anew, with the next seed."""
    GIVEN_UP = enum.auto()
    """The bound on tries or time is reached, or no answer has a mass."""


class PrefixMasses:
    """The known prefixes of one sequence, in the memory that the draws read.

    Invariant: prefix 0 is the empty answer; the mass of a prefix without known masses of its continuations is 1, unless
    `set_dead` made it 0. Masses are natural logarithms.
    """

    def __init__(self) -> None:
        self._prefixes = np.zeros(_FIRST_PREFIXES, PREFIX)
        self._prefixes[0] = (-1, -1, -1, 0.0)
        self._outgrown: list[np.ndarray[Any, np.dtype[np.void]]] = []
        """Smaller memory from before the last `update`. Draws of the present try still read it; what it lacks is on the
        way of this try, and changes none of its draws."""
        self._log_p: list[float] = [0.0]
        """Of the last token of each prefix, given the ones before."""
        self._log_mass: list[float] = [0.0]
        self._log_rest: list[float | None] = [None]
        """The probability of all legal continuations that are not known; None: the mask after the prefix is unknown."""
        self._after: dict[int, dict[int, int]] = {}
        """Prefix -> last token -> number of each known continuation, where there is one."""

    @property
    def address(self) -> int:
        """Where the prefixes are in memory. `add` may change it; an earlier address is valid until `update`."""
        return int(self._prefixes.ctypes.data)

    @property
    def log_mass(self) -> float:
        """The mass of the empty answer: at least log P(G)."""
        return self._log_mass[0]

    def is_new(self, prefix: int) -> bool:
        """Return whether no try has drawn a token after the prefix."""
        return self._log_rest[prefix] is None

    def add(self, prefix: int, token: int, log_p: float, log_rest: float) -> int:
        """Note a draw after a prefix; return the number of the longer prefix, -1 when there is no room.

        `log_rest`: of the probability of the other legal tokens that make no known prefix."""
        known = self._after.get(prefix, {}).get(token)
        if known is not None:
            self._log_rest[prefix] = log_rest
            return known
        number = len(self._log_p)
        if number == MAX_PREFIXES:
            self._log_rest[prefix] = log_sum((log_rest, log_p))
            return -1
        if number == len(self._prefixes):
            self._outgrown.append(self._prefixes)
            self._prefixes = np.concatenate([self._prefixes, np.zeros(number, PREFIX)])
        self._log_rest[prefix] = log_rest
        self._after.setdefault(prefix, {})[token] = number
        self._prefixes[number] = (token, self._prefixes[prefix]["child"], -1, 0.0)
        self._prefixes[prefix]["child"] = number
        self._log_p.append(log_p)
        self._log_mass.append(0.0)
        self._log_rest.append(None)
        return number

    def set_dead(self, prefix: int) -> None:
        """Note that no answer of the grammar begins with the prefix."""
        self._set(prefix, -math.inf)

    def update(self, prefixes: Iterable[int]) -> None:
        """Compute the masses of prefixes anew, each after its continuations. No draw may be under way."""
        self._outgrown.clear()
        for prefix in prefixes:
            rest = self._log_rest[prefix]
            if rest is None:
                continue
            after = self._after.get(prefix, {}).values()
            masses = [rest, *(self._log_p[each] + self._log_mass[each] for each in after)]
            self._set(prefix, log_sum(masses))

    def _set(self, prefix: int, log_mass: float) -> None:
        self._log_mass[prefix] = log_mass
        self._prefixes[prefix]["log_mass"] = log_mass

    def __len__(self) -> int:
        return len(self._log_p)

    def __repr__(self) -> str:
        return f"<PrefixMasses {len(self)} prefixes, mass {math.exp(self.log_mass):.3g}>"


class ExactSampler:
    """The tries of one sequence.

    Args:
        seed: of the sequence.
        bound: on tries and time.
        clock: seconds; read between two tries.
        explores: a rejected try goes on to its end.
    """

    def __init__(self, seed: int, bound: GrammarExact, clock: Callable[[], float], *, explores: bool = True) -> None:
        self.bound, self._clock, self._explores = bound, clock, explores
        self.masses = PrefixMasses()
        self.tries = 1
        """The number of the present try, from 1 on."""
        self.tokens = 0
        """Tokens that all tries have drawn."""
        self.accepted = False
        self._seed = seed
        self._ends_s = 0.0
        """When the time is over; 0.0 before the first token."""
        self._begin()

    def _begin(self) -> None:
        self._way = [0]
        """The prefixes of the present try that have a number."""
        self._here = 0
        """The number of the answer so far; -1: it has none."""
        self._position = 0
        self._rejected = False

    @property
    def seed(self) -> int:
        """The seed of the present try's noise: the sequence's own for the first."""
        return self._seed if self.tries == 1 else mixed(self._seed ^ _TRY, self.tries)

    @property
    def started(self) -> bool:
        """Some try has drawn a token."""
        return self._ends_s > 0.0

    def take(
        self, tokens: Sequence[int], masses: Sequence[tuple[float, float]], finish: FinishReason | None
    ) -> Verdict:
        """Take the tokens of a step, with the masses of their rows, and why the answer ends with them, if it does."""
        if not self._ends_s:
            self._ends_s = self._clock() + self.bound.max_s
        for token, (log_p, log_rest) in zip(tokens, masses, strict=True):
            self.tokens += 1
            self._arrive(token, log_p, log_rest)
            if self._rejected and not self._explores:
                return self._next_try()
        if finish is None:
            return Verdict.GO_ON
        if finish is FinishReason.STOP:
            if not self._rejected:
                self.accepted = True
                self._update()
                return Verdict.ACCEPTED
        elif self._here >= 0:
            self.masses.set_dead(self._here)
        return self._next_try()

    def _arrive(self, token: int, log_p: float, log_rest: float) -> None:
        """Draw a coin for an answer so far that no try has reached before, and note the token after it."""
        if self._here < 0 or self.masses.is_new(self._here):
            log_mass = min(log_sum((log_p, log_rest)), 0.0)
            self._rejected = self._rejected or math.log(coin(self.seed, self._position)) >= log_mass
        if self._here >= 0:
            self._here = self.masses.add(self._here, token, log_p, log_rest)
            if self._here >= 0:
                self._way.append(self._here)
        self._position += 1

    def _update(self) -> None:
        self.masses.update(reversed(self._way))

    def _next_try(self) -> Verdict:
        self._update()
        is_over = self.tries >= self.bound.tries or self._clock() >= self._ends_s
        if is_over or self.masses.log_mass == -math.inf:
            return Verdict.GIVEN_UP
        self.tries += 1
        self._begin()
        return Verdict.AGAIN

    def __repr__(self) -> str:
        return f"<ExactSampler try {self.tries} of {self.bound.tries}, {self.masses!r}>"


def log_sum(values: Iterable[float]) -> float:
    """Return the logarithm of the sum of numbers that are given as logarithms."""
    values = list(values)
    largest = max(values)
    return largest if largest == -math.inf else largest + math.log(math.fsum(math.exp(v - largest) for v in values))


def coin(seed: int, position: int) -> float:
    """Return a number in (0, 1), uniform and independent of the noise of the same seed and position."""
    return ((mixed(seed ^ _COIN, position + 1) >> 12) + 0.5) / (1 << 52)


def mixed(seed: int, index: int) -> int:
    """Return number `index` of a sequence of 64-bit numbers: splitmix64 (Steele, Lea, Flood 2014), twice."""
    z = seed
    for step in (1, index):
        z = (z + step * 0x9E3779B97F4A7C15) & _MASK_64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK_64
        z ^= z >> 31
    return z
