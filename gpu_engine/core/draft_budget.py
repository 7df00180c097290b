"""Chooses how many drafts of each sequence a step verifies: as many as raise the expected tokens per second.

A step verifies the drafts with the largest chance of acceptance, over all its lanes, up to the number that maximises
expected tokens / expected time. The time is what a step with so many rows takes, as measured (step_times.py). The
chance of a draft is the product of its own chance and the chances of the drafts before it (`Acceptance`). Drafts that
were not verified count as well: the token of their position shows whether they were right. So a sequence whose drafts
fail pays nothing to find out that they have become good. Where the host does not know the drafts at the launch, it
probes instead, at intervals that double. Where proposing itself costs more than its drafts bring, it pauses; a captured
step without drafts proposes none either, so that its measured time equals a server's without drafts.

Invariant: a choice changes speed and never a token. Pure: no clocks, no tensors.

Not responsible for: proposing (see drafters/), measuring (see runner.py), the rows of the launch (see step/direct.py,
step/device/graphs.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpu_engine.core.step_times import StepTimes

_FORCED, _SHORT, _MIDDLE, _LONG = range(4)
"""Kinds of drafts: jump-forward tokens, and the drafter's own by the number proposed. A lookup proposes more tokens
after a longer match, so the number says how sure it is."""
_KINDS = 4
_POSITIONS = 16
_OWN_POSITIONS = 3
_OWN_WEIGHT = 3.0
"""How many of its own drafts a sequence needs, to count as much as the drafts of all sequences."""
_OWN_MEMORY = 0.93
"""Weight of a sequence's earlier drafts, for each later one: some 15 drafts count."""
_ENGINE_MEMORY = 0.998
_FIRST = {_FORCED: (49.0, 50.0), _SHORT: (1.0, 2.0), _MIDDLE: (1.3, 2.0), _LONG: (1.5, 2.0)}
"""(accepted, drafts) before anything was verified."""
_MIN_CHANCE = 0.03
"""Drafts below it are never verified: their mask rows cost time even where their rows are padding."""
_LIKELY = 0.5
"""Drafts from this chance on that the times forbid are probed."""
_SURPRISE = 0.9
"""A probe that takes less than this share of the expected time shows that the expectation was wrong."""
_PATIENCE = 8
"""The search ends after this many drafts without a better rate: a plateau may follow a step of the time curve."""


@dataclass(slots=True, eq=False)
class DraftRecord:
    """The drafts of one sequence so far, decayed: by kind, and by position 0, 1, or later. Owned by the sequence."""

    hits: list[float] = field(default_factory=lambda: [0.0] * (_KINDS * _OWN_POSITIONS))
    tries: list[float] = field(default_factory=lambda: [0.0] * (_KINDS * _OWN_POSITIONS))
    since: int = -1
    """Number of the first step that the sequence was in; -1: none yet."""


class Proposal(NamedTuple):
    """The drafts that a sequence has for its next step; a tuple, because each step makes one for each lane."""

    record: DraftRecord
    num_jump_forward: int = 0
    """The first drafts, which the grammar forces."""
    tokens: tuple[int, ...] | None = None
    """All drafts; None: the host does not know them, and not how many there are."""
    most: int = _POSITIONS - 1
    """Upper bound of the drafts of the next step."""

    @property
    def num_drafts(self) -> int:
        """Drafts, or the upper bound where they are not known."""
        return self.most if self.tokens is None else min(len(self.tokens), self.most)


@dataclass(frozen=True, slots=True)
class Shape:
    """A shape that the step's forward may have."""

    rows_per_lane: int
    rows: int
    """The rows of the whole forward, padding included."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The choice for one step, and the proposals that it was made from."""

    proposals: tuple[Proposal, ...]
    """One a lane; empty: no lane of the engine ever has drafts."""
    limits: tuple[int, ...]
    """Drafts to verify, for each lane."""
    guided: bool
    is_probe: bool = False
    """The step tries drafts that do not seem to pay; see `Probe`."""
    proposes: bool = True
    """Drafts are proposed after the step, for the next one."""


