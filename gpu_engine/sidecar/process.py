"""Assembles the engine's side of the grammar process: supervisor, segment, client and link.

Invariant: the parts are built in three calls around the model and the engine, and the exit stack closes them in the
opposite order: client, link, process, segment. A spawned process may be given the vocabulary before; that only saves
time, since an equal vocabulary changes nothing later.

Not responsible for: the behaviour of the parts (see supervisor.py, client.py, link.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.api.errors import LockstepError
from gpu_engine.api.ports import Model, ServedEngine, Tokenizer, Vocabulary
from gpu_engine.api.request import GrammarKind, GrammarSpec
from gpu_engine.sidecar.client import GrammarClient
from gpu_engine.sidecar.early import prepare
from gpu_engine.sidecar.link import GrammarLink, GrammarSetup, segment_hand_over
from gpu_engine.sidecar.supervisor import SPIN_ALWAYS_US, Sidecar, grammar_command
from shared_mem.channel import EngineEnd
from shared_mem.layout import Layout
from shared_mem.segment import Segment

log = logging.getLogger(__name__)

WARM_UP = GrammarSpec(GrammarKind.REGEX, "a")
"""A small grammar: a process that has compiled it has loaded what a first request needs."""
REPORT_EVERY_S = 0.1
CORES_TO_SPIN = 3
"""One each for the engine's thread, the event loop, and the grammar process."""
_CHECKS = 3
"""A process that is asleep at this many checks in a row sleeps between steps."""


class GrammarProcess:
    """The constructor starts a spawned process; then `share` needs the model, and `attach` the engine."""

    def __init__(
        self,
        config: ServerConfig,
        directory: Path,
        background: asyncio.TaskGroup,
        stack: AsyncExitStack,
        *,
        must_spin: bool = False,
        compile_idle: bool = False,
    ) -> None:
        """Args: see below.

        directory: holds the sockets of the grammar process; outlives this object (see directory.py).
        must_spin: the grammar process never sleeps while it waits for a step: a device posts, and cannot wake it.
        compile_idle: the grammar process shares its cores with the event loop, and compiles when both are idle.
        """
        self.config, self._must_spin = config, must_spin
        self.directory = directory
        self.sidecar: Sidecar | None = None
        self.channel: EngineEnd
        self.client: GrammarClient
        self._background = background
        self._link: GrammarLink
        self._attached = False
        self._sidecar_task: asyncio.Task[None] | None = None
        self._encoded: tuple[Tokenizer, bytes] | None = None
        self._prepared: GrammarSetup | None = None
        self._preparing: list[asyncio.Task[None]] = []
        if config.grammar == "spawn":
            command = grammar_command(config, self.directory, must_spin=must_spin, compile_idle=compile_idle)
            self.sidecar = Sidecar(
                command,
                self._give_up,
                memory_mb=config.grammar_memory_mb,
                max_failures=config.grammar_max_failures,
                cool_down_s=config.grammar_retry_s,
            )
            self._sidecar_task = background.create_task(self.sidecar.run(), name="sidecar")
            # Ends the process before its directory is removed, also when the start fails before `share`: a running
            # process would make the directory again.
            stack.push_async_callback(self._end_sidecar)
            stack.push_async_callback(self._end_preparing)

    def setup_of(self, vocabulary: Vocabulary, generation: int = 0) -> GrammarSetup:
        """Return what the process is configured with. The tokenizer becomes JSON once. One thread at a time."""
        if self._encoded is None or self._encoded[0] is not vocabulary.tokenizer:
            self._encoded = vocabulary.tokenizer, vocabulary.tokenizer.backend_tokenizer.to_str().encode()
        return GrammarSetup(self._encoded[1], vocabulary.vocab_size, vocabulary.eos_token_ids, generation)

    def prepare(self, setup: GrammarSetup) -> None:
        """Have a spawned process read a vocabulary and compile a first grammar, before the engine is there. An equal
        setup changes nothing."""
        if self.sidecar is not None and setup.stop_token_ids and setup != self._prepared:
            self._prepared = setup
            preparing = prepare(self.directory, setup, WARM_UP)
            self._preparing.append(self._background.create_task(preparing, name="prepare the grammar process"))

    def share(self, stack: AsyncExitStack, engine_config: EngineConfig, model: Model) -> None:
        """Make the segment and the client; the engine is built with both."""
        layout = Layout(
            num_slots=engine_config.max_batch_size,
            num_rows=engine_config.num_rows,
            vocab_size=model.vocab_size,
            # A grammar process that outlives its engine tells the segments of engines apart by this number.
            generation=time.time_ns(),
        )
        segment = stack.enter_context(Segment.create(layout))
        stack.push_async_callback(self._end_sidecar)  # before the segment is closed; the first of the two calls ends it
        self.channel = EngineEnd(segment)
        self.client = GrammarClient(self.config, self.channel)
        sidecar = self.sidecar
        self._link = GrammarLink(
            self.directory,
            self.setup_of(model, layout.generation),
            segment_hand_over(segment),
            self.client,
            self.channel,
            silence_s=self.config.grammar_silence_s,
            on_stuck=sidecar.kill if sidecar else lambda: None,
            on_attached=sidecar.attached if sidecar else lambda: None,
            was_attached=lambda: sidecar is not None and sidecar.was_attached,
        )
        stack.push_async_callback(self.client.aclose)

    def attach(self, stack: AsyncExitStack, engine: ServedEngine) -> None:
        """Start to connect to the grammar process."""
        self.client.attach(engine, self._link)
        self._attached = True
        if self.sidecar:
            self.sidecar.progress = lambda: engine.grammar_progress
            self.sidecar.on_outside_end = engine.forgive_grammar_end
        stack.push_async_callback(end_task, self._background.create_task(self._link.run(), name="grammar link"))
        if self._must_spin:
            watch = warn_of_sleepers(lambda: self.client.guided_by, self.channel)
            stack.push_async_callback(end_task, self._background.create_task(watch, name="sleeping sidecar watch"))
        if self.sidecar and self.sidecar.gave_up:
            self._give_up(self.sidecar.gave_up)

    async def first_attachment(self) -> None:
        """Wait until the grammar process is warm, for at most `grammar_wait_s`; log a warning when it is not.

        Unguided requests can be served without it.
        """
        try:
            async with asyncio.timeout(self.config.grammar_wait_s):
                await self._link.ready(self.config.grammar_wait_s)
                await self.client.compile(WARM_UP)
        except (LockstepError, TimeoutError) as error:
            why = str(error) or f"nothing answered within {self.config.grammar_wait_s:g} s (grammar_wait_s)"
            hint = "" if self.sidecar else "; one serves one engine at a time: is another attached?"
            log.warning("serving before the grammar process is ready for guided requests: %s%s", why, hint)

    async def report(self, serves: Callable[[bool], Awaitable[None]]) -> None:
        """Report, now and at every change, whether guided requests are served. Runs for ever."""
        reported: bool | None = None
        while True:
            if self.client.serves is not reported:
                reported = self.client.serves
                await serves(reported)
            await asyncio.sleep(REPORT_EVERY_S)

    @property
    def attachments(self) -> int:
        """Number of times that a grammar process was attached."""
        return self._link.attached

    @property
    def silences(self) -> int:
        """Number of times that an attached process was found silent."""
        return self._link.silences

    @property
    def refused_early(self) -> int:
        """Number of compilations that were refused before they were sent."""
        return self.client.admission.refused

    @property
    def process_starts(self) -> int:
        """Number of times that this engine started a process."""
        return self.sidecar.starts if self.sidecar else 0

    async def metrics(self, timeout_s: float) -> bytes | None:
        """Return the grammar process's metrics in Prometheus' text format; None while it does not answer."""
        return await self.client.metrics(timeout_s)

    async def _end_preparing(self) -> None:
        for task in self._preparing:
            await end_task(task)

    async def _end_sidecar(self) -> None:
        task = self._sidecar_task
        if task is None or task.done():
            return
        if not task.cancelling():  # a task that its group has cancelled ends its child already
            task.cancel()
        await asyncio.wait([task])

    def _give_up(self, reason: str) -> None:
        if self._attached:  # else `attach` reads `Sidecar.gave_up`
            self.client.give_up(reason)

    def __repr__(self) -> str:
        return f"<GrammarProcess {self.config.grammar} {self.directory} {self.sidecar!r}>"


