"""The lanes of a forward as recurrent layers read them: which rows are committed, pending, or taken again.

An accepted token is committed, and a draft is pending. A recurrent layer has one committed state a sequence, and the
inputs of the pending rows of the sequence's last forward. A forward begins with the state that is committed and takes
these rows again, as many as were accepted since (`redo`). Then it goes through its own rows. After the first `commit`
of them the state is written back, and the inputs of the rows that follow are saved. So a verification commits
the row of its last token, or no row where that token may come again; a chunk of a prompt commits all of its rows, and a
rejected draft leaves no trace.

Not responsible for: the layers (see recurrent.py), the memory of states (see gpu_engine/model/recurrent/rows.py).

Shapes: L lanes, N rows of the forward, S places, R pending rows at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NO_PLACE = -1
"""In `state_L`: padding."""


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentRows:
    """The lanes of a forward: int32 on the device of the states, contiguous. All layers of the forward read the same
    tensors."""

    first_L1: torch.Tensor
    """[L + 1]: lane i has the rows from first_L1[i] up to first_L1[i + 1]. Rows after the last lane's are padding."""
    state_L: torch.Tensor
    """The lane's place in the pools, of which no two are equal. NO_PLACE: padding, which has a result of zeros."""
    fresh_L: torch.Tensor
    """1: the state begins with zeros, whatever the place has."""
    redo_L: torch.Tensor
    """Pending rows at the place that are taken again first: those that were accepted, at most R."""
    commit_L: torch.Tensor
    """Rows of the lane after which the state is written back. Those after them become pending, at most R; further ones
    are padding, whose results are not defined."""

    def __post_init__(self) -> None:
        lanes = len(self.state_L)
        parts = (self.first_L1[1:], self.state_L, self.fresh_L, self.redo_L, self.commit_L)
        assert all(part.dtype == torch.int32 and part.shape == (lanes,) for part in parts), parts
        assert all(part.is_contiguous() for part in (self.first_L1, *parts)), parts

    @classmethod
    def rectangle(
        cls,
        num_rows: int,
        state_L: torch.Tensor,
        *,
        fresh_L: torch.Tensor,
        redo_L: torch.Tensor,
        commit_L: torch.Tensor,
    ) -> RecurrentRows:
        """Return the lanes of a forward whose sequences have `num_rows` rows each, padding included."""
        return cls(bounds_of(num_rows, state_L), state_L, fresh_L, redo_L, commit_L)


def bounds_of(width: int | torch.Tensor, lanes_L: torch.Tensor) -> torch.Tensor:
    """Return `first_L1` of lanes of `width` rows each; a tensor int32 [L]: of different numbers of rows."""
    if isinstance(width, int):
        return torch.arange(len(lanes_L) + 1, dtype=torch.int32, device=lanes_L.device) * width
    return torch.nn.functional.pad(width.cumsum(0, dtype=torch.int32), (1, 0))
