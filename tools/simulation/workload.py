"""The requests of a run, and the clients that send, leave and abort them.

Requests come from a fixed list, so that the tokens which each must have are computed once in a process, without faults
and without drafts. Invariant: a request's tokens depend on nothing but its own fields.

In some runs two tenants send them: one floods the queue of compilations, the other one has never more than its share.

Not responsible for: gRPC and text (see gpu_engine/front/).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random

from gpu_engine.api.errors import LockstepError
from gpu_engine.api.request import (
    FinishReason,
    GrammarKind,
    GrammarOwner,
    GrammarSpec,
    Request,
    SamplingParams,
    Speculation,
    TokenEvent,
)
from gpu_engine.core.engine import Engine
from gpu_engine.sidecar.client import GrammarClient
from tools.simulation.world import World

_SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"},"b":{"enum":["x","yy"]}},"required":["a","b"],'
GRAMMARS: tuple[GrammarSpec | None, ...] = (
    None,
    GrammarSpec(GrammarKind.REGEX, "[a-f]{4,18}"),
    GrammarSpec(GrammarKind.REGEX, "(ab|ba|abc)+x"),
    GrammarSpec(GrammarKind.JSON_SCHEMA, _SCHEMA + '"additionalProperties":false}'),
    GrammarSpec(GrammarKind.LARK, 'start: ("lorem " | "ipsum " | "dolor sit ")+ "amet"'),
    GrammarSpec(GrammarKind.REGEX, "[^<>]*"),
)
NUM_KINDS = 30
PROBES = (
    GrammarSpec(GrammarKind.REGEX, "[x-z]{3,9}"),
    GrammarSpec(GrammarKind.LARK, 'start: "not " ("a" | "the") " bird"'),
)
"""Grammars that no other request has: a grammar process must compile them."""
TOO_LONG = (
    GrammarSpec(GrammarKind.REGEX, "[l-n]{7}"),
    GrammarSpec(GrammarKind.JSON_SCHEMA, _SCHEMA + '"additionalProperties":false}'),
)
"""Grammars whose answers do not fit into the tokens of their requests."""
_LONGEST_PROMPT = 36

COMPILE_QUEUE = 7
"""Places of the queue in runs with tenants."""
STEADY = GrammarOwner("steady", "steady", max_compilations=0, max_waiting=0, max_bytes=0, weight=6.0)
"""Of the places 6 are its share next to the flood's 1: one for each grammar that `drawn` draws from."""
FLOOD = "flood"
"""The name of the other tenant."""
_FLOODED = 24
"""Its compilations."""
_FLOOD_S = 0.05


@dataclass(frozen=True, slots=True)
class Kind:
    """What a client asks for."""

    number: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    grammar: GrammarSpec | None
    refused: bool = False
    """Its `max_tokens` are less than the shortest answer of its grammar has: the Bind fails, with InvalidRequest."""


@cache
def kinds() -> tuple[Kind, ...]:
    """Return the fixed list."""
    random, made = Random(11), []
    for number in range(NUM_KINDS):
        grammar = GRAMMARS[number % len(GRAMMARS)]
        prompt = random.choices(range(97, 123), k=random.randint(2, _LONGEST_PROMPT))
        if number % 5 == 0:
            prompt = [98 + number % 3] * 16 + prompt[:16]  # a prefix that several share
        temperature = 0.0 if number % 2 else 0.7
        sampling = SamplingParams(max_tokens=random.randint(12, 40), seed=number, temperature=temperature)
        made.append(Kind(number, tuple(prompt), sampling, grammar))
    for number, grammar in enumerate(PROBES, start=NUM_KINDS):
        made.append(Kind(number, (112, 114, 111, 98, 101), SamplingParams(max_tokens=16, seed=number), grammar))
    for grammar in TOO_LONG:
        sampling = SamplingParams(max_tokens=2, seed=len(made))
        made.append(Kind(len(made), (116, 111, 111), sampling, grammar, refused=True))
    return tuple(made)


@dataclass(frozen=True, slots=True)
class Plan:
    """One request of a run."""

    kind: Kind
    at_s: float
    leaves_at: int | None = None
    """The client leaves when it has so many tokens."""
    aborts_at_s: float | None = None
    """The request is aborted so long after it was sent."""
    owner: GrammarOwner | None = None
    """The tenant of its grammar, in runs with tenants."""

    @property
    def grammar(self) -> GrammarSpec | None:
        """The grammar as the tenant's."""
        return self.kind.grammar and replace(self.kind.grammar, owner=self.owner)

    @property
    def floods(self) -> bool:
        """The request is one of the tenant that floods."""
        return self.owner is not None and self.owner.tenant == FLOOD