class Acceptance:
    """Chances of acceptance, from all sequences by kind and position, and from each sequence by kind."""

    def __init__(self, *, by_length: bool) -> None:
        """Args: `by_length`: the number of drafts says how sure the drafter is."""
        self._by_length = by_length
        self._hits = [[_FIRST[kind][0]] * _POSITIONS for kind in range(_KINDS)]
        self._tries = [[_FIRST[kind][1]] * _POSITIONS for kind in range(_KINDS)]

    def chances(self, proposal: Proposal) -> list[float]:
        """Return the chance of each draft that it and all drafts before it are accepted, up to the last worth a row."""
        num_drafts = proposal.num_drafts
        if not num_drafts:
            return []
        record, num_forced, own = proposal.record, proposal.num_jump_forward, self._kind(proposal, num_drafts)
        chance, found = 1.0, []
        for j in range(num_drafts):
            kind, at = (_FORCED, j) if j < num_forced else (own, j - num_forced)
            common = self._hits[kind][at] / self._tries[kind][at]
            own_at = kind * _OWN_POSITIONS + min(at, _OWN_POSITIONS - 1)
            chance *= (record.hits[own_at] + _OWN_WEIGHT * common) / (record.tries[own_at] + _OWN_WEIGHT)
            if chance < _MIN_CHANCE:
                break
            found.append(chance)
        return found

    def observe(self, proposal: Proposal, limit: int, token_ids: Sequence[int], num_accepted: int) -> None:
        """Learn from a step that gave the sequence these tokens; without a token, or a draft, it shows nothing."""
        if not token_ids or proposal.tokens == ():
            return
        if proposal.tokens is None:
            verdicts = [True] * num_accepted + [False] * (num_accepted < min(limit, len(token_ids)))
        else:
            verdicts = _verdicts(proposal.tokens, token_ids)
        own = self._kind(proposal, proposal.num_drafts)
        for j, hit in enumerate(verdicts[:_POSITIONS]):
            kind, at = (_FORCED, j) if j < proposal.num_jump_forward else (own, j - proposal.num_jump_forward)
            record, own_at = proposal.record, kind * _OWN_POSITIONS + min(at, _OWN_POSITIONS - 1)
            record.tries[own_at] = record.tries[own_at] * _OWN_MEMORY + 1
            record.hits[own_at] = record.hits[own_at] * _OWN_MEMORY + hit
            self._tries[kind][at] = self._tries[kind][at] * _ENGINE_MEMORY + 1
            self._hits[kind][at] = self._hits[kind][at] * _ENGINE_MEMORY + hit

    def _kind(self, proposal: Proposal, num_drafts: int) -> int:
        own = num_drafts - proposal.num_jump_forward
        if not self._by_length or proposal.tokens is None or own > 5:
            return _LONG
        return _SHORT if own <= 3 else _MIDDLE

    def __repr__(self) -> str:
        names = ("forced", "short", "middle", "long")
        first = (f"{name} {self._hits[kind][0] / self._tries[kind][0]:.2f}" for kind, name in enumerate(names))
        return f"<Acceptance of a first draft: {', '.join(first)}>"


def _verdicts(drafts: Sequence[int], token_ids: Sequence[int]) -> list[bool]:
    """Return for each draft, verified or not, whether it was right, up to the first that was not."""
    verdicts: list[bool] = []
    for draft, token in zip(drafts, token_ids, strict=False):
        verdicts.append(draft == token)
        if draft != token:
            break
    return verdicts


def packed_limits(chances: Sequence[Sequence[float]], times: StepTimes, most_rows: int) -> list[int]:
    """Return the drafts of each lane where every draft adds one row to the forward.

    `chances` do not rise along a lane, so the best drafts of all lanes begin at the front of each lane.
    """
    num_lanes = len(chances)
    drafts = sorted(((chance, b) for b, lane in enumerate(chances) for chance in lane), key=lambda draft: -draft[0])
    tokens, best, best_rate = float(num_lanes), 0, num_lanes / times.ms(num_lanes)
    for count, (chance, _) in enumerate(drafts[: max(0, most_rows - num_lanes)], start=1):
        tokens += chance
        rate = tokens / times.ms(num_lanes + count)
        if rate > best_rate:
            best, best_rate = count, rate
        elif count > best + _PATIENCE:
            break
    limits = [0] * num_lanes
    for _, b in drafts[:best]:
        limits[b] += 1
    return limits


def padded_limits(chances: Sequence[Sequence[float]], times: StepTimes, shapes: Sequence[Shape]) -> list[int]:
    """Return the drafts of each lane where every lane has the rows of the shape, used or not."""

    def rate(shape: Shape) -> float:
        return (len(chances) + sum(sum(lane[: shape.rows_per_lane - 1]) for lane in chances)) / times.ms(shape.rows)

    most = max(shapes, key=rate).rows_per_lane - 1
    return [min(most, len(lane)) for lane in chances]


