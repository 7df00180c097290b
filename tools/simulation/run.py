"""One run: builds both processes from a seed, lets clients and faults act, and checks every promise afterwards.

Invariant: a run depends only on its seed and on the code. What it opens it closes: descriptors are counted before and
after. Not responsible for: many runs, and their report (see __main__.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.api.errors import InvalidRequest, LimitExceeded
from gpu_engine.api.ports import GrammarEvents
from gpu_engine.api.request import FinishReason, Request
from gpu_engine.core.cpu_executor import cpu_executor
from gpu_engine.core.draft_budget import DraftBudget, Plan, Proposal, Shape
from gpu_engine.core.engine import Engine
from gpu_engine.core.executor import Executor
from gpu_engine.sidecar.client import GrammarClient
from gpu_engine.sidecar.link import GrammarLink, GrammarSetup
from gpu_engine.sidecar.supervisor import Sidecar, grammar_command
from grammar_service.config import GrammarConfig
from shared_mem.channel import EngineEnd
from shared_mem.layout import Layout
from shared_mem.segment import Segment
from tools.simulation import workload
from tools.simulation.event_loop import SimLoop
from tools.simulation.faults import Faults
from tools.simulation.grammar_process import Machine
from tools.simulation.model import EOS, VOCAB, ToyModel, tokenizer_json, toy_model
from tools.simulation.plane import SimEngineEnd
from tools.simulation.threads import SimThreads
from tools.simulation.wire import SimChannel
from tools.simulation.workload import Client
from tools.simulation.world import START_NS, Process, World

START_S = 30.0
PATIENCE_S = 300.0
"""Virtual time from the last fault to the end of every request."""
QUIET_S = 30.0
"""Virtual time in which everything must be given back after the last request has ended."""
MAX_MODEL_LEN = 96
TENANTS_EACH, TENANTS_AT = 10, 4
"""Of so many seeds one has tenants: each whose remainder is this."""


class EveryDraft(DraftBudget):
    """Verifies every draft: what a step costs must not depend on a real clock."""

    def choose(self, proposals: Sequence[Proposal], shapes: Sequence[Shape] | None, *, guided: bool) -> Plan:
        """See `DraftBudget`."""
        share = 1 << 30 if shapes is None else shapes[-1].rows_per_lane - 1
        return Plan(tuple(proposals), tuple(min(share, proposal.most) for proposal in proposals), guided)

    def rows_to_propose(self, plan: Plan, most: int, *, least: int = 1) -> int:
        """See `DraftBudget`."""
        return most

    def observe(self, *args: Any, **kwargs: Any) -> None:
        """Return: times are not learned."""


class WatchedClient(GrammarClient):
    """Counts how often the engine asks one grammar process for the matcher of one owner of a slot."""

    def attach(self, engine: GrammarEvents, link: GrammarLink) -> None:
        """See `GrammarClient`."""
        super().attach(engine, link)
        self._attachment: Callable[[], int] = lambda: link.attached
        self.opened: Counter[tuple[int, int, int]] = Counter()
        """(slot, slot_gen, number of the process) -> calls of `open`."""

    def open(
        self,
        slot: int,
        slot_gen: int,
        request: Request,
        committed: tuple[int, ...],
        dead_texts: tuple[bytes, ...] = (),
    ) -> None:
        """See `GrammarClient`."""
        self.opened[slot, slot_gen, self._attachment()] += 1
        super().open(slot, slot_gen, request, committed, dead_texts)


class Answer(NamedTuple):
    """The tokens of a request, and how it ended; None: with an error, or because its client left."""

    tokens: tuple[int, ...]
    finish: FinishReason | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run."""

    seed: int
    problems: tuple[str, ...]
    trace: str
    steps: int
    points: int
    virtual_s: float
    happened: tuple[str, ...]
    ends: tuple[str, ...]
    """How each request ended."""
    answers: tuple[tuple[int, Answer], ...] = field(repr=False)
    """The number of each request's kind, and its answer."""
    lines: tuple[str, ...] = field(repr=False)
    """The end of the trace."""

    @property
    def ok(self) -> bool:
        """True: the run found no problem."""
        return not self.problems


