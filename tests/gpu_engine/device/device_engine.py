"""A whole engine whose device is a recorded stream: the kernels run in Triton's interpreter, on CPU tensors.

Torch operations are traced at the capture and repeated by replays (see recorded_stream.py). A Triton kernel computes
with numpy, which the trace does not see, so its launches are marked `opaque`: a replay calls them again with the
arguments of the capture.
Not responsible for: expected tokens, which come from an engine on a CPU (see device_requests.on_cpu).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest

from gpu_engine.api.config import EngineConfig
from gpu_engine.core.device_executor import device_executor
from gpu_engine.core.engine import Engine
from gpu_engine.core.executor import Executor
from gpu_engine.core.hooks import NO_HOOKS, EngineHooks
from gpu_engine.drafters.build import Builder
from gpu_engine.model.loader import LoadedModel
from gpu_engine.step.device.syncs import DeviceFlagSync, HostCallbackSync
from gpu_engine.step.device.triton_launches import TritonLaunches
from shared_mem.channel import EngineEnd, Record
from shared_mem.layout import Layout
from shared_mem.segment import Segment
from tests.gpu_engine.device.fake_flags import FakeFlags
from tests.gpu_engine.device.happens_before import Watch
from tests.gpu_engine.device.recorded_stream import RecordedStream, is_capturing, opaque
from tests.gpu_engine.harness import PATIENCE_S, Answer, running
from tests.gpu_engine.toy_sidecar import ToyGrammar
from tests.kernels.checked_interpreter import warm_up


@contextmanager
def opaque_launches() -> Iterator[None]:
    """Make a capture record each launch of the interpreter as a native kernel."""
    from triton.runtime.interpreter import GridExecutor

    launch, one = GridExecutor.__call__, threading.Lock()

    def alone(self: GridExecutor, *args: object, **kwargs: object) -> None:
        with one:  # the interpreter has one grid for all threads, and streams next to each other have a thread each
            launch(self, *args, **kwargs)

    def recorded(self: GridExecutor, *args: object, **kwargs: object) -> None:
        opaque(alone)(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", recorded)
        yield


@dataclass(eq=False)
class RecordedDevice:
    """Builds executors that run on a recorded stream. Closing the stream ends its thread.

    Without `warms_up` the steps are captured, but the runs over padding before and after the captures are left out.
    They load and choose kernels on a GPU, change nothing here, and take the interpreter four steps for each graph.
    """

    stream: RecordedStream = field(default_factory=RecordedStream)
    warms_up: bool = False
    drafter_builders: Mapping[str, Builder] | None = None

    def build_executor(
        self,
        config: EngineConfig,
        model: LoadedModel,
        channel: EngineEnd | None,
        num_pages: int,
        max_inflight_steps: int,
    ) -> Executor:
        executor = device_executor(
            config,
            model,
            channel,
            num_pages,
            max_inflight_steps,
            stream=self.stream,
            sync=self._sync(config, channel),
            drafter_builders=self.drafter_builders,
        )
        if self.stream.order.active:
            executor = replace(executor, enter=Watch(self.stream.order, ignores=is_capturing).__enter__)
        run = self._warm_up if self.warms_up else self._capture_only
        return replace(executor, warm_up=lambda: run(executor.warm_up))

    def _warm_up(self, run: Callable[[], None]) -> None:
        with warm_up():
            run()  # ends when the device is idle

    def _capture_only(self, run: Callable[[], None]) -> None:
        self.stream.drops = True
        try:
            run()
        finally:
            self.stream.drops = False

    def _sync(self, config: EngineConfig, channel: EngineEnd | None) -> HostCallbackSync | DeviceFlagSync | None:
        if channel is None:
            return None
        flags = FakeFlags(channel)
        launches = TritonLaunches(flags.mask_SRW[None])
        timeouts = {"row_timeout_ms": config.row_timeout_ms, "draft_timeout_ms": config.draft_timeout_ms}
        if config.sync == "device_flag":
            return DeviceFlagSync(self.stream, channel, flags, launches, **timeouts)
        return HostCallbackSync(self.stream, channel, flags.mask_SRW, launches, flags, **timeouts)


@contextmanager
def device_engine(
    model: LoadedModel,
    settings: EngineConfig,
    device: RecordedDevice | None = None,
    hooks: EngineHooks = NO_HOOKS,
) -> Iterator[tuple[Engine, RecordedStream]]:
    """Run an engine without a grammar process."""
    device = device or RecordedDevice()
    model = replace(model, max_model_len=settings.max_model_len)
    try:
        made = Engine(settings, model, build_executor=device.build_executor, hooks=hooks)
        with opaque_launches(), running(made) as engine:
            yield engine, device.stream
    finally:
        device.stream.close()


@contextmanager
def guided_device_engine(
    model: LoadedModel, settings: EngineConfig, device: RecordedDevice | None = None
) -> Iterator[tuple[Engine, ToyGrammar, RecordedStream]]:
    """Run an engine with a toy sidecar; at the end every matcher is closed, and no record broke the protocol."""
    device = device or RecordedDevice()
    model = replace(model, max_model_len=settings.max_model_len)
    with Segment.create(Layout(settings.max_batch_size, settings.num_rows, model.vocab_size)) as segment:
        grammar = ToyGrammar(segment)
        engine = Engine(settings, model, EngineEnd(segment), grammar, build_executor=device.build_executor)
        grammar.engine = engine
        grammar.start_sidecar()
        try:
            with opaque_launches(), running(engine):
                yield engine, grammar, device.stream
            made = {(slot, gen) for slot, gen, _ in grammar.opened} | set(grammar.forks)
            assert made - set(grammar.replaced) == set(grammar.closed)
            assert grammar.sidecar.problems == []
        finally:
            grammar.kill_sidecar()
            device.stream.close()


def after_three_tokens(record: Record) -> bool:
    return record.commit_pos + len(record.committed) >= 3


def answer_over_a_loss(
    engine: Engine,
    grammar: ToyGrammar,
    answers: list[Answer],
    lost: Callable[[Record], bool] = after_three_tokens,
) -> list[list[int]]:
    """Answer while the grammar process is lost in the step of a record, and starts again once free answers that have
    begun are over.

    The record is read and never answered, so the settings need a short `row_timeout_ms`.
    """
    first, thread = grammar.sidecar, grammar._thread

    def die(record: Record) -> None:
        first.stopping |= lost(record)

    first.before = die
    for answer in answers:
        answer.submit(engine)
    thread.join(PATIENCE_S)
    grammar.kill_sidecar()
    engine.grammar_lost()
    for answer in answers:
        if answer.request.grammar is None and answer.tokens:
            answer.wait()
    assert not answers[0].over, "an answer under a grammar pauses"
    grammar.start_sidecar()
    engine.grammar_restored()
    found = [answer.wait().tokens for answer in answers]
    assert first.problems == []
    return found
