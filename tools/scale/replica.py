"""One simulated engine: the engine's own scheduler and page allocator over a simulated clock.

What runs, waits, is preempted, is cut into chunks or found in the prefix cache is decided by `Scheduler` and
`PageAllocator` of gpu_engine/core, which are pure; only the time of an iteration, the tokens that it brings and the
grammar
process are models here. Invariant: a request that was submitted leaves exactly once, through `on_end` or in what `kill`
returns.
Not responsible for: which engine gets a request (see routers.py), the formulas of a step (see step_time.py).
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import simpy

from gpu_engine.api.admission import EngineAdmission
from gpu_engine.api.config import EngineConfig
from gpu_engine.api.engine_settings import MAX_DRAFT_TOKENS
from gpu_engine.core.kv_cache import PageAllocator
from gpu_engine.core.scheduler import GrammarState, Plan, Scheduler, Sequence
from tools.scale.memory import FORMATS, Serving
from tools.scale.shape import PRESETS
from tools.scale.step_time import StepCost, StepLoad, expected_tokens
from tools.scale.traces import Arrival


class QueueFull(Exception):
    """An engine's waiting queue has no room: it refuses the request."""


@dataclass(slots=True, eq=False)
class Request:
    """One request on its way through the fleet. Times are of the simulated clock, in seconds."""

    number: int
    arrival: Arrival
    first_s: float = math.nan
    """When its client got the first token."""
    last_s: float = math.nan
    emitted: int = 0
    attempts: int = 0
    """Engines that it was sent to."""
    outcome: str = ""
    """"ended", "lost" or "refused"; empty while it is under way."""
    gain: float = 1.0
    """Its drafts, and its tokens beyond one a step, over those of the average answer."""
    _tokens: list[int] = field(default_factory=list)

    def tokens(self) -> list[int]:
        """Return numbers that stand for its tokens, prompt and longest answer; equal where a group shares them."""
        if not self._tokens:
            arrival = self.arrival
            shared = [-(arrival.group << 24) - i for i in range(arrival.group_tokens)]
            count = arrival.prompt_tokens + arrival.answer_tokens - len(shared)
            self._tokens = shared + [(self.number << 24) + i for i in range(count)]
        return self._tokens


@dataclass(slots=True, eq=False, kw_only=True, repr=False)
class ServedSequence(Sequence):
    """The scheduler's state of a request."""

    request: Request


@dataclass(frozen=True, slots=True)
class Drafts:
    """How many drafts a sequence verifies in a step, and how many tokens it gets, by the sequences that decode."""

    lanes: tuple[int, ...] = (1,)
    per_lane: tuple[float, ...] = (0.0,)
    """Drafts of a sequence and step, on average, at so many lanes; linear in between."""
    tokens: tuple[float, ...] = (1.0,)
    """Tokens of a sequence and step, on average."""
    gains: tuple[float, ...] = (1.0,)
    """`Request.gain` of measured answers, to draw from: some repeat their prompt, and others have no draft that is
    right."""

    @classmethod
    def constant(cls, drafts: float, acceptance: float) -> Drafts:
        """Return the same drafts at any batch, each right with a chance of `acceptance`."""
        return cls((1,), (drafts,), (expected_tokens(acceptance, drafts),))

    def at(self, lanes: int) -> tuple[float, float]:
        """Return the mean drafts of a sequence and its mean tokens, with so many sequences."""
        at = bisect_right(self.lanes, lanes)
        if at == 0:
            return self.per_lane[0], self.tokens[0]
        if at == len(self.lanes):
            return self.per_lane[-1], self.tokens[-1]
        part = (lanes - self.lanes[at - 1]) / (self.lanes[at] - self.lanes[at - 1])
        pairs = ((values[at - 1], values[at]) for values in (self.per_lane, self.tokens))
        drafts, tokens = (low + part * (high - low) for low, high in pairs)
        return drafts, tokens


