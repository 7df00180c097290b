"""Schedulers of named sequences, and what an engine does with their plans."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gpu_engine.api.prefill_shapes import PrefillShapes
from gpu_engine.api.request import Scheduling, TenantShare
from gpu_engine.core.kv_cache import PageAllocator
from gpu_engine.core.scheduler import Plan, Scheduler, Sequence
from gpu_engine.core.state_snapshots import StateSnapshots

PAGE, CHUNK, ROWS, SCORED = 16, 32, 4, 24

Turn = list[tuple[str, int, int]]
"""(name, start, end) of the chunks of one iteration."""


@dataclass(slots=True, eq=False, kw_only=True, repr=False)
class Named(Sequence):
    name: str


Names = Scheduler[Named]


def scheduler(
    num_slots: int = 2,
    num_pages: int = 40,
    *,
    chunk: int = CHUNK,
    lanes: int = 1,
    texts: Any = None,
    snapshots: StateSnapshots | None = None,
    **options: Any,
) -> Names:
    """Return a scheduler; `texts` are the tokens of each sequence by its name, for the prefix cache."""
    if texts is not None:
        options["tokens_of"] = lambda one: texts[one.name][: one.length]
    return Scheduler(
        num_slots,
        PageAllocator(num_pages, PAGE, snapshots),
        prefill_chunk=chunk,
        lookahead=ROWS,
        shapes=PrefillShapes(chunk, lanes, chunk),
        scored_chunk=SCORED,
        **options,
    )


def sequence(
    name: str,
    length: int = 10,
    *,
    guided: bool = False,
    priority: int = 0,
    max_queue_ms: int | None = None,
    tenant: TenantShare | None = None,
    **fields: Any,
) -> Named:
    scheduling = Scheduling(priority=priority, max_queue_ms=max_queue_ms, tenant=tenant)
    return Named(length, guided, scheduling=scheduling, name=name, **fields)


def added(machine: Names, *sequences: Named) -> Names:
    for each in sequences:
        machine.add(each)
    return machine


def beams(count: int, length: int = 10, **fields: Any) -> list[Named]:
    """Return the beams of a search: the first has the prompt, the others are held until a fork."""
    group = [sequence("beam0", length, **fields)]
    group += [sequence(f"beam{i}", 0, held=True) for i in range(1, count)]
    for beam in group:
        beam.group = tuple(group)
    return group


def names(sequences: Iterable[Named]) -> list[str]:
    return [s.name for s in sequences]


def chunks(plan: Plan[Named]) -> Turn:
    return [(chunk.sequence.name, chunk.start, chunk.end) for chunk in plan.prefill]


def act(machine: Names, plan: Plan[Named], emitted: int = 1) -> None:
    """Do what an engine does with a plan."""
    for chunk in (*plan.prefill, *([plan.scored] if plan.scored else ())):
        chunk.sequence.prefilled = chunk.end
        if chunk.end == chunk.sequence.prefill_end:
            machine.index_pages(chunk.sequence)
    for s in plan.decode:
        s.length += emitted
        s.prefilled = s.length - 1
    machine.check_integrity()


def prefills(machine: Names) -> list[Turn]:
    """Return the chunks of each iteration until everything is prefilled; no sequence decodes meanwhile."""
    turns = []
    while (plan := machine.plan()).prefill:
        turns.append(chunks(plan))
        act(machine, plan, emitted=0)
    return turns
