"""Guided slots and events of the grammar process, in orders that are rare with a real process."""

from __future__ import annotations

from gpu_engine.api.prefill_shapes import PrefillShapes
from gpu_engine.api.request import Request
from gpu_engine.api.stats import EngineStats
from gpu_engine.core.grammar_slots import GrammarSlots
from gpu_engine.core.kv_cache import PageAllocator
from gpu_engine.core.running import RunningSequence, SequenceState
from gpu_engine.core.scheduler import GrammarState, Scheduler
from gpu_engine.step.stream import ImmediateStream
from gpu_engine.step.sync import NoSync
from tests.gpu_engine.harness import ask, tokens


class Port:
    """Counts what is opened and closed."""

    def __init__(self) -> None:
        self.opened: list[tuple[int, int]] = []

    def open(self, slot: int, slot_gen: int, request: Request, committed: tuple[int, ...]) -> None:
        self.opened.append((slot, slot_gen))

    def forked(self, slot: int, slot_gen: int, request: Request, before: tuple[int, int] | None) -> None:
        self.opened.append((slot, slot_gen))

    def close(self, slot: int, slot_gen: int) -> None:
        self.opened.remove((slot, slot_gen))


class Binds:
    """A slot writer that checks the slot and writes nothing."""

    def bind(self, sequence: RunningSequence, *, drafts: bool = True) -> None:
        assert sequence.slot >= 0


def test_a_step_of_the_previous_process_is_not_waited_for() -> None:
    scheduler: Scheduler[SequenceState] = Scheduler(
        2, PageAllocator(8, 16), prefill_chunk=16, lookahead=8, shapes=PrefillShapes(16, 1, 16)
    )
    # Its answers never come: they went with the process.
    grammar_slots = GrammarSlots(
        Port(),
        scheduler,
        Binds(),
        NoSync(ImmediateStream(), 4, 8),
        EngineStats(),
        lambda sequence: False,
        lambda sequence, **_: None,
    )  # type: ignore[arg-type]
    request = ask(tokens(9, 1), grammar="20").request
    sequence: RunningSequence = RunningSequence(SequenceState(request), 9, guided=True)
    scheduler.add(sequence)
    scheduler.plan()
    grammar_slots.open(sequence)
    sequence.prefilled = 8
    grammar_slots.opened(sequence.slot, sequence.slot_gen, 1.0, False, 2, ())
    assert sequence.decoding

    # A step of it is in flight; the process is lost and the next one is attached before the step is collected.
    grammar_slots.process_lost()
    grammar_slots.process_restored()
    grammar_slots.defer(sequence, 7, advanced=False)
    grammar_slots.opened(sequence.slot, sequence.slot_gen, 1.0, False, 2, ())
    grammar_slots.poll()
    assert sequence.grammar_state is GrammarState.OPEN
    assert sequence.decoding
    assert not sequence.payload.deferred_since_s
