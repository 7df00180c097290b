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

*Shared* tries come before the others, if the request wants some (`grammar_exact_shared_tries`). Their seeds are the
same in every request, and no answer of theirs is accepted, so their masses depend on what is asked and not on who asks.
They are kept, and later sequences that ask the same begin with them: those sequences have the answers that they would
have had after the same shared tries of their own.

The numbers are floats of 32 bits, and the noise has 23 random bits: a token whose share of a draw is below 1e-7 is
drawn with a wrong probability.

Used only by the engine thread. Not responsible for: the memory of the masses (see prefix_masses.py), the draw itself
(see kernels/native/accept.h), slots and pages of the next try (see loop.py).
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from gpu_engine.api.request import FinishReason, GrammarExact, Request
from gpu_engine.core.prefix_masses import Learner, PrefixMasses, SharedMasses, log_sum

_MASK_64 = (1 << 64) - 1
_TRY, _COIN, _SHARED = 0x8CB92BA72F3D8DD7, 0xD1342543DE82EF95, 0x2545F4914F6CDD1D
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


class ExactSampler:
    """The tries of one sequence.

    Args:
        seed: of the sequence.
        bound: on tries and time.
        clock: seconds; read between two tries.
        shared: has what shared tries have taught, and gets it.
        question: see `question_of`; used only with shared tries.
        explores: a rejected try goes on to its end.
    """

    def __init__(
        self,
        seed: int,
        bound: GrammarExact,
        clock: Callable[[], float],
        shared: SharedMasses,
        question: Hashable = None,
        *,
        explores: bool = True,
    ) -> None:
        self.bound, self._clock, self._explores = bound, clock, explores
        self._shared, self._key = shared, (question, bound.shared_tries)
        self.masses = PrefixMasses()
        self._epoch = shared.epoch
        self.shared_tries = 0
        """Shared tries that are over."""
        self.learning = bound.shared_tries > 0
        """The present try is a shared one."""
        self.tries = 1
        """The number of the present try, or of the next one that is not shared; from 1 on."""
        self.tokens = 0
        """Tokens that all tries have drawn."""
        self.accepted = False
        self._seed = seed
        self._ends_s = 0.0
        """When the time is over; 0.0 before the first token."""
        self._begin()

    def may_run(self, learner: Learner) -> bool:
        """Return whether the sequence, `learner`, may draw.

        It may if it has the masses that it wants, makes their tries, or has begun a try.
        """
        if not self.learning or self._position > 0:
            return True
        self._recall()
        return not self.learning or self._shared.claim(self._key, learner)

    def end(self, learner: Learner) -> None:
        """Let another sequence make the shared tries: this one has ended."""
        self._shared.release(self._key, learner)

    def _recall(self) -> None:
        """Take over what the shared tries of another sequence have taught, if they are over."""
        known = self._shared.get(self._key)
        if known is not None:
            self.masses, self.learning = known, False

    def _begin(self) -> None:
        self._way = [0]
        """The prefixes of the present try that have a number."""
        self._here = 0
        """The number of the answer so far; -1: it has none."""
        self._position = 0
        self._rejected = False

    @property
    def seed(self) -> int:
        """The seed of the present try's noise: the sequence's own for the first that is not shared."""
        if self.learning:
            return mixed(_SHARED, self.shared_tries + 1)
        return self._seed if self.tries == 1 else mixed(self._seed ^ _TRY, self.tries)

    @property
    def own_tries(self) -> int:
        """Tries that are not shared, the present one included."""
        return 0 if self.learning else self.tries

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
            if not self._rejected and not self.learning:
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
        is_over = not self.learning and self.tries >= self.bound.tries
        if is_over or self._clock() >= self._ends_s or self.masses.log_mass == -math.inf:
            return Verdict.GIVEN_UP
        if self.learning:
            self._learned()
        else:
            self.tries += 1
        self._begin()
        return Verdict.AGAIN

    def _learned(self) -> None:
        """End a shared try. If all masses were forgotten meanwhile, the shared tries begin anew."""
        if self._epoch != self._shared.epoch:
            self._epoch, self.masses, self.shared_tries = self._shared.epoch, PrefixMasses(), 0
            return
        self.shared_tries += 1
        if self.shared_tries == self.bound.shared_tries:
            self._shared.put(self._key, self.masses)
            self.learning = False
        else:
            self._recall()

    def __repr__(self) -> str:
        return f"<ExactSampler try {self.tries} of {self.bound.tries}, {self.masses!r}>"


def question_of(request: Request) -> bytes:
    """Return a digest of all of a request that the masses depend on, but the number of shared tries."""
    exact = request.sampling.grammar_exact
    sampling = replace(request.sampling, seed=0, grammar_exact=None)
    question = (request.prompt_ids, request.grammar, exact and exact.any_spelling, sampling, request.salt)
    return hashlib.blake2b(repr(question).encode(), digest_size=32).digest()


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
