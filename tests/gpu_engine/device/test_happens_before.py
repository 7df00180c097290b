"""Accesses that nothing orders are found in runs in which all went well, and so are three faults of engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

from gpu_engine.api.config import EngineConfig
from gpu_engine.core.prefill_graphs import Prefill
from gpu_engine.model.loader import LoadedModel
from tests.gpu_engine.device.device_engine import RecordedDevice, device_engine
from tests.gpu_engine.device.device_requests import INTERPRETED, on_cpu, on_device
from tests.gpu_engine.device.happens_before import Watch, watched_run
from tests.gpu_engine.device.recorded_stream import RecordedEvent, RecordedStream, is_capturing
from tests.gpu_engine.harness import answer_each, ask, executor_of, tokens

pytestmark = INTERPRETED

FAR = torch.device("cuda:1")
OWN = {"draft_device": "cuda:1"}


def decoupled(draft_model: str, fields: dict[str, str]) -> EngineConfig:
    settings = on_device(2, max_batch_size=1)
    return replace(settings, drafter="decoupled", draft_model=draft_model, **fields)  # type: ignore[arg-type]


@pytest.fixture
def stream() -> Iterator[RecordedStream]:
    made = RecordedStream()
    with Watch(made.order, ignores=is_capturing):
        yield made
    made.order.races.clear()  # each test has looked at them
    made.close()


def settle(*streams: RecordedStream) -> None:
    for each in streams:
        each.synchronize()


def add(target: torch.Tensor, source: torch.Tensor) -> None:
    target.add_(source)


def test_streams_without_an_event_between_them_race_where_one_writes(stream: RecordedStream) -> None:
    x, y, z = torch.zeros(8), torch.ones(8), torch.zeros(8)
    beside = stream.beside()

    def next_to(target: torch.Tensor, source: torch.Tensor) -> None:
        with beside.current():
            beside.kernel(add, target, source)

    stream.kernel(add, x, y)
    stream.synchronize()
    next_to(z, y)
    assert (stream.order.compared, stream.order.races) == (0, []), "two reads"
    stream.kernel(add, x[::2], y[::2])
    next_to(x[1::2], y[1::2])
    settle(stream, beside)
    assert stream.order.races == [], "other bytes of the same memory"
    stepped = stream.event()
    stream.kernel(add, x, y)
    stepped.mark()
    beside.after(stepped)
    next_to(z, x)
    settle(beside)
    assert stream.order.races == []
    stream.kernel(add, x, y)
    settle(stream)
    assert stream.order.races == [], "the host has waited for the other one"
    next_to(z, x)
    settle(beside)
    assert stream.order.races == [], "and for this one"
    stream.kernel(add, x, y)
    next_to(z, x)
    settle(beside, stream)
    (race,) = {race.split(" in ")[0].split()[0] for race in stream.order.races}
    assert race == "stream"
    assert stream.order.compared > 4


def test_a_copy_between_devices_is_ordered_by_the_current_streams_of_both(stream: RecordedStream) -> None:
    near, packed, received = torch.zeros(8), torch.ones(8), torch.zeros(8)
    far, other = stream.beside(FAR), stream.beside(FAR)
    with stream.capture() as here:
        stream.kernel(add, packed, near)
    with far.current():
        with far.capture() as there:
            far.kernel(add, received, received)
        with pytest.raises(AssertionError, match="stream 1 is not the current one, which is stream 2"):
            here.replay()
    here.replay()
    with pytest.raises(AssertionError, match="a copy waits for the default stream of cuda:1"):
        stream.copy(received, packed)
    with far.current(), stream.current():
        stream.copy(received, packed)
        stream.copy(packed, received)
    assert (stream.crossings, far.crossings) == (1, 1), "each runs on the current stream of its source"
    here.replay()
    with far.current():
        there.replay()
    settle(stream, far)
    assert stream.order.races == [], "the streams wait for each other"
    with far.current(), stream.current():
        stream.copy(received, packed)
    with other.current():
        other.kernel(add, received, received)
    settle(other, far, stream)
    assert stream.order.races, "another stream of the device does not wait"


def test_the_host_rewrites_pinned_memory_after_it_has_waited(stream: RecordedStream) -> None:
    pinned, target, copied = stream.pinned(8), torch.zeros(8, dtype=torch.uint8), stream.event()

    def launch(*, waits: bool) -> None:
        if waits:
            copied.wait()
        pinned.fill_(3)
        stream.copy(target, pinned)
        copied.mark()

    launch(waits=False)
    launch(waits=True)
    assert stream.order.races == []
    stream.kernel(add, target, target)
    event = stream.event()
    event.mark()
    event.wait()
    launch(waits=False)
    assert stream.order.races == [], "a later event covers the copy"
    launch(waits=False)
    stream.synchronize()
    assert set(stream.order.races) <= {
        "stream 1 reads in copy while the host writes in aten.fill_",
        "the host writes in aten.fill_ while stream 1 reads in copy",
    }
    assert stream.order.races


class NoEvents(RecordedStream):
    """Streams next to the step's wait for nothing."""

    def after(self, event: RecordedEvent) -> None:
        if self.parent is None:
            super().after(event)


class CopiesOnStep(RecordedStream):
    """Copies of the streams next to the step's are enqueued on the step's."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.parent is None:
            super().copy(target, source)
        else:
            with self.parent.current():
                self.parent.copy(target, source)


class NoWait(RecordedEvent):
    def wait(self) -> None: ...


def reuse_numbers_of_prefill(prefill: object, stream: RecordedStream) -> None:
    assert isinstance(prefill, Prefill)
    for numbers in prefill._numbers:
        numbers.copied = NoWait(stream)


FAULTS: dict[str, tuple[Callable[[], RecordedStream], bool, str]] = {
    "none": (RecordedStream, True, ""),
    "a dropped event": (NoEvents, True, "stream"),
    "a copy on the step's stream": (CopiesOnStep, True, "stream"),
    "a pinned row that is reused": (RecordedStream, False, "the host writes in aten.copy_"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_an_engine_is_found(llama: LoadedModel, other: str, name: str) -> None:
    make, drafts, found = FAULTS[name]
    with watched_run():
        stream = make()
    if drafts:
        settings = decoupled(other, OWN)
    else:
        settings = on_device(0, max_batch_size=1, max_model_len=128, max_batched_tokens=16)
    request = ask(tokens(90 if not drafts else 9, 1), max_tokens=6, ignore_eos=True)
    with device_engine(llama, settings, RecordedDevice(stream)) as (engine, _):
        if not drafts:
            reuse_numbers_of_prefill(executor_of(engine).prefill, stream)
        assert len(answer_each(engine, [request])[0]) == 6
    races = list(stream.order.races)
    stream.order.races.clear()
    assert (races == []) if not found else [race for race in races if found in race]


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "seed"), [({}, 1), (OWN, 2)], ids=["shared", "own"])
def test_tokens_are_the_same_in_each_order_that_events_permit(
    llama: LoadedModel, other: str, fields: dict[str, str], seed: int
) -> None:
    make = partial(ask, tokens(9, 1), max_tokens=12, temperature=0.8, ignore_eos=True)
    expected = on_cpu(llama, [make()])
    with watched_run(seed) as run:
        device = RecordedDevice()
        with device_engine(llama, decoupled(other, fields), device) as (engine, _):
            assert answer_each(engine, [make()]) == expected
    assert sum(turns.drawn for turns in run.turns) > 10

    assert sum(order.compared for order in run.orders) > 0
    assert run.races == []
