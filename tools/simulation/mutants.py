"""Defects to be found: each mutant replaces a small part of one process, and some seed must break a promise with it.

Invariant: a mutant changes one decision and nothing else, so that what catches it is the check of a promise. Not
responsible for: mutants of native code (see docs/assurance.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu_engine.api.request import FinishReason, Request
from gpu_engine.sidecar.client import GrammarClient
from grammar_service.fill.worker import Worker
from grammar_service.servicer import GrammarServicer
from shared_mem.layout import Layout
from tools.simulation.run import Parts, Simulation


def _generation_check_left_out(simulation: Simulation) -> None:
    """An event for an earlier owner of a slot reaches its present owner."""
    scheduler = simulation.engine._loop.scheduler

    def sequence(slot: int, slot_gen: int) -> Any:
        return next((each for each in scheduler.running if each.slot == slot), None)

    scheduler.sequence = sequence  # type: ignore[method-assign]


def _slot_kept_on_abort(simulation: Simulation) -> None:
    """An aborted sequence gets its last event, and keeps its slot and pages."""
    loop = simulation.engine._loop

    def end_request(request_id: str) -> None:
        for request, sequence in list(loop.sequences.items()):
            if request.request_id == request_id:
                remove, loop.scheduler.remove = loop.scheduler.remove, lambda sequence: None  # type: ignore[method-assign]
                loop.end(sequence, finish=FinishReason.ABORTED)
                loop.scheduler.remove = remove  # type: ignore[method-assign]

    loop.end_request = end_request  # type: ignore[method-assign]


def _late_row_applied_twice(simulation: Simulation) -> None:
    """Late rows are cached although the sequence has advanced since they were asked for."""
    sync = simulation.engine._loop.executor.sync
    late = sync.late

    def cached(seq: int, slot: int, slot_gen: int, *, advanced: bool = False) -> int | None:
        return late(seq, slot, slot_gen, advanced=False)

    sync.late = cached  # type: ignore[method-assign]


def _rows_of_earlier_owner_kept(simulation: Simulation) -> None:
    """Cached rows stay when a slot has another owner, or a new matcher."""
    simulation.engine._loop.executor.sync.forget = lambda slot: None  # type: ignore[method-assign]


def _preempted_matcher_kept(simulation: Simulation) -> None:
    """A preempted sequence loses its slot, and its matcher stays in the grammar process."""
    loop = simulation.engine._loop

    def slot_lost(sequence: Any) -> None:
        sequence.payload.bound = None

    loop._slot_lost = slot_lost  # type: ignore[method-assign]


class _NotReopened(GrammarClient):
    """Slots are not opened again when a grammar process is attached again."""

    def link_restored(self) -> None:
        was_lost, self._was_lost = self._was_lost, False
        super().link_restored()
        self._was_lost = was_lost
        self._abort_word.clear_abort()


class _OpenedAtStart(GrammarClient):
    """A matcher that is opened again has consumed none of the answer."""

    def open(self, slot: int, slot_gen: int, request: Request, committed: tuple[int, ...]) -> None:
        super().open(slot, slot_gen, request, ())


class _NeverForgotten(GrammarClient):
    """The compilation of a request that has ended is kept."""

    def forget(self, request_id: str) -> None:
        return


class _ReleaseOvertakesBind(GrammarClient):
    """A Release does not wait for the Bind that is under way."""

    async def _release(self, key: tuple[int, int], state: Any) -> None:
        state.task = None
        await super()._release(key, state)


class _AbortWordKept(GrammarClient):
    """The abort word stays set when the grammar process shows life again."""

    def link_alive(self) -> None:
        self._engine.grammar_alive()


def _worker_with(change: Callable[[Worker], None]) -> Callable[..., GrammarServicer]:
    class Mutated(GrammarServicer):
        """A servicer whose workers are changed before their first record."""

        def attach(self, worker: Worker, layout: Layout) -> None:
            change(worker)
            super().attach(worker, layout)

    return Mutated


def _released_by_slot_alone(worker: Worker) -> None:
    """A Release of an earlier owner drops the matcher of the present one."""
    table = worker._table

    def release(slot: int, slot_gen: int) -> None:
        table.slots.pop(slot, None)
        table.released[slot] = max(slot_gen, table.released.get(slot, -1))

    worker._table = _Overriding(table, release=release)  # type: ignore[assignment]


def _bound_in_any_order(worker: Worker) -> None:
    """A Bind of an earlier owner replaces the matcher of the present one."""
    table = worker._table
    worker._table = _Overriding(table, bind=table.slots.__setitem__)  # type: ignore[assignment]


def _record_applied_twice(worker: Worker) -> None:
    """The tokens of a record are accepted again when the record is repeated."""
    answerer = worker._answerer
    table = answerer._table

    def answer(record: Any, *args: Any) -> Any:
        slot = table.slots.get(record.slot)
        if slot is not None and slot.slot_gen == record.slot_gen and record.commit_pos < slot.num_committed:
            record = record._replace(commit_pos=slot.num_committed)
        return table.answer(record, *args)

    answerer._table = _Overriding(table, answer=answer)  # type: ignore[assignment]


def _late_answer_not_completed(worker: Worker) -> None:
    """Rows that are filled behind the deadline are thrown away."""
    channel = worker._answerer._channel
    worker._answerer._channel = _Overriding(channel, add_rows=lambda *args, **kwargs: True)


class _Overriding:
    """An object with some of its methods replaced."""

    def __init__(self, target: Any, **methods: Any) -> None:
        self._target = target
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


MUTANTS: dict[str, Parts] = {
    "a generation check is left out": Parts(mend=_generation_check_left_out),
    "a slot is not freed on abort": Parts(mend=_slot_kept_on_abort),
    "a late row is applied twice": Parts(mend=_late_row_applied_twice),
    "rows of an earlier owner are kept": Parts(mend=_rows_of_earlier_owner_kept),
    "the matcher of a preempted sequence is kept": Parts(mend=_preempted_matcher_kept),
    "slots are not opened again behind a reconnect": Parts(client=_NotReopened),
    "a matcher is opened without the committed tokens": Parts(client=_OpenedAtStart),
    "an ended request keeps its compilation": Parts(client=_NeverForgotten),
    "a Release overtakes its Bind": Parts(client=_ReleaseOvertakesBind),
    "the abort word stays behind a silence": Parts(client=_AbortWordKept),
    "a Release drops the next owner's matcher": Parts(servicer=_worker_with(_released_by_slot_alone)),
    "a Bind of an earlier owner wins": Parts(servicer=_worker_with(_bound_in_any_order)),
    "a repeated record is applied twice": Parts(servicer=_worker_with(_record_applied_twice)),
    "rows behind the deadline are lost": Parts(servicer=_worker_with(_late_answer_not_completed)),
}
"""What each mutant does -> its parts."""