class Pause:
    """Stops proposing while a proposal costs more time than its drafts save; looks again at intervals that double."""

    TRIAL = 32
    """Steps that are summed up before a decision."""
    FIRST, MOST = 16, 64
    """Shortest and longest pause, in steps."""

    def __init__(self) -> None:
        self._sum_ms, self._trial, self._spell, self._left = 0.0, self.TRIAL, self.FIRST, 0

    @property
    def paused(self) -> bool:
        """The next steps propose nothing."""
        return self._left > 0

    def observe(self, saved_ms: float, cost_ms: float) -> None:
        """Count one step: the time that its drafts saved, and the time of proposing the next ones."""
        if self._left:
            self._left -= 1
            return
        self._sum_ms += saved_ms - cost_ms
        self._trial -= 1
        if self._trial == 0:
            if self._sum_ms < 0:
                self._left, self._spell = self._spell, min(2 * self._spell, self.MOST)
            else:
                self._spell = self.FIRST
            self._sum_ms, self._trial = 0.0, self.TRIAL

    def end(self) -> None:
        """Propose again: other sequences run now."""
        self._sum_ms, self._trial, self._spell, self._left = 0.0, self.TRIAL, self.FIRST, 0


class Probe:
    """Says when a step tries drafts that do not seem to pay: the measured times may be wrong, or old.

    Where the host does not know the drafts, nothing else shows that they have become good.
    """

    FIRST, MOST = 16, 512
    """Steps until the first probe, and the most between two."""

    def __init__(self) -> None:
        self._gap, self._left = self.FIRST, self.FIRST

    def due(self, satisfied: bool) -> bool:
        """Count one step; True: it tries more drafts. `satisfied`: the step verifies what there is to verify."""
        if satisfied:
            self._gap = self._left = self.FIRST
            return False
        self._left -= 1
        if self._left:
            return False
        self._gap = self._left = min(2 * self._gap, self.MOST)
        return True

    def surprised(self) -> None:
        """Probe again at once: the last probe took less time than expected."""
        self._gap, self._left = self.FIRST, 1


_FLAT = StepTimes()
"""Every row is free: to try drafts that do not seem to pay. Nothing is observed into it."""
_FLAT.seed({1: 1.0})