@lru_cache(maxsize=1 << 16)
def acceptance_of(drafts: float, tokens: float) -> float:
    """Return the chance of a draft with which `expected_tokens` gives `tokens`: by bisection, to a millionth."""
    low, high = 0.0, 1.0
    if tokens >= expected_tokens(1.0, drafts):
        return 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, drafts) < tokens else (low, middle)
    return low


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammars:
    """What the grammar process costs. Times are in seconds."""

    compile_s: float = 0.03
    """Mean time of a compilation; single ones are drawn from an exponential distribution."""
    compile_workers: int = 2
    bind_s: float = 0.0005
    """From a compiled grammar to a matcher that may be asked."""
    restart_s: float = 0.6
    """From the end of a grammar process to the next one's answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What every engine of a fleet is."""

    cost: StepCost
    config: EngineConfig
    mixes: bool
    """Chunks of prompts share the forward of a step, as on a CPU where the model's forward takes them."""
    drafts: Drafts = Drafts()
    grammars: Grammars = Grammars()
    front_s: float = 0.0
    """From the client's call to the waiting queue: the wire, the check, the tokeniser."""
    reply_s: float = 0.0
    """From a step's end to the client."""
    noise: tuple[float, ...] = (1.0,)
    """Quantiles, at equal distances, of an iteration's time over what `cost` says."""
    start_s: float = 15.0
    """From the start of an engine's process to its first request."""

    def scheduler(self) -> Scheduler[ServedSequence]:
        """Return a scheduler as `EngineLoop` of gpu_engine/core/loop.py builds it."""
        config = self.config
        sizes = Serving(PRESETS["embedded"], FORMATS["bfloat16"], config)  # pages and lookahead depend on no shape
        return Scheduler(
            config.max_batch_size,
            PageAllocator(sizes.num_pages, config.page_size),
            prefill_chunk=config.prefill_shapes.budget,
            lookahead=sizes.lookahead,
            shapes=config.prefill_shapes,
            tokens_of=(lambda sequence: sequence.request.tokens()) if config.caches_prefixes else None,
            max_batched_tokens=max(config.prefill_shapes.budget, config.max_batch_size) if self.mixes else 0,
            max_starvation_s=config.max_starvation_s or math.inf,
        )


class GrammarSide:
    """The grammar process of one engine: a queue of compilations, a cache, and the time in which it is gone."""

    def __init__(self, env: simpy.Environment, spec: Grammars, rng: random.Random) -> None:
        self._env, self._spec, self._rng = env, spec, rng
        self._workers = simpy.Resource(env, spec.compile_workers)
        self._compiled: dict[int, simpy.Event] = {}
        self._back_s = 0.0

    def open(self, grammar: int) -> Generator[simpy.Event, Any, None]:
        """Wait until a matcher of the grammar may be asked. Equal grammars share one compilation."""
        if grammar not in self._compiled:
            self._compiled[grammar] = self._env.process(self._compile())
        yield self._compiled[grammar]
        yield self._env.timeout(self._spec.bind_s)
        yield from self.ready()

    def ready(self) -> Generator[simpy.Event, Any, None]:
        """Wait until there is a process."""
        while self._env.now < self._back_s:
            yield self._env.timeout(self._back_s - self._env.now)

    def _compile(self) -> Generator[simpy.Event, Any, None]:
        with self._workers.request() as worker:
            yield worker
            needed_s = self._rng.expovariate(1 / self._spec.compile_s) if self._spec.compile_s else 0.0
            began_s = -math.inf
            while began_s < self._back_s:  # a process that ended meanwhile took the compilation with it
                yield from self.ready()
                began_s = self._env.now
                yield self._env.timeout(needed_s)

    def kill(self) -> None:
        """End the process; the next one answers after `restart_s`. Compiled grammars are on its disk."""
        self._back_s = self._env.now + self._spec.restart_s


