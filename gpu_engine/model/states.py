"""The states of a model's recurrent layers by slot, and the snapshots of the prefix cache.

A slot has the state of its sequence as long as the sequence holds it, so whatever takes the slot frees the state: the
end of the sequence, a cancellation, an error, or a preemption. The next owner begins with zeros or with a snapshot. The
end of the grammar process takes no slot, and leaves the states.

What a forward adds to a state is committed, or pending where the tokens may still be rejected. The next forward of the
slot begins at a later position, and takes those pending rows again that are before it. So no step reports how many of
its drafts were accepted: the position says it. Invariant: a state is committed up to a position of its sequence, and
the rows of the next forward begin there, or among the pending ones. Used only by the thread of the steps.

Not responsible for: the layers (see recurrent/), the choice of snapshots (see core/state_snapshots.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from gpu_engine.model.recurrent.rows import (
    NO_PLACE,
    RecurrentForward,
    RecurrentLayer,
    RecurrentPools,
    RecurrentRows,
    pending_bytes,
    state_bytes,
)


class SequenceStates:
    """The memory of all states.

    Args:
        layers: the model's recurrent layers by number.
        num_slots: slots, with the spare one.
        max_rows: the most rows of a slot in a step, all of which may be pending.
        num_snapshots: places for snapshots.
    """

    def __init__(
        self, layers: Mapping[int, RecurrentLayer], num_slots: int, max_rows: int, num_snapshots: int = 0
    ) -> None:
        self._layers = layers
        self.pools = RecurrentPools(layers, num_slots, max_rows)
        self.snapshots = RecurrentPools(layers, num_snapshots, 0)
        self._ends = [0] * num_slots
        """The position up to which each slot's state is committed."""
        self._pending = [0] * num_slots
        """Rows after it whose inputs are saved."""

    def forward(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        commits: Sequence[int],
        widths: Sequence[int] | None = None,
    ) -> RecurrentForward:
        """Return what a forward needs whose lane i has `counts[i]` rows of a slot from the position `starts[i]` on.

        The forward must run: the slots are then committed up to `commits[i]` rows further. A lane of no rows is
        padding. `widths`: the rows of each lane in the forward, with padding; None: no lane has padding.
        """
        redo: list[int] = []
        for slot, start, count, commit in zip(slots, starts, counts, commits, strict=True):
            again = start - self._ends[slot] if start and count else 0
            assert 0 <= again <= self._pending[slot], (slot, start, self._ends[slot], self._pending[slot])
            redo.append(again)
            if count:
                self._ends[slot], self._pending[slot] = start + commit, count - commit
        places = [slot if count else NO_PLACE for slot, count in zip(slots, counts, strict=True)]
        first = accumulate(counts if widths is None else widths, initial=0)
        return RecurrentForward(
            self.pools,
            RecurrentRows(
                first_L1=_ints(list(first)),
                state_L=_ints(places),
                fresh_L=_ints([int(start == 0) for start in starts]),
                redo_L=_ints(redo),
                commit_L=_ints(list(commits)),
            ),
        )

    def copy(self, source: int, target: int) -> None:
        """Give a slot the state of another one, with its pending rows."""
        for layer in self.pools.layers.values():
            for part in (*layer.states, layer.pending_SRW):
                part[target].copy_(part[source])
        self._ends[target], self._pending[target] = self._ends[source], self._pending[source]

    def store(self, slot: int, snapshot: int, position: int) -> None:
        """Keep the state of a slot, which is committed up to `position` and no further, at the place `snapshot`."""
        assert self._ends[slot] == position, (slot, self._ends[slot], position)
        for number, layer in self.pools.layers.items():
            for kept, part in zip(self.snapshots.layers[number].states, layer.states, strict=True):
                kept[snapshot].copy_(part[slot])

    def restore(self, snapshot: int, slot: int, position: int) -> None:
        """Begin a slot's state with the one at the place `snapshot`, which is committed up to `position`."""
        for number, layer in self.pools.layers.items():
            for kept, part in zip(self.snapshots.layers[number].states, layer.states, strict=True):
                part[slot].copy_(kept[snapshot])
        self._ends[slot], self._pending[slot] = position, 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all states, pending rows and snapshots."""
        of_slots = state_bytes(self._layers) + self.pools.max_pending * pending_bytes(self._layers)
        return self.pools.num_places * of_slots + self.snapshots.num_places * state_bytes(self._layers)

    def __repr__(self) -> str:
        counts = f"{self.pools.num_places} slots, {self.snapshots.num_places} snapshots"
        return f"<SequenceStates of {len(self._layers)} layers, {counts}, {self.num_bytes / 1e6:.1f} MB>"


def _ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