def resolved_sync(engine_config: EngineConfig, server_config: ServerConfig, cores: int) -> str:
    """Return the sync mode, "auto" resolved: device flags where a spawned grammar process can spin on its own core.

    A host function costs a step about 75 microseconds for each post and await, device flags less than 20 (docs/log/);
    but device flags cannot wake a process that sleeps.
    """
    if engine_config.sync != "auto" or engine_config.device == "cpu":
        return engine_config.sync
    return "device_flag" if server_config.grammar == "spawn" and cores >= CORES_TO_SPIN else "host_callback"


class Sleeper(Protocol):
    """Shows whether the grammar process sleeps; `EngineEnd` implements this."""

    @property
    def grammar_parked(self) -> bool:
        """The grammar process sleeps on a futex, waiting for a step."""


async def warn_of_sleepers(serving: Callable[[], int], sleeper: Sleeper, every_s: float = 0.1) -> None:
    """Warn once about each grammar process that sleeps between guided steps though a device posts them. Runs for ever.

    Args:
        serving: returns the number of the grammar process that has a matcher; 0: none has, and it may sleep.
        sleeper: shows whether that process sleeps.
        every_s: interval of the checks. One check is not enough: the process wakes a moment after its first bind.
    """
    warned = asleep = 0
    while True:
        await asyncio.sleep(every_s)
        current = serving()
        asleep = asleep + 1 if current > warned and sleeper.grammar_parked else 0
        if asleep == _CHECKS:
            warned, asleep = current, 0
            log.warning(
                "the grammar process sleeps between steps, and with sync=device_flag nothing wakes it: a guided step "
                "may wait 10 ms for it. Start it with --spin-us %g",
                SPIN_ALWAYS_US,
            )


async def end_task(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end."""
    task.cancel()
    await asyncio.wait([task])
