"""The states of a model's recurrent layers by slot, and the snapshots of the prefix cache.

A slot has the state of its sequence as long as the sequence holds it, so whatever takes the slot frees the state: the
end of the sequence, a cancellation, an error, or a preemption. The next owner begins with zeros or with a snapshot. The
end of the grammar process takes no slot, and leaves the states.

What a forward adds to a state is committed, or pending where the tokens may still be rejected. The next forward of the
slot begins at a later position, and takes those pending rows again that are before it. So no step reports how many of
its drafts were accepted: the position says it, and a captured step computes it on the device. Invariant: a state is
committed up to a position of its sequence, and the rows of the next forward begin there, or among the pending ones.
Used only by the thread of the steps.

Not responsible for: the layers (see recurrent/), the choice of snapshots (see core/state_snapshots.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from gpu_engine.model.recurrent.rows import (
    CPU,
    NO_PLACE,
    RecurrentForward,
    RecurrentLayer,
    RecurrentPools,
    RecurrentRows,
    pending_bytes,
    state_bytes,
)
from kernels import recurrent
from kernels.recurrent import RecurrentKernels
from kernels.recurrent_rows import bounds_of


def _run(function: Callable[..., None], *args: object) -> None:
    function(*args)


def kernels_of(*, on_device: bool) -> RecurrentKernels:
    """Return the kernels of a GPU, or of a CPU."""
    if not on_device:
        return recurrent
    from kernels.cuda import recurrent as of_device  # a CPU install has no Triton

    return of_device


class SequenceStates:
    """The memory of all states.

    Args:
        layers: the model's recurrent layers by number.
        num_slots: slots of sequences. A lane of a further slot is padding.
        max_rows: the most rows of a slot in a step, all of which may be pending.
        num_snapshots: places for snapshots.
        device: the model's.
        on_device: the kernels are a GPU's; None: where the device is one.
        enqueue: runs a copy in the order of the forwards; `Stream.kernel`.
    """

    def __init__(
        self,
        layers: Mapping[int, RecurrentLayer],
        num_slots: int,
        max_rows: int,
        num_snapshots: int = 0,
        *,
        device: torch.device = CPU,
        on_device: bool | None = None,
        enqueue: Callable[..., None] = _run,
    ) -> None:
        self._layers, self._num_slots, self._enqueue = layers, num_slots, enqueue
        self._on_device = device.type != "cpu" if on_device is None else on_device
        self._kernels = kernels_of(on_device=self._on_device)
        self.pools = RecurrentPools(layers, num_slots, max_rows, device)
        self.snapshots = RecurrentPools(layers, num_snapshots, 0, device)
        self._positions_2S = torch.zeros(2, num_slots + 1, dtype=torch.int32, device=device)
        """By slot. Row 0: the position up to which its state is committed. Row 1: the one up to which its rows are
        known; rows in between are pending."""

    def forward(
        self,
        slots_L: torch.Tensor,
        start_L: torch.Tensor,
        count_L: torch.Tensor,
        commit_L: torch.Tensor,
        width: int | torch.Tensor,
    ) -> RecurrentForward:
        """Return what a forward needs whose lane i has `count_L[i]` rows of a slot from the position `start_L[i]` on.

        The forward must run: the slots are then committed up to `commit_L[i]` rows further. A lane of no rows is
        padding. `width`: the rows of each lane in the forward, with padding; int32 where lanes differ. `slots_L` is
        int64, the others int32, on the states' device. On a GPU, the host reads none of their values.
        """
        live_L = (count_L > 0) & (slots_L < self._num_slots)
        before_2L = self._positions_2S[:, slots_L]
        redo_L = torch.where(live_L & (start_L > 0), start_L - before_2L[0], 0)
        if not self._on_device:
            wrong_L = (redo_L < 0) | ((start_L > before_2L[1]) & (redo_L > 0))
            assert not wrong_L.any(), (slots_L, start_L, before_2L)
        after_2L = torch.stack((start_L + commit_L, start_L + count_L))
        self._positions_2S[:, slots_L] = torch.where(live_L, after_2L, before_2L)
        places_L = torch.where(live_L, slots_L, NO_PLACE).int()
        parts = (bounds_of(width, slots_L), places_L, (start_L == 0).int(), redo_L, commit_L.contiguous())
        return RecurrentForward(self.pools, RecurrentRows(*parts), self._kernels)

    def forward_of(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        commits: Sequence[int],
        width: int | None = None,
    ) -> RecurrentForward:
        """Return the same for numbers of the host. `width` None: no lane has padding."""
        lanes_4L = torch.tensor([slots, starts, counts, commits], dtype=torch.int32, device=self._positions_2S.device)
        slots_L, start_L, count_L, commit_L = lanes_4L
        return self.forward(slots_L.long(), start_L, count_L, commit_L, count_L if width is None else width)

    def copy(self, source: int, target: int) -> None:
        """Give a slot the state of another one, with its pending rows."""
        self._enqueue(self._copy, source, target)

    def _copy(self, source: int, target: int) -> None:
        copy_parts(self.pools.of(target, pending=True), self.pools.of(source, pending=True))
        self._positions_2S[:, target].copy_(self._positions_2S[:, source])

    def store(self, slot: int, snapshot: int, position: int) -> None:
        """Keep the state of a slot, which is committed up to `position` and no further, at the place `snapshot`."""
        assert self._on_device or self._positions_2S[0, slot] == position, (slot, self._positions_2S[:, slot], position)
        self._enqueue(copy_parts, self.snapshots.of(snapshot), self.pools.of(slot))

    def restore(self, snapshot: int, slot: int, position: int) -> None:
        """Begin a slot's state with the one at the place `snapshot`, which is committed up to `position`."""
        self._enqueue(self._restore, snapshot, slot, position)

    def _restore(self, snapshot: int, slot: int, position: int) -> None:
        copy_parts(self.pools.of(slot), self.snapshots.of(snapshot))
        self._positions_2S[:, slot].fill_(position)

    @property
    def num_bytes(self) -> int:
        """Bytes of all states, pending rows and snapshots."""
        of_slots = state_bytes(self._layers) + self.pools.max_pending * pending_bytes(self._layers)
        return self.pools.num_places * of_slots + self.snapshots.num_places * state_bytes(self._layers)

    def __repr__(self) -> str:
        counts = f"{self.pools.num_places} slots, {self.snapshots.num_places} snapshots"
        return f"<SequenceStates of {len(self._layers)} layers, {counts}, {self.num_bytes / 1e6:.1f} MB>"


def copy_parts(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy the parts of a state, in a few launches on a device."""
    torch._foreach_copy_(targets, sources)
