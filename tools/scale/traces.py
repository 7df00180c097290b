"""The requests of a simulated load: when they arrive, how long they are, what they share, and which grammar they have.

Invariant: equal arguments and seeds give equal traces, and a trace does not depend on the fleet that serves it, so that
fleets of different sizes are compared under the same load. Not responsible for: what becomes of a request (see
fleet.py).
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of a trace."""

    at_s: float
    prompt_tokens: int
    answer_tokens: int
    grammar: int = 0
    """Number of its grammar; requests with one number share a compilation. 0: none."""
    group: int = 0
    """Number of the requests whose prompts begin alike. 0: it shares nothing."""
    group_tokens: int = 0
    """Tokens that the prompts of the group share."""


class BadTrace(ValueError):
    """A file is no trace; the message names the line and the field."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of prompts and answers: pairs to draw from, or two log-normal distributions."""

    pairs: tuple[tuple[int, int], ...] = ()
    """(prompt, answer), drawn with equal chances. Empty: the distributions below."""
    prompt_mean: float = 256.0
    answer_mean: float = 128.0
    spread: float = 0.6
    """Standard deviation over mean, of both."""

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Return the tokens of one prompt and its answer, at least 2 and 1."""
        if self.pairs:
            return self.pairs[rng.randrange(len(self.pairs))]
        return max(2, self._lognormal(rng, self.prompt_mean)), max(1, self._lognormal(rng, self.answer_mean))

    def _lognormal(self, rng: random.Random, mean: float) -> int:
        variance = math.log1p(self.spread**2)
        return round(rng.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance)))

    @property
    def means(self) -> tuple[float, float]:
        """Mean tokens of a prompt and of an answer."""
        if not self.pairs:
            return self.prompt_mean, self.answer_mean
        return tuple(sum(pair[i] for pair in self.pairs) / len(self.pairs) for i in (0, 1))  # type: ignore[return-value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A load without an end, from which traces are drawn."""

    rate: float
    """Requests a second, on average."""
    burstiness: float = 1.0
    """Standard deviation over mean of the times between arrivals, which have a gamma distribution. 1: Poisson arrivals;
    0: a request at equal times; 3 and more: bursts."""
    lengths: Lengths = Lengths()
    guided_share: float = 0.0
    grammars: int = 20
    """Distinct grammars of guided requests; those with small numbers are asked for more often (Zipf's law)."""
    groups: int = 0
    """Groups of requests whose prompts begin alike, as likely as grammars are; 0: prompts share nothing."""
    group_tokens: int = 0

    def __post_init__(self) -> None:
        if self.rate <= 0:
            raise ValueError(f"rate: {self.rate} is not positive")
        if self.burstiness < 0:
            raise ValueError(f"burstiness: {self.burstiness} is negative")
        if not 0 <= self.guided_share <= 1:
            raise ValueError(f"guided_share: {self.guided_share} is not in [0, 1]")

    def trace(self, duration_s: float, seed: int) -> list[Arrival]:
        """Return the arrivals of the first `duration_s` seconds."""
        times, shapes = random.Random(f"{seed} arrivals"), random.Random(f"{seed} shapes")
        arrivals, now = [], self._gap(times)
        while now < duration_s:
            prompt, answer = self.lengths.draw(shapes)
            group = _zipf(shapes, self.groups) if self.groups else 0
            guided = shapes.random() < self.guided_share
            grammar = _zipf(shapes, self.grammars) if guided else 0
            shared = min(self.group_tokens, prompt) if group else 0
            arrivals.append(
                Arrival(
                    at_s=now,
                    prompt_tokens=prompt,
                    answer_tokens=answer,
                    grammar=grammar,
                    group=group,
                    group_tokens=shared,
                )
            )
            now += self._gap(times)
        return arrivals

    def _gap(self, rng: random.Random) -> float:
        if self.burstiness == 0:
            return 1 / self.rate
        shape = self.burstiness**-2
        return rng.gammavariate(shape, 1 / (self.rate * shape))


def _zipf(rng: random.Random, count: int) -> int:
    """Return a number of 1 to `count`, each with a chance in proportion to one over it."""
    place = rng.random() * sum(1 / n for n in range(1, count + 1))
    for number in range(1, count + 1):
        place -= 1 / number
        if place < 0:
            return number
    return count


def read_trace(path: Path) -> list[Arrival]:
    """Read a trace: JSON lines with the fields of `Arrival`, of which the last three may be missing.

    Raises:
        BadTrace: a line is no such object, or a number is out of range.

    """
    known = {field.name for field in fields(Arrival)}
    arrivals = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            arrival = Arrival(**json.loads(line))
        except (json.JSONDecodeError, TypeError) as error:
            raise BadTrace(f"{path}:{number}: {error}; fields are {', '.join(sorted(known))}") from error
        if arrival.at_s < 0 or arrival.prompt_tokens < 1 or arrival.answer_tokens < 1:
            raise BadTrace(f"{path}:{number}: at_s must not be negative, and tokens must be at least 1")
        arrivals.append(arrival)
    if not arrivals:
        raise BadTrace(f"{path}: has no requests")
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def write_trace(path: Path, arrivals: Sequence[Arrival]) -> None:
    """Write a trace that `read_trace` reads."""
    lines = [json.dumps({f.name: getattr(arrival, f.name) for f in fields(Arrival)}) for arrival in arrivals]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