class Simulation:
    """Both processes of one run, in its own world."""

    def __init__(self, seed: int, plans: Sequence[workload.Plan] | None, *, faulty: bool) -> None:
        self.world = world = World(seed)
        random = world.random
        self.directory = Path(tempfile.mkdtemp(prefix="lockstep-simulation-"))
        self.process = Process(world, "engine")
        self.loop = SimLoop(self.process)  # type: ignore[abstract]  # it has what the two processes use
        self.faults = Faults.drawn(world) if faulty else Faults(world)
        self.come_and_go = faulty and random.random() < 0.4
        self.plans = workload.drawn(random, come_and_go=self.come_and_go) if plans is None else list(plans)
        tenants = faulty and seed % TENANTS_EACH == TENANTS_AT
        if tenants:
            # Of other random numbers, so that no other draw depends on it.
            self.plans = workload.beside_flood(self.plans, Random(f"flood {seed}"))
        self.config = _engine_config(random, plain=not faulty)
        self.server_config = ServerConfig(grammar_wait_s=30.0, compile_timeout_s=2.0)
        self.grammar_threads = random.choice((1, 2, 3))
        grammar_config = GrammarConfig(
            dir=str(self.directory),
            threads=self.grammar_threads,
            compile_workers=2,
            compile_timeout_s=2.0,
            compile_priority=random.choice(("low", "idle")),
        )
        if tenants:
            grammar_config = replace(grammar_config, compile_queue=workload.COMPILE_QUEUE)
        compiled = self.directory / "compiled"
        self.machine = Machine(world, self.loop, grammar_config, compiled, self.faults)
        self.model: ToyModel = toy_model(MAX_MODEL_LEN)
        small = {"num_recs": 2} if faulty and random.random() < 0.25 else {}
        layout = Layout(self.config.max_batch_size, self.config.num_rows, VOCAB, generation=7, **small)
        self.faults.may_lose_matchers |= bool(small)
        self.segment = Segment.create(layout)
        self.channel = SimEngineEnd(self.segment, world)
        self.clients = self._clients_of("r", self.plans)
        self.probes: list[Client] = []
        self.engine: Engine
        self.client: WatchedClient
        self.link: GrammarLink
        self.sidecar: Sidecar
        self.background: list[asyncio.Task[Any]] = []
        self.started = self.closed = False

    # -- on the engine's event loop ----------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Build the engine process, as `gpu_engine.server` and `gpu_engine.sidecar.process` do, and start it."""
        machine, clock = self.machine, self.loop.time
        self.sidecar = Sidecar(
            grammar_command(self.server_config, self.directory),
            self._give_up,
            memory_mb=self.server_config.grammar_memory_mb,
            max_failures=self.server_config.grammar_max_failures,
            cool_down_s=self.server_config.grammar_retry_s,
            start=machine.start,
            memory_mb_of=self.faults.memory_mb,
            clock=clock,
        )
        self.background.append(self.loop.create_task(self.sidecar.run(), name="sidecar"))
        self.client = WatchedClient(self.server_config, self.channel)
        hand_over: Any = machine.hand_over(self.segment)  # a simulated socket has what the link uses
        setup = GrammarSetup(tokenizer_json(), VOCAB, (EOS,), self.segment.layout.generation)
        self.link = GrammarLink(
            self.directory,
            setup,
            hand_over,
            self.client,
            self.channel,
            silence_s=self.server_config.grammar_silence_s,
            on_stuck=self.sidecar.kill,
            on_attached=self.sidecar.attached,
            was_attached=lambda: self.sidecar.was_attached,
            open_channel=self._open_channel,
            clock=clock,
        )
        self.engine = Engine(
            self.config, self.model, self.channel, self.client, self._build_executor, threads=SimThreads(self.process)
        )
        await asyncio.to_thread(self.engine.start)
        self.client.attach(self.engine, self.link)
        self.sidecar.progress = lambda: self.engine.grammar_progress
        self.sidecar.on_outside_end = self.engine.forgive_grammar_end
        self.background.append(self.loop.create_task(self.link.run(), name="link"))
        if self.come_and_go:
            self.faults.on_slow = self._abort_any
        self.faults.start(
            machine.directory,
            lambda: machine.listening,
            self.loop.call_later,
            was_attached=lambda: self.sidecar.was_attached,
        )
        self.send(self.clients)
        self.started = True

    def _open_channel(self, _: Path) -> Any:
        return SimChannel(self.world, self.loop, self.machine.server, self._call_passes)

    def _call_passes(self, name: str, request: Any) -> None:
        """Have some clients leave at the moments when messages about them are under way."""
        if self.come_and_go and name in ("Compile", "Bind") and self.world.chance(0.15):
            self._abort_any(self.world.random.choice((0.0, 0.0003, 0.003)), getattr(request, "request_id", ""))

    def _abort_any(self, within_s: float, name: str = "") -> None:
        """Abort the request of this name, or any that is not over, within so many seconds."""
        found = [client for client in self.clients if not client.over and name in ("", client.name)]
        if found:
            client = self.world.random.choice(found)
            self.loop.call_later(self.world.between(0, within_s), client.abort, self.engine)

    def _clients_of(self, name: str, plans: Sequence[workload.Plan]) -> list[Client]:
        drafts = self.config.num_draft_tokens
        return [Client(plan, f"{name}{number}", drafts, self.world) for number, plan in enumerate(plans)]

    def send(self, clients: Sequence[Client]) -> None:
        """Let clients begin."""
        for client in clients:
            _ = self.loop.create_task(client.run(self.engine, self.client), name=client.name)

    def probe(self) -> list[Client]:
        """End the faults and send requests that must be answered."""
        self.faults.disarm()
        self.probes = self._clients_of("probe", workload.probes())
        self.send(self.probes)
        return self.probes

    def _give_up(self, reason: str) -> None:
        self.client.give_up(reason)

    def _build_executor(
        self, config: EngineConfig, model: Any, channel: EngineEnd | None, num_pages: int, max_inflight_steps: int
    ) -> Executor:
        executor = cpu_executor(config, model, channel, num_pages, max_inflight_steps)
        executor.runner.budget = EveryDraft()
        counts = tuple(range(1, config.max_batch_size + 1))
        return replace(
            executor, warm_up=partial(executor.sync.reserve, counts), enter=lambda: None, prefill=self._timed(executor)
        )

    def _timed(self, executor: Executor) -> Callable[..., None]:
        """Return the prefill with a point after it: a chunk takes time."""

        def prefill(chunks: Any) -> None:
            executor.prefill(chunks)
            self.world.point("engine prefilled")

        return prefill

    async def close(self) -> None:
        """Close everything in the order of `gpu_engine.server`."""
        await asyncio.to_thread(self.engine.close)
        await self.client.aclose()
        for task in reversed(self.background):
            task.cancel()
            await asyncio.wait([task])
        self.closed = True

    def __repr__(self) -> str:
        return f"<Simulation {self.world} {self.faults}>"


