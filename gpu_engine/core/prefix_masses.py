"""What the tries of exact answers have learned: the masses of prefixes, of one sequence and of all that ask the same.

Invariant: shared masses never change, and each sequence gets a copy. Not responsible for: why masses may be shared, and
what is drawn with them (see exact_sampling.py).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Any, Protocol

import numpy as np

from gpu_engine.core.scheduler import GrammarState
from kernels.step_tensors import PREFIX

MAX_PREFIXES = 1 << 15
"""The most prefixes that a sequence knows. Later ones keep the mass 1, which is exact as well, and needs more tries."""
MAX_SHARED = 4 * MAX_PREFIXES
"""The most prefixes of all shared masses, each question counted as `PER_QUESTION` more: some 60 MB."""
PER_QUESTION = 16
"""What a question takes besides its prefixes, as a number of prefixes."""
_FIRST_PREFIXES = 256


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

    def copy(self) -> PrefixMasses:
        """Return equal masses in a memory of their own."""
        twin = PrefixMasses()
        twin._prefixes = self._prefixes[: len(self)].copy()
        twin._log_p, twin._log_mass, twin._log_rest = self._log_p[:], self._log_mass[:], self._log_rest[:]
        twin._after = {prefix: dict(after) for prefix, after in self._after.items()}
        return twin

    def __len__(self) -> int:
        return len(self._log_p)

    def __repr__(self) -> str:
        return f"<PrefixMasses {len(self)} prefixes, mass {math.exp(self.log_mass):.3g}>"


class Learner(Protocol):
    """A sequence that makes shared tries."""

    slot: int
    """-1: it has none, and makes no tries."""
    grammar_state: GrammarState
    """LOST: it makes no tries until its matcher is opened again."""


class SharedMasses:
    """What shared tries have taught: for each question its masses, or the sequence that makes its tries.

    The questions that were asked last stay. Only the engine's thread uses it.
    """

    def __init__(self, max_prefixes: int = MAX_SHARED) -> None:
        self._max_prefixes = max_prefixes
        self._masses: OrderedDict[Hashable, PrefixMasses] = OrderedDict()
        self._num_prefixes = 0
        self._learners: dict[Hashable, Learner] = {}
        self.epoch = 0
        """How often all masses were forgotten: tries from before that teach nothing any more."""

    def get(self, question: Hashable) -> PrefixMasses | None:
        """Return a copy of the masses of a question; None where there are none."""
        found = self._masses.get(question)
        if found is None:
            return None
        self._masses.move_to_end(question)
        return found.copy()

    def put(self, question: Hashable, masses: PrefixMasses) -> None:
        """Keep a copy of `masses`, unless there are masses of the question, which are equal. Its tries are over."""
        self._learners.pop(question, None)
        if question in self._masses:
            return
        self._masses[question] = kept = masses.copy()
        self._num_prefixes += len(kept) + PER_QUESTION
        while self._num_prefixes > self._max_prefixes:
            self._num_prefixes -= len(self._masses.popitem(last=False)[1]) + PER_QUESTION

    def clear(self) -> None:
        """Forget all masses: another grammar process may allow other tokens."""
        self._masses.clear()
        self._num_prefixes = 0
        self.epoch += 1

    def claim(self, question: Hashable, learner: Learner) -> bool:
        """Return whether `learner`, which has a slot, may make the shared tries of a question: no other one does.

        A holder without a slot makes none, nor does one whose matcher is lost while another has its own: in a
        quarantine one waits for the other. The claim ends with `put`, or with `release` at the sequence's end.
        """
        lost, holder = GrammarState.LOST, self._learners.get(question)
        if holder is None or holder.slot < 0 or (holder.grammar_state is lost is not learner.grammar_state):
            holder = self._learners[question] = learner
        return holder is learner

    def release(self, question: Hashable, learner: Learner) -> None:
        """End a claim, if `learner` has it."""
        if self._learners.get(question) is learner:
            del self._learners[question]

    def __repr__(self) -> str:
        return f"<SharedMasses of {len(self._masses)} questions>"


def log_sum(values: Iterable[float]) -> float:
    """Return the logarithm of the sum of numbers that are given as logarithms."""
    values = list(values)
    largest = max(values)
    return largest if largest == -math.inf else largest + math.log(math.fsum(math.exp(v - largest) for v in values))
