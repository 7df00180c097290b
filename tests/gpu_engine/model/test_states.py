"""States of slots: what is committed stays, what is pending is taken again, and a copy is a state of its own."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from gpu_engine.model.recurrent.rows import NO_PLACE
from gpu_engine.model.states import SequenceStates


@dataclass
class Layer:
    layer_idx: int
    state_shapes: tuple[tuple[int, ...], ...] = ((2, 3), (4,))
    pending_width: int = 5


def states_of(num_snapshots: int = 2) -> SequenceStates:
    return SequenceStates({1: Layer(1), 4: Layer(4)}, num_slots=3, max_rows=4, num_snapshots=num_snapshots)


def test_the_next_position_says_which_pending_rows_are_taken_again() -> None:
    states = states_of()
    # A chunk of a prompt and padding, then a verification of three drafts, of which two are accepted.
    chunk = states.forward_of([2, 0], [0, 0], [7, 0], [7, 0], 8).rows
    assert chunk.first_L1.tolist() == [0, 8, 16]
    assert (chunk.state_L.tolist(), chunk.fresh_L.tolist()) == ([2, NO_PLACE], [1, 1])
    assert (chunk.redo_L.tolist(), chunk.commit_L.tolist()) == ([0, 0], [7, 0])
    verified = states.forward_of([2], [7], [4], [1]).rows
    assert (verified.redo_L.tolist(), verified.fresh_L.tolist(), verified.first_L1.tolist()) == ([0], [0], [0, 4])
    # A row that was not committed, because the step may have to be repeated, is pending like a draft.
    assert states.forward_of([2], [10], [1], [0]).rows.redo_L.tolist() == [2]
    assert states.forward_of([2], [10], [1], [0]).rows.redo_L.tolist() == [0]
    assert states.forward_of([2], [11], [1], [0]).rows.redo_L.tolist() == [1]
    with pytest.raises(AssertionError):
        states.forward_of([2], [13], [1], [1])  # of two tokens only one was in a forward
    assert states.forward_of([2], [0], [3], [3]).rows.fresh_L.tolist() == [1]  # the slot's next owner


def test_copies_are_of_every_layer_and_of_the_pending_rows_of_a_slot() -> None:
    states = states_of()
    states.forward_of([0], [0], [9], [9])
    for number, layer in states.pools.layers.items():
        for at, part in enumerate((*layer.states, layer.pending_SRW)):
            part[0] = 10 * number + at
    states.store(0, 1, 9)
    states.forward_of([0], [9], [4], [1])
    states.copy(0, 1)
    assert states.forward_of([1], [12], [1], [1]).rows.redo_L.tolist() == [2]
    states.restore(1, 2, 9)
    assert states.forward_of([2], [9], [1], [1]).rows.redo_L.tolist() == [0]
    for number, layer in states.pools.layers.items():
        for at, part in enumerate((*layer.states, layer.pending_SRW)):
            assert torch.equal(part[1], part[0])
            assert bool((part[2] == 10 * number + at).all()) == (part is not layer.pending_SRW)
    tensors = [
        part
        for pools in (states.pools, states.snapshots)
        for layer in pools.layers.values()
        for part in (*layer.states, layer.pending_SRW)
    ]
    assert states.num_bytes == sum(part.nbytes for part in tensors)