def _engine_config(random: Random, *, plain: bool) -> EngineConfig:
    """Draw the configuration of the engine."""
    drafts = 0 if plain else random.choice((0, 3, 7))
    tight = not plain and random.random() < 0.4
    slots = 4 if plain else random.choice((2, 3, 5))
    return EngineConfig(
        device="cpu",
        dtype="float32",
        num_threads=1,
        max_batch_size=slots,
        max_model_len=MAX_MODEL_LEN,
        page_size=16,
        kv_cache_tokens=MAX_MODEL_LEN if tight else 0,
        max_batched_tokens=16,
        drafter="ngram" if drafts else "none",
        num_draft_tokens=drafts,
        jump_forward_tokens=random.choice((0, drafts)),
        overlap=None,
    )


def simulate(seed: int, *, plans: Sequence[workload.Plan] | None = None, faulty: bool = True) -> Outcome:
    """Run one seed and check it.

    Args:
        seed: of everything.
        plans: the requests; None: drawn.
        faulty: faults are drawn, and the engine's configuration varies.
    """
    before = _descriptors()
    outcome = _simulate(seed, plans, faulty=faulty)
    gc.collect()  # a mapping ends with its last view, and views and tasks refer to each other
    if outcome.ok and (left := _descriptors() - before):
        return replace(outcome, problems=(f"descriptors are left: {sorted(left)}",))
    return outcome


