"""Guided slots and news of the grammar process, in orders that a real one brings about once in a while."""

from __future__ import annotations

from gpu_engine.api.prefill_shapes import PrefillShapes
from gpu_engine.api.request import Request
from gpu_engine.core.grammar_slots import Guides
from gpu_engine.core.kv_cache import PageAllocator
from gpu_engine.core.running import Running, Seat
from gpu_engine.core.scheduler import Guide, Scheduler
from gpu_engine.ops.stats import EngineStats
from gpu_engine.step.sync import NoSync
from tests.gpu_engine.harness import ask, tokens


class Port:
    """Counts what is opened and closed."""

    def __init__(self) -> None:
        self.opened: list[tuple[int, int]] = []

    def open(self, slot: int, slot_gen: int, request: Request, committed: tuple[int, ...]) -> None:
        self.opened.append((slot, slot_gen))

    def close(self, slot: int, slot_gen: int) -> None:
        self.opened.remove((slot, slot_gen))


class Binds:
    """A seating that only notes."""

    def bind(self, seat: Seat, *, drafts: bool = True) -> None:
        assert seat.slot >= 0


def test_a_step_of_the_process_before_is_not_waited_for() -> None:
    scheduler: Scheduler[Running] = Scheduler(
        2, PageAllocator(8, 16), prefill_chunk=16, lookahead=8, shapes=PrefillShapes(16, 1, 16)
    )
    # Its answers never come: they went with the process.
    guides = Guides(Port(), scheduler, Binds(), NoSync(), EngineStats(), lambda seat: False, lambda seat, **_: None)  # type: ignore[arg-type]
    request = ask(tokens(9, 1), grammar="20").request
    seat: Seat = Seat(Running(request), 9, guided=True)
    scheduler.add(seat)
    scheduler.plan()
    guides.open(seat)
    seat.prefilled = 8
    guides.opened(seat.slot, seat.slot_gen, 1.0, False, 2, ())
    assert seat.decoding

    # A step of it is in flight; the process is lost and the next one there before the step is told.
    guides.lost()
    guides.restored()
    guides.defer(seat, 7, moved=False)
    guides.opened(seat.slot, seat.slot_gen, 1.0, False, 2, ())
    guides.look()
    assert seat.guide is Guide.OPEN
    assert seat.decoding
    assert not seat.payload.deferred_s