class DraftBudget:
    """The choice for every step of one engine. Used only by the engine thread.

    Args:
        most_rows: upper bound of the rows of a step's forward, beyond one for each lane; 0: none.
        by_length: the number of drafts says how sure the drafter is, as after a lookup.
        may_pause: the drafter needs to see nothing while it does not propose.
        computes: each draft adds time, as the drafts of a network do. None: where it may not pause.
    """

    def __init__(
        self, *, most_rows: int = 0, by_length: bool = True, may_pause: bool = True, computes: bool | None = None
    ) -> None:
        self._most_rows = most_rows or 1 << 30
        self.acceptance = Acceptance(by_length=by_length)
        self.times = {False: StepTimes(), True: StepTimes()}
        """The times of steps without and with a guided sequence, whose rows also cost their masks."""
        self._propose_times = StepTimes()
        """The times of proposing, by the rows that the next step may have."""
        self._pause = Pause() if may_pause else None
        self._computes = not may_pause if computes is None else computes
        self._probe = Probe()
        self._proposed = self._postponed = False
        """Whether the last captured step proposed drafts, and whether a probe waits for one that does."""
        self._step = self._paused_at = 0

    def seed(self, ms_by_rows: Mapping[int, float]) -> None:
        """Start from the times of forwards without sequences."""
        for times in self.times.values():
            times.seed(ms_by_rows)

    def choose(self, proposals: Sequence[Proposal], shapes: Sequence[Shape] | None, *, guided: bool) -> Plan:
        """Return the drafts to verify. `shapes`: what the forward may be, ascending; None: any number of rows."""
        self._step += 1
        for proposal in proposals:
            if proposal.record.since < 0:
                proposal.record.since = self._step
        is_probe, proposes = False, True
        chances, times = [self.acceptance.chances(proposal) for proposal in proposals], self.times[guided]
        if shapes is None:
            limits = packed_limits(chances, times, self._most_rows)
            lanes, verified = len(chances), sum(limits)
            is_probe = self._probe.due(sum(chance >= _LIKELY for lane in chances for chance in lane) <= verified)
            if is_probe:
                limits = packed_limits(chances, _FLAT, lanes + verified + max(4, lanes // 2))
        else:
            bounded = [shape for shape in shapes if shape.rows <= self._most_rows] or shapes[:1]
            limits = padded_limits(chances, times, bounded)
            if any(proposal.tokens is None for proposal in proposals):
                most = [min(proposal.most, bounded[-1].rows_per_lane - 1) for proposal in proposals]
                limits, is_probe = self._probed(limits, most)
                if bounded[0].rows_per_lane == 1:
                    limits, is_probe, proposes = self._after_a_proposal(limits, is_probe)
        return Plan(tuple(proposals), tuple(limits), guided, is_probe, proposes)

    def _probed(self, limits: list[int], most: list[int]) -> tuple[list[int], bool]:
        """Return the drafts to verify and whether that is a probe, which verifies `most`."""
        is_probe = self._probe.due(any(limits)) or self._postponed
        return (most, True) if is_probe else (limits, False)

    def _after_a_proposal(self, limits: list[int], is_probe: bool) -> tuple[list[int], bool, bool]:
        """Return the same for this step, and whether it proposes: after a step without drafts there are none to
        verify, so this one proposes and the next one verifies."""
        wants = any(limits)
        self._postponed = wants and is_probe and not self._proposed
        waits, self._proposed = wants and not self._proposed, wants
        return ([0] * len(limits), False, True) if waits else (limits, is_probe, wants)

    def rows_to_propose(self, plan: Plan, most: int) -> int:
        """Return the rows that the step after `plan` may have for a lane: a drafter proposes at most one less.

        Between 1 and `most`; 1 while proposing pauses. With a drafter that computes each draft, the number whose
        expected tokens are worth the rows and the time of proposing.
        """
        if not plan.proposes:
            return 1
        if self._pause is not None:
            if self._pause.paused:
                new = sum(proposal.record.since > self._paused_at for proposal in plan.proposals)
                if 2 * new >= len(plan.proposals):
                    self._pause.end()
            if self._pause.paused:
                return 1
        if not self._computes:
            return most
        lanes = len(plan.proposals)
        chances = [self.acceptance.chances(Proposal(p.record, most=most - 1)) for p in plan.proposals]

        def rate(rows: int) -> float:
            tokens = lanes + sum(sum(lane[: rows - 1]) for lane in chances)
            return tokens / (self.times[plan.guided].ms(lanes * rows) + self._propose_times.ms(rows))

        return max(range(min(2, most), most + 1), key=rate)

    def observe(
        self,
        plan: Plan,
        results: Sequence[tuple[Sequence[int], int]],
        *,
        rows: int,
        verify_ms: float,
        propose_ms: float = 0.0,
        proposed_rows: int = 0,
    ) -> None:
        """Learn from a step.

        Args:
            plan: of the step.
            results: for each lane its new tokens, and how many drafts among them were accepted.
            rows: of the forward, padding included.
            verify_ms: the step without its proposing, where the two can be told apart; 0: it also had other work.
            propose_ms: proposing for the next step.
            proposed_rows: `rows_to_propose` of that step; 0: not measured apart.
        """
        times, lanes, num_tokens = self.times[plan.guided], len(plan.proposals), 0
        if plan.is_probe and 0 < verify_ms < _SURPRISE * times.ms(rows):
            self._probe.surprised()
        times.observe(rows, verify_ms)
        if not plan.proposals:
            return
        for proposal, limit, (token_ids, num_accepted) in zip(plan.proposals, plan.limits, results, strict=True):
            self.acceptance.observe(proposal, limit, token_ids, num_accepted)
            num_tokens += len(token_ids)
        if proposed_rows > 1:
            self._propose_times.observe(proposed_rows, propose_ms)
        if self._pause is not None and proposed_rows:
            was_paused = self._pause.paused
            cost_ms = self._propose_times.ms(proposed_rows) if proposed_rows > 1 else 0.0
            self._pause.observe(num_tokens * times.ms(lanes) / lanes - times.ms(rows), cost_ms)
            if self._pause.paused and not was_paused:
                self._paused_at = self._step

    def __repr__(self) -> str:
        paused = " paused" if self._pause is not None and self._pause.paused else ""
        return f"<DraftBudget{paused} free {self.times[False]} guided {self.times[True]} {self.acceptance}>"


class EveryDraft(DraftBudget):
    """Verifies every draft that a step has room for, and always proposes K more: drafters are compared with it."""

    def choose(self, proposals: Sequence[Proposal], shapes: Sequence[Shape] | None, *, guided: bool) -> Plan:
        """See `DraftBudget.choose`."""
        if shapes is None:
            room = max(0, self._most_rows // max(1, len(proposals)) - 1)
        else:
            room = (
                max(shape.rows_per_lane for shape in shapes if shape.rows <= self._most_rows or shape is shapes[0]) - 1
            )
        return Plan(tuple(proposals), tuple(min(room, proposal.num_drafts) for proposal in proposals), guided)

    def rows_to_propose(self, plan: Plan, most: int) -> int:
        """Return `most`."""
        return most