@contextlib.contextmanager
def many_runs() -> Iterator[None]:
    """Inside of the block the collector looks only at the objects of runs, when a run is over."""
    torch.set_num_threads(1)
    references()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _simulate(seed: int, plans: Sequence[workload.Plan] | None, *, faulty: bool) -> Outcome:
    simulation = Simulation(seed, plans, faulty=faulty)
    world = simulation.world
    try:
        _drive(simulation, references() if faulty else None)
    except Exception:
        world.complain(f"the run broke: {traceback.format_exc()}")
    finally:
        for child in simulation.machine.processes:
            child.process.end(-9)
        trace, lines = world.trace, tuple(world.lines)
        world.close()
        for loop in (*(child.loop for child in simulation.machine.processes), simulation.loop):
            loop.discard()
        simulation.segment.close()
        shutil.rmtree(simulation.directory, ignore_errors=True)
    return Outcome(
        seed,
        tuple(world.problems),
        trace,
        world.steps,
        world.points,
        (world.now_ns - START_NS) / 1e9,
        tuple(simulation.faults.happened),
        tuple(map(repr, simulation.clients)),
        tuple((each.plan.kind.number, Answer(tuple(each.tokens), each.finish)) for each in simulation.clients),
        lines,
    )


def _drive(simulation: Simulation, expected: dict[int, Answer] | None) -> None:
    world, loop = simulation.world, simulation.loop
    _ = loop.create_task(simulation.serve(), name="serve")
    if not world.run(lambda: simulation.started, limit_s=START_S):
        world.complain("the engine did not start")
        return
    if not _answers(simulation, simulation.clients, expected):
        return
    if expected is not None:
        # A supervisor that has given up tries again after its cool-down.
        world.run(lambda: simulation.link.up, limit_s=2 * simulation.server_config.grammar_retry_s)
        if not _answers(simulation, simulation.probe(), expected):
            return
    simulation.engine.check_integrity()
    _ = loop.create_task(simulation.close(), name="close")
    if not world.run(lambda: simulation.closed, limit_s=QUIET_S):
        world.complain("the engine process did not close")
    elif left := [task.get_name() for task in loop.tasks if not task.done() and task.get_name() != "close"]:
        world.complain(f"tasks are left: {left}")


def _answers(simulation: Simulation, clients: Sequence[Client], expected: dict[int, Answer] | None) -> bool:
    """Run until the clients have their answers, check these, and see that nothing is left of them."""
    world = simulation.world
    if not world.run(lambda: all(client.over for client in clients), limit_s=PATIENCE_S):
        world.complain(f"neither ended nor went on: {[client for client in clients if not client.over]}")
        return False
    if expected is not None:
        check_answers(simulation, clients, expected)
        check_matchers(simulation)
        check_silence(simulation)
    if not world.problems and not _becomes_quiet(simulation):
        world.complain(f"left over: {_left_behind(simulation)}")
    return not world.problems


