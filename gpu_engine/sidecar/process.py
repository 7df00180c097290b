"""The way to the grammar process, put together: its supervisor, the segment, the client and the link.

The invariant: it is built around the model and the engine in three calls, and what it opens is closed by the exit stack
in the opposite order: client, link, process, segment. Not here: what any of the pieces does.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.api.errors import LockstepError
from gpu_engine.api.ports import Model, ServedEngine
from gpu_engine.api.request import GrammarKind, GrammarSpec
from gpu_engine.sidecar.client import GrammarClient
from gpu_engine.sidecar.link import GrammarLink, GrammarSetup, segment_hand_over
from gpu_engine.sidecar.supervisor import SPIN_ALWAYS_US, Sidecar, grammar_command
from shared_mem.channel import EngineEnd
from shared_mem.layout import Layout
from shared_mem.segment import Segment

log = logging.getLogger(__name__)

DIRECTORY_PREFIX = "lockstep-engine-"
WARM_UP = GrammarSpec(GrammarKind.REGEX, "a")
"""A small grammar: who has compiled it has what a first request needs."""
TELL_EVERY_S = 0.1
CORES_TO_SPIN = 3
"""The engine's thread, what waits for clients, and the grammar process."""
_LOOKS = 3
"""So many in a row find a process asleep that sleeps between steps."""
FRESH_S = 60.0
"""A directory this young may be one that its owner has not locked yet."""


class GrammarProcess:
    """Construction starts a spawned process; `share` needs the model; `attach` needs the engine."""

    def __init__(
        self,
        config: ServerConfig,
        background: asyncio.TaskGroup,
        stack: AsyncExitStack,
        *,
        must_spin: bool = False,
        compile_idle: bool = False,
    ) -> None:
        """Args: `must_spin` where steps are posted by a device, which cannot wake a process that sleeps; `compile_idle`
        where it shares its cores with the event loop, and compilations give way to both."""
        self.config, self._must_spin = config, must_spin
        self.directory = _grammar_directory(config, stack)
        self.sidecar: Sidecar | None = None
        self.channel: EngineEnd
        self.client: GrammarClient
        self._background = background
        self._link: GrammarLink
        self._attached = False
        self._sidecar_task: asyncio.Task[None] | None = None
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
            # In front of its directory, which one that lives would make again: a start may fail before `share`.
            stack.push_async_callback(self._end_sidecar)

    def share(self, stack: AsyncExitStack, engine_config: EngineConfig, model: Model) -> None:
        """Make the segment and the client, which the engine is built with."""
        layout = Layout(
            num_slots=engine_config.max_batch_size,
            num_rows=engine_config.num_rows,
            vocab_size=model.vocab_size,
            # A grammar process that outlives engines tells their segments apart by this number.
            generation=time.time_ns(),
        )
        segment = stack.enter_context(Segment.create(layout))
        stack.push_async_callback(self._end_sidecar)  # in front of the segment, too; whichever comes first ends it
        self.channel = EngineEnd(segment)
        self.client = GrammarClient(self.config, self.channel)
        setup = GrammarSetup(
            tokenizer_json=model.tokenizer.backend_tokenizer.to_str().encode(),
            vocab_size=model.vocab_size,
            stop_token_ids=model.eos_token_ids,
            generation=layout.generation,
        )
        self._link = GrammarLink(
            self.directory,
            setup,
            segment_hand_over(segment),
            self.client,
            self.channel,
            silence_s=self.config.grammar_silence_s,
            on_stuck=self.sidecar.kill if self.sidecar else lambda: None,
            on_attached=self.sidecar.attached if self.sidecar else lambda: None,
        )
        stack.push_async_callback(self.client.aclose)

    def attach(self, stack: AsyncExitStack, engine: ServedEngine) -> None:
        """Start to connect."""
        self.client.attach(engine, self._link)
        self._attached = True
        if self.sidecar:
            self.sidecar.progress = lambda: engine.grammar_progress
            self.sidecar.forgive = engine.forgive_grammar_end
        stack.push_async_callback(end_task, self._background.create_task(self._link.run(), name="grammar link"))
        if self._must_spin:
            watch = warn_of_sleepers(lambda: self.client.guided_by, self.channel)
            stack.push_async_callback(end_task, self._background.create_task(watch, name="sleeping sidecar watch"))
        if self.sidecar and self.sidecar.gave_up:
            self._give_up(self.sidecar.gave_up)

    async def first_attachment(self) -> None:
        """Wait until the grammar process is warm, in bounds: unguided requests can be served without it."""
        try:
            async with asyncio.timeout(self.config.grammar_wait_s):
                await self._link.ready(self.config.grammar_wait_s)
                await self.client.compile(WARM_UP)
        except (LockstepError, TimeoutError) as error:
            why = str(error) or f"nothing answered within {self.config.grammar_wait_s:g} s (grammar_wait_s)"
            hint = "" if self.sidecar else "; one serves one engine at a time: is another attached?"
            log.warning("serving before the grammar process is ready for guided requests: %s%s", why, hint)

    async def tell(self, serves: Callable[[bool], Awaitable[None]]) -> None:
        """Tell, now and at every change, whether guided requests are served. Runs for ever."""
        told: bool | None = None
        while True:
            if self.client.serves is not told:
                told = self.client.serves
                await serves(told)
            await asyncio.sleep(TELL_EVERY_S)

    @property
    def attachments(self) -> int:
        """How many times a grammar process was attached."""
        return self._link.attached

    @property
    def silences(self) -> int:
        """How often an attached one was found silent."""
        return self._link.silences.count

    @property
    def refused_early(self) -> int:
        """How many grammars were refused before they were sent."""
        return self.client.admission.refused

    @property
    def process_starts(self) -> int:
        """How many times one was started by us."""
        return self.sidecar.starts if self.sidecar else 0

    async def metrics(self, timeout_s: float) -> bytes | None:
        """Ask for its metrics; None while it does not answer."""
        return await self.client.metrics(timeout_s)

    async def _end_sidecar(self) -> None:
        task = self._sidecar_task
        if task is None or task.done():
            return
        if not task.cancelling():  # one that is, by its group say, ends its child by now, and is to be left to it
            task.cancel()
        await asyncio.wait([task])

    def _give_up(self, reason: str) -> None:
        if self._attached:  # else `attach` finds it in the sidecar
            self.client.give_up(reason)

    def __repr__(self) -> str:
        return f"<GrammarProcess {self.config.grammar} {self.directory} {self.sidecar!r}>"