class Replica:
    """One engine. `on_tokens` and `on_end` are called at the simulated time at which the engine sends them."""

    def __init__(
        self,
        env: simpy.Environment,
        number: int,
        spec: EngineSpec,
        seed: str,
        on_tokens: Callable[[Request], None],
        on_end: Callable[[Request], None],
    ) -> None:
        self.number, self.spec, self._env = number, spec, env
        self._rng = random.Random(f"{seed} engine {number}")
        self._on_tokens, self._on_end = on_tokens, on_end
        self.busy_s = 0.0
        self.preempted = 0
        self.cached_tokens = 0
        self.deaths = 0
        self.unanswered = 0
        """Requests at a dead engine that its router still counts."""
        self._boot()

    def _boot(self) -> None:
        self._scheduler = self.spec.scheduler()
        self._grammar = GrammarSide(self._env, self.spec.grammars, self._rng)
        self._held: dict[Request, ServedSequence] = {}
        self._wake = self._env.event()
        self.alive = True
        self._loop = self._env.process(self._run())

    @property
    def load(self) -> int:
        """Requests that it holds."""
        return len(self._held) + self.unanswered

    def submit(self, request: Request) -> None:
        """Put a request into the waiting queue. Raises QueueFull."""
        admission = EngineAdmission.of(self.spec.config)
        if len(self._held) >= admission.max_sequences:
            raise QueueFull(f"engine {self.number}: max_queue_size = {admission.max_waiting}")
        arrival = request.arrival
        sequence = ServedSequence(
            arrival.prompt_tokens, arrival.grammar > 0, waits_since_s=self._env.now, request=request
        )
        self._held[request] = sequence
        self._scheduler.add(sequence)
        self._notify()

    def kill(self) -> list[Request]:
        """End the process; return the requests that it held, which no replica holds now."""
        self.alive, self.deaths = False, self.deaths + 1
        self._loop.interrupt()
        held, self._held = list(self._held), {}
        return held

    def restart(self) -> None:
        """Start again, with empty caches."""
        self._boot()

    def kill_grammar(self) -> None:
        """End the grammar process: guided sequences keep their pages and wait for the next one."""
        self._grammar.kill()
        for sequence in self._scheduler.running:
            if sequence.guided and sequence.grammar_state is GrammarState.OPEN:
                sequence.grammar_state = GrammarState.LOST
                self._env.process(self._reopen(sequence, sequence.slot_gen))

    def _reopen(self, sequence: ServedSequence, slot_gen: int) -> Generator[simpy.Event, Any, None]:
        yield from self._grammar.ready()
        self._opened(sequence, slot_gen)

    def _open(self, sequence: ServedSequence, slot_gen: int) -> Generator[simpy.Event, Any, None]:
        yield from self._grammar.open(sequence.request.arrival.grammar)
        self._opened(sequence, slot_gen)

    def _opened(self, sequence: ServedSequence, slot_gen: int) -> None:
        if sequence.slot >= 0 and sequence.slot_gen == slot_gen:
            sequence.grammar_state = GrammarState.OPEN
            self._notify()

    def _notify(self) -> None:
        if not self._wake.triggered:
            self._wake.succeed()

    def _run(self) -> Generator[simpy.Event, Any, None]:
        try:
            while True:
                plan = self._scheduler.plan(self._env.now)
                self.preempted += len(plan.preempted)
                for sequence in plan.assigned:
                    if sequence.guided:
                        self._env.process(self._open(sequence, sequence.slot_gen))
                if plan.idle:
                    self._wake = self._env.event()
                    yield self._wake
                    continue
                drafts, seconds = self._seconds(plan)
                yield self._env.timeout(seconds)
                self.busy_s += seconds
                self._apply(plan, drafts)
        except simpy.Interrupt:
            return

    def _seconds(self, plan: Plan[ServedSequence]) -> tuple[list[int], float]:
        """Return the drafts of each sequence that decodes, and the time of the iteration."""
        mean, _ = self.spec.drafts.at(len(plan.decode))
        wanted = [mean * sequence.request.gain for sequence in plan.decode]
        drafts = [min(MAX_DRAFT_TOKENS, int(count) + (self._rng.random() < count % 1)) for count in wanted]
        chunks = [(chunk.end - chunk.start, (chunk.start + chunk.end) // 2) for chunk in plan.prefill]
        tokens = sum(count for count, _ in chunks)
        prompts = StepLoad(
            lanes=0,
            prefill_tokens=tokens,
            prompt_context=sum(count * middle for count, middle in chunks) // max(tokens, 1),
        )
        step = StepLoad(
            lanes=len(plan.decode),
            draft_rows=sum(drafts),
            prefill_tokens=tokens if self.spec.mixes else 0,
            context_tokens=self._scheduler.allocator.num_used * self.spec.config.page_size,
            prompt_context=prompts.prompt_context if self.spec.mixes else 0,
            guided_lanes=sum(sequence.guided for sequence in plan.decode),
        )
        seconds = 0.0
        if plan.decode or self.spec.mixes:
            seconds += self.spec.cost.seconds(step)
        if tokens and not self.spec.mixes:
            seconds += self.spec.cost.seconds(prompts)
        return drafts, seconds * self._noise()

    def _noise(self) -> float:
        quantiles = self.spec.noise
        if len(quantiles) == 1:
            return quantiles[0]
        place = self._rng.random() * (len(quantiles) - 1)
        low = int(place)
        return quantiles[low] + (place - low) * (quantiles[low + 1] - quantiles[low])

    def _apply(self, plan: Plan[ServedSequence], drafts: list[int]) -> None:
        """Give every sequence of the iteration what it brought."""
        for chunk in plan.prefill:
            chunk.sequence.prefilled = chunk.end
            if chunk.end == chunk.sequence.prefill_end:
                self._scheduler.index_pages(chunk.sequence)
        mean, tokens = self.spec.drafts.at(len(plan.decode))
        for sequence, count in zip(plan.decode, drafts, strict=True):
            request, brought = sequence.request, 1
            acceptance = acceptance_of(mean * request.gain, 1 + (tokens - 1) * request.gain) if count else 0.0
            while brought <= count and self._rng.random() < acceptance:
                brought += 1
            brought = min(brought, request.arrival.answer_tokens - request.emitted)
            if not request.emitted:
                self.cached_tokens += sequence.num_cached_tokens
            request.emitted += brought
            sequence.length += brought
            sequence.prefilled = sequence.length - 1
            self._on_tokens(request)
            if request.emitted >= request.arrival.answer_tokens:
                self._scheduler.remove(sequence)
                del self._held[request]
                self._on_end(request)

    def check(self) -> None:
        """Assert that slots and pages are owned as the engine's own scheduler says."""
        self._scheduler.check_integrity()