def check_answers(simulation: Simulation, clients: Sequence[Client], expected: dict[int, Answer]) -> None:
    """Compare each answer with the undisturbed one; an error needs a fault that justifies it."""
    world, justified = simulation.world, simulation.faults.justified
    for client in clients:
        right, got = expected[client.plan.kind.number], tuple(client.tokens)
        if got != right.tokens[: len(got)]:
            world.complain(f"{client} got {got}, undisturbed are {right.tokens}")
        if client.events_after_end:
            world.complain(f"{client} got {client.events_after_end} events after its last one")
        if client.left:
            continue
        if client.error is not None:
            refused = client.plan.kind.refused and isinstance(client.error, InvalidRequest)
            # No fault fills the queue: only the tenant that floods it may be refused.
            full = isinstance(client.error, LimitExceeded) and "compile_queue:" in str(client.error)
            if full and not client.plan.floods:
                world.complain(f"{client} found the queue of compilations full")
            elif not refused and not full and type(client.error).__name__ not in justified:
                world.complain(f"{client} ended without a fault that justifies it: {client.error}")
        elif client.finish is FinishReason.ABORTED:
            if not client.aborted:
                world.complain(f"{client} was aborted, and no client asked for that")
        elif (got, client.finish) != right and (client.finish is None or client.finish.name not in justified):
            world.complain(f"{client} ended with {got} {client.finish}, undisturbed are {right}")


def check_silence(simulation: Simulation) -> None:
    """See that the grammar process showed life all the time, and that one was enough, where only rows were slow."""
    if simulation.faults.hold_one_thread_each(simulation.grammar_threads):
        silences, starts = simulation.link.silences, len(simulation.machine.processes)
        if silences or starts > 1:
            simulation.world.complain(f"{silences} silences and {starts} processes, while only rows were slow")


def check_matchers(simulation: Simulation) -> None:
    """See that no matcher was lost and built again by the same process, unless a fault justifies that."""
    if simulation.faults.may_lose_matchers:
        return
    for (slot, slot_gen, process), count in simulation.client.opened.items():
        if count > 1:
            what = f"the matcher of slot {slot}.{slot_gen} was lost and built again {count - 1} times"
            simulation.world.complain(f"{what} by process {process}, without a fault that justifies it")


def _becomes_quiet(simulation: Simulation) -> bool:
    """Run until the ended requests hold nothing; look at growing intervals."""
    slice_s, world = 0.001, simulation.world
    while slice_s < QUIET_S and not world.problems:
        if not _left_behind(simulation):
            return True
        world.run(lambda: False, limit_s=slice_s)
        slice_s *= 1.3
    return False


def _left_behind(simulation: Simulation) -> list[str]:
    """Return what the ended requests still hold."""
    engine, left = simulation.engine._loop, []
    if engine.sequences or engine.live or engine.scheduler.running:
        left.append(f"sequences: {engine.sequences}, counted {engine.live}, running {engine.scheduler.running}")
    if engine.allocator.num_used:
        left.append(f"{engine.allocator.num_used} pages")
    if simulation.client._slots:
        left.append(f"slots of the client: {list(simulation.client._slots)}")
    if simulation.client._tasks._tasks:
        left.append(f"tasks: {simulation.client._tasks!r}")
    if simulation.client._compiler._tickets:
        left.append("tickets of the compiler")
    child = simulation.machine.listening
    if simulation.link.up and simulation.channel.aborted:
        left.append("the abort word")
    worker = child.servicer._worker if child is not None else None
    if worker is not None and worker._table.slots:
        left.append(f"matchers: {worker._table.slots}")
    return left


@cache
def references() -> dict[int, Answer]:
    """Return the undisturbed tokens of every kind of request: one after the other, no faults, no drafts."""
    plans = [workload.Plan(kind, at_s=2.0 * kind.number) for kind in workload.kinds()]
    outcome = simulate(0, plans=plans, faulty=False)
    if not outcome.ok:
        raise AssertionError(f"the undisturbed run failed: {outcome.problems}")
    return dict(outcome.answers)


def _descriptors() -> set[str]:
    """Return the open descriptors, and what each is."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.add(f"{name}: {os.readlink(f'/proc/self/fd/{name}')}")
    return found