def drawn(random: Random, *, come_and_go: bool) -> list[Plan]:
    """Draw the requests of a run. Where clients come and go, a slot has many owners, and messages of earlier ones."""
    made, burst = [], random.random() < 0.5
    ordinary, refused = kinds()[:NUM_KINDS], kinds()[NUM_KINDS + len(PROBES) :]
    share = 0.35 if come_and_go else 0.12
    for _ in range(random.randint(5, 9) if come_and_go else random.randint(2, 6)):
        kind = random.choice(refused if random.random() < share / 2 else ordinary)
        at_s = random.random() * (0.01 if burst else 0.4)
        leaves = random.randrange(0, 12) if random.random() < share else None
        aborts = random.random() ** 2 * 0.1 if random.random() < share else None
        made.append(Plan(kind, at_s, leaves, aborts))
    return made


def beside_flood(plans: list[Plan], random: Random) -> list[Plan]:
    """Return the requests as those of one tenant, and a flood of another one's compilations about them."""
    begin_s, guided = random.choice(plans).at_s, [kind for kind in kinds()[:NUM_KINDS] if kind.grammar is not None]
    flood = []
    for number in range(_FLOODED):
        # Each compilation is for its own space, so none is in the cache.
        owner = GrammarOwner(f"{FLOOD}{number}", FLOOD, max_compilations=0, max_waiting=0, max_bytes=0)
        at_s = max(0.0, begin_s + (random.random() - 0.5) * _FLOOD_S)
        flood.append(Plan(random.choice(guided), at_s, leaves_at=1, owner=owner))
    return [replace(plan, owner=STEADY) for plan in plans] + flood


def probes() -> list[Plan]:
    """Return the requests that are sent when the faults are over: they must be answered."""
    return [Plan(kind, 0.01 * number) for number, kind in enumerate(kinds()[NUM_KINDS : NUM_KINDS + len(PROBES)])]


@dataclass(eq=False)
class Client:
    """One request from its beginning to its end, as `gpu_engine/front/calls.py` runs it."""

    plan: Plan
    name: str
    num_drafts: int
    world: World
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    error: LockstepError | None = None
    left: bool = False
    over: bool = False
    aborted: bool = False
    """An abort was asked for."""
    events_after_end: int = 0
    _events: asyncio.Queue[TokenEvent] = field(default_factory=asyncio.Queue)

    async def run(self, engine: Engine, grammar: GrammarClient) -> None:
        """Send the request when its time comes, and take its tokens."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self.plan.at_s)

        def sink(event: TokenEvent) -> None:
            loop.call_soon_threadsafe(self._take, event)

        def fail(error: LockstepError) -> None:
            self._events.put_nowait(TokenEvent(0, error=error))

        kind, spec, request = self.plan.kind, self.plan.grammar, None
        try:
            if spec is not None:
                grammar.prepare(self.name, spec, fail)
            request = Request(
                request_id=self.name,
                prompt_ids=list(kind.prompt),
                sampling=kind.sampling,
                sink=sink,
                grammar=spec,
                speculation=Speculation(self.num_drafts),
            )
            engine.submit(request)
            if self.plan.aborts_at_s is not None:
                loop.call_later(self.plan.aborts_at_s, self.abort, engine)
            await self._stream()
        except LockstepError as error:
            self.error = error
        finally:
            self.over = True
            if request is not None and self.finish is None:
                engine.drop(request)
            if spec is not None:
                grammar.forget(self.name)

    def abort(self, engine: Engine) -> None:
        """Have the engine abort the request."""
        if not self.over:
            self.aborted = True
            engine.abort(self.name)

    def _take(self, event: TokenEvent) -> None:
        if self.finish is not None:
            self.events_after_end += 1
        self._events.put_nowait(event)

    async def _stream(self) -> None:
        plan = self.plan
        while True:
            if plan.leaves_at is not None and len(self.tokens) >= plan.leaves_at:
                self.left = True
                return
            event = await self._events.get()
            self.tokens += event.token_ids
            if event.error is not None:
                raise event.error
            if event.finish is not None:
                self.finish = event.finish
                return

    def __repr__(self) -> str:
        end = self.error or self.finish or ("left" if self.left else "goes on")
        return f"<Client {self.name} kind={self.plan.kind.number} tokens={len(self.tokens)} {end!r}>"