def resolved_sync(engine_config: EngineConfig, server_config: ServerConfig, cores: int) -> str:
    """Return what "auto" stands for: flags of the device, where a grammar process of ours can spin on its own core.

    A host function costs a step some 75 microseconds for each post and await, and such flags less than 20
    (docs/log.md), but they wake nobody who sleeps.
    """
    if engine_config.sync != "auto" or engine_config.device == "cpu":
        return engine_config.sync
    return "device_flag" if server_config.grammar == "spawn" and cores >= CORES_TO_SPIN else "host_callback"


class Sleeper(Protocol):
    """Who may sleep; an EngineEnd tells it of the grammar process."""

    @property
    def grammar_parked(self) -> bool:
        """It sleeps on a futex, waiting for a step."""


async def warn_of_sleepers(grammar_slots: Callable[[], int], sleeper: Sleeper, every_s: float = 0.1) -> None:
    """Warn once for every grammar process that sleeps between guided steps, though a device posts them. Runs for ever.

    Args:
        guides: number of the grammar process that has a matcher; 0: it has none, only compiles, say, and may sleep.
        sleeper: of that process.
        every_s: it is looked at so often. One look is not enough: it wakes a moment after its first matcher is bound.
    """
    warned = asleep = 0
    while True:
        await asyncio.sleep(every_s)
        current = grammar_slots()
        asleep = asleep + 1 if current > warned and sleeper.grammar_parked else 0
        if asleep == _LOOKS:
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


def _grammar_directory(config: ServerConfig, stack: AsyncExitStack) -> Path:
    if config.grammar_dir:
        return Path(config.grammar_dir)
    return private_directory(stack, Path(tempfile.gettempdir()))


def private_directory(stack: AsyncExitStack, parent: Path) -> Path:
    """Make a directory that goes with `stack`; remove those of engines that were killed before theirs did.

    The owner holds a lock on it, which the kernel drops at its death however it dies.
    """
    _sweep(parent)
    path = Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX, dir=parent))
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    stack.callback(os.close, lock)
    stack.callback(shutil.rmtree, path, ignore_errors=True)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return path


def _sweep(parent: Path) -> None:
    for path in parent.glob(DIRECTORY_PREFIX + "*"):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # gone meanwhile, no directory, or another user's
            continue
        try:
            status = os.fstat(lock)
            if status.st_uid != os.getuid() or time.time() < status.st_mtime + FRESH_S:
                continue
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            log.info("removing %s, which a killed engine left", path)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            continue  # its owner lives
        finally:
            os.close(lock)
