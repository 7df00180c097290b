"""The seven questions. Each track asks an endpoint and returns its findings.

Invariant: what was compared is asked in turn within one run, so a machine that is slow for a while is slow for both
sides. A figure that could not be taken says why, and is never a number.
Not responsible for: the endpoint's fields (http_endpoint.py), tables (report.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lockstep_bench.cases import KINDS, Case, Data, Grammar, Keyword, hostile_schema
from lockstep_bench.endpoint import Ask, Endpoint, Outcome, Reply
from lockstep_bench.judge import problem
from lockstep_bench.timing import gaps, quantile, rate


@dataclass(frozen=True, slots=True)
class Finding:
    """What a track found: figures by name, and what a reader must look at."""

    track: str
    figures: dict[str, Any]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Run:
    """What a run has: the cases, the server, and how much is asked."""

    data: Data
    endpoint: Endpoint
    without_drafts: Endpoint | None = None
    """The same model without drafts; None: the endpoint itself, where a request can say so."""
    rounds: int = 1
    concurrency: int = 8
    attack_s: float = 20.0
    """How long bystanders are measured, once without and once with the attack."""
    attacks_per_s: float = 4.0
    step: Callable[[], None] = lambda: None
    """Called after each request of a known number (see `total`)."""

    def total(self, tracks: Iterable[str]) -> int:
        """Return how often `step` is called by some tracks."""
        guided, steady = len(self.data.guided), len(self.data.steady)
        counts = {
            "valid": guided,
            "equal": 4 * guided,
            "cost": 2 * steady * self.rounds,
            "drafts": 4 * steady * self.rounds,
            "bystanders": 2,
            "keywords": 2 * len(self.data.keywords),
            "complete": len(self.data.long),
        }
        return sum(counts[name] for name in tracks)

    @property
    def plain(self) -> Endpoint | None:
        """The endpoint that is asked for answers without drafts; None: there is none."""
        if self.without_drafts is not None:
            return self.without_drafts
        return self.endpoint if self.endpoint.drafts_by_request else None

    async def ask(self, endpoint: Endpoint, ask: Ask) -> Reply:
        """Ask once, and count the step."""
        reply = await endpoint.ask(ask)
        self.step()
        return reply

    async def ask_all(self, endpoint: Endpoint, asks: Sequence[Ask]) -> list[Reply]:
        """Ask `concurrency` at a time; return the replies in order."""
        turns = asyncio.Semaphore(self.concurrency)

        async def one(ask: Ask) -> Reply:
            async with turns:
                return await self.ask(endpoint, ask)

        return list(await asyncio.gather(*map(one, asks)))


def _ask(case: Case, **changes: Any) -> Ask:
    return replace(Ask(case.prompt, case.max_tokens, case.grammar), **changes)


def verdict(grammar: Grammar, reply: Reply) -> str:
    """Return "valid", "invalid", "cut off", "refused", "failed" or "not offered"."""
    if not reply.done:
        return reply.outcome.value
    if problem(grammar, reply.text) is None:
        return "valid"
    return "cut off" if reply.finish == "length" else "invalid"


async def valid(run: Run) -> Finding:
    """Ask every guided case once, at temperature 1 with fixed seeds: is each whole answer valid?"""
    cases = run.data.guided
    replies = await run.ask_all(run.endpoint, [_ask(case, temperature=1.0, seed=i) for i, case in enumerate(cases)])
    verdicts = [verdict(case.grammar, reply) for case, reply in zip(cases, replies, strict=True)]
    notes = [
        f"{case.name} ({case.grammar.kind}): {found}: {reply.detail or reply.text[:120]!r}"
        for case, reply, found in zip(cases, replies, verdicts, strict=True)
        if found in ("invalid", "refused", "failed")
    ]
    by_kind = {
        kind: dict(Counter(found for case, found in zip(cases, verdicts, strict=True) if case.grammar.kind == kind))
        for kind in KINDS
    }
    return Finding("valid", {"asked": len(cases), **Counter(verdicts), "by kind": by_kind}, notes)


async def equal(run: Run) -> Finding:
    """Compare answers with drafts with those without: greedy, and drawn with a seed; free and guided in turn.

    The answers without drafts are asked one at a time, those with drafts in a batch.
    """
    if run.plain is None:
        return Finding("equal", {"not offered": "no endpoint without drafts; see --without-drafts"})
    found: Counter[str] = Counter()
    notes: list[str] = []
    for temperature, name in ((0.0, "greedy"), (0.8, "seeded")):
        asks = [
            _ask(case, temperature=temperature, seed=i, grammar=case.grammar if i % 4 else None)
            for i, case in enumerate(run.data.guided)
        ]
        drafted = await run.ask_all(run.endpoint, asks)
        plain = [await run.ask(run.plain, replace(ask, drafts=False)) for ask in asks]
        for case, one, other in zip(run.data.guided, drafted, plain, strict=True):
            if not (one.done and other.done):
                found[f"{name}, not answered"] += 1
            elif (one.text, one.finish) == (other.text, other.finish):
                found[f"{name}, equal"] += 1
            else:
                found[f"{name}, different"] += 1
                notes.append(f"{name}, {case.name}: {one.text[:80]!r} with drafts, {other.text[:80]!r} without")
    return Finding("equal", dict(found), notes)


async def cost(run: Run) -> Finding:
    """Compare the pace of guided streams with that of free ones, in turn: all prompts free, all guided, ..."""
    sides: dict[str, list[Reply]] = {"free": [], "guided": []}
    for number in range(run.rounds):
        for side in ("free", "guided") if number % 2 == 0 else ("guided", "free"):
            grammars = [case.grammar if side == "guided" else None for case in run.data.steady]
            asks = [_ask(case, grammar=each) for case, each in zip(run.data.steady, grammars, strict=True)]
            sides[side] += await run.ask_all(run.endpoint, asks)
    return Finding("cost", _compared(sides, "guided", "free"), _failures(sides))


async def drafts(run: Run) -> Finding:
    """Compare the pace with drafts and without, in turn, guided and free."""
    if run.plain is None:
        return Finding("drafts", {"not offered": "no endpoint without drafts; see --without-drafts"})
    figures: dict[str, Any] = {}
    notes: list[str] = []
    for kind in ("guided", "free"):
        sides: dict[str, list[Reply]] = {"drafts": [], "none": []}
        for number in range(run.rounds):
            for side in ("drafts", "none") if number % 2 == 0 else ("none", "drafts"):
                endpoint = run.endpoint if side == "drafts" else run.plain
                asks = [
                    _ask(case, grammar=case.grammar if kind == "guided" else None, drafts=side == "drafts")
                    for case in run.data.steady
                ]
                sides[side] += await run.ask_all(endpoint, asks)
        figures |= {f"{kind}, {name}": value for name, value in _compared(sides, "drafts", "none").items()}
        notes += _failures(sides)
    return Finding("drafts", figures, notes)


def _compared(sides: dict[str, list[Reply]], one: str, other: str) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for side, replies in sides.items():
        done = [reply for reply in replies if reply.done]
        figures[f"{side} tok/s"] = rate(
            (reply.tokens, reply.arrivals[-1] - reply.began_s) for reply in done if reply.arrivals
        )
        figures[f"{side} p99 gap ms"] = 1e3 * quantile([gap for reply in done for gap in gaps(reply.arrivals)], 0.99)
    figures[f"{one} / {other}"] = figures[f"{one} tok/s"] / figures[f"{other} tok/s"]
    return figures


def _failures(sides: dict[str, list[Reply]]) -> list[str]:
    return [
        f"{side}: {reply.outcome.value}: {reply.detail}"
        for side, all_ in sides.items()
        for reply in all_
        if not reply.done
    ]


async def bystanders(run: Run) -> Finding:
    """Compare the gaps of steady streams without and with an attack by hostile schemas, one new schema each.

    Two free and two guided streams are renewed as they end. Afterwards the server must still answer.
    """
    figures: dict[str, Any] = {}
    outcomes: Counter[str] = Counter()
    notes: list[str] = []
    for side in ("quiet", "attacked"):
        async with _attack(run, outcomes) if side == "attacked" else contextlib.nullcontext():
            until_s = time.perf_counter() + run.attack_s
            streams = [
                _steady(run.endpoint, _ask(case, grammar=case.grammar if i % 2 else None), until_s)
                for i, case in enumerate(run.data.steady)
            ]
            replies = await asyncio.gather(*streams)
        for kind, which in (("free", replies[::2]), ("guided", replies[1::2])):
            seen = [gap for each in which for reply in each for gap in gaps(reply.arrivals)]
            figures[f"{kind} {side} p50 gap ms"] = 1e3 * quantile(seen, 0.5)
            figures[f"{kind} {side} p99 gap ms"] = 1e3 * quantile(seen, 0.99)
            figures[f"{kind} {side} tokens"] = sum(reply.tokens for each in which for reply in each)
        failed = [reply for each in replies for reply in each if not reply.done]
        figures[f"{side} failed streams"] = len(failed)
        notes += [f"{side}: {reply.outcome.value}: {reply.detail}" for reply in failed]
        run.step()
    for kind in ("free", "guided"):
        figures[f"{kind} p99 attacked / quiet"] = (
            figures[f"{kind} attacked p99 gap ms"] / figures[f"{kind} quiet p99 gap ms"]
        )
        # A stream that gets no token at all has no gap.
        quiet = figures[f"{kind} quiet tokens"]
        figures[f"{kind} tokens attacked / quiet"] = figures[f"{kind} attacked tokens"] / quiet if quiet else math.nan
    case = run.data.guided[0]
    after = await run.endpoint.ask(_ask(case))
    figures["answers afterwards"] = verdict(case.grammar, after)
    figures["hostile requests"] = dict(outcomes)
    return Finding("bystanders", figures, notes)


async def _steady(endpoint: Endpoint, ask: Ask, until_s: float) -> list[Reply]:
    """Renew a stream until a time; the last one is cut off there."""
    replies = []
    while (left_s := until_s - time.perf_counter()) > 0:
        try:
            async with asyncio.timeout(left_s):
                replies.append(await endpoint.ask(ask))
        except TimeoutError:
            break
        if not replies[-1].done:
            await asyncio.sleep(0.2)  # a server that refuses at once is not asked without a pause
    return replies


@asynccontextmanager
async def _attack(run: Run, outcomes: Counter[str]) -> AsyncIterator[None]:
    """Send hostile requests at a fixed rate, whatever the answers are; count how they end."""

    async def one(number: int) -> None:
        ask = Ask("Answer:", 4, Grammar("json", hostile_schema(number)))
        outcomes["still running at the end"] += 1
        reply = await run.endpoint.ask(ask)
        outcomes["still running at the end"] -= 1
        outcomes[reply.outcome.value] += 1

    async def all_of_them() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(math.ceil(run.attack_s * run.attacks_per_s)):
                group.create_task(one(number))
                await asyncio.sleep(1 / run.attacks_per_s)

    task = asyncio.create_task(all_of_them(), name="attack")
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def keywords(run: Run) -> Finding:
    """For each keyword: enforced, refused by name, weakened in silence, or not shown (see `Keyword`)."""
    found: dict[str, str] = {}
    notes: list[str] = []
    for kind in run.data.keywords:
        control, asked = await run.ask_all(
            run.endpoint, [Ask(kind.prompt, 100, Grammar("json", schema)) for schema in (kind.base, kind.whole)]
        )
        found[kind.name] = of_keyword(kind, control, asked)
        if found[kind.name] in ("weakened", "failed"):
            notes.append(f"{kind.name}: {asked.detail or asked.text[:120]!r}")
    return Finding("keywords", {**Counter(found.values()), "by keyword": found}, notes)


def of_keyword(kind: Keyword, control: Reply, asked: Reply) -> str:
    """Return what a server does with a keyword, from its answers to the schema without it and with it."""
    if asked.outcome is not Outcome.DONE:
        return str(asked.outcome.value)
    whole = Grammar("json", kind.whole)
    if problem(whole, asked.text) is not None:
        # An answer that max_tokens cut off says nothing.
        return "weakened" if problem(Grammar("json", kind.base), asked.text) is None else "not shown"
    breaks_it = control.done and problem(whole, control.text) is not None
    return "enforced" if breaks_it else "not shown"


async def complete(run: Run) -> Finding:
    """Ask for answers that do not fit into max_tokens: valid all the same, cut off, or cut off and said to be whole?"""
    replies = await run.ask_all(run.endpoint, [_ask(case) for case in run.data.long])
    found = Counter(verdict(case.grammar, reply) for case, reply in zip(run.data.long, replies, strict=True))
    notes = [f"{reply.outcome.value}: {reply.detail}" for reply in replies if not reply.done]
    return Finding("complete", {"asked": len(replies), **found}, notes)


TRACKS: dict[str, Callable[[Run], Awaitable[Finding]]] = {
    "valid": valid,
    "equal": equal,
    "cost": cost,
    "drafts": drafts,
    "bystanders": bystanders,
    "keywords": keywords,
    "complete": complete,
}
"""By name, in the order in which they run."""


def as_json(findings: Iterable[Finding]) -> dict[str, Any]:
    """Return findings for the result file."""
    return {each.track: {name: value for name, value in asdict(each).items() if name != "track"} for each in findings}
