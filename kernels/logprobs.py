"""Log-probabilities of given tokens under the model's own distribution, and the candidates of beams under theirs.

`row_logprobs` knows no mask, no bias, no penalty and no temperature. Invariant: on a CPU, and on a GPU, the numbers of
a row are those that `accept` returns for the same logits and token, bit for bit. `beam_candidates` is the same torch
operations on either device; it reads nothing back, so any stream runs it. Not responsible for: tokens that a step emits
(see accept.py), the choice among candidates (see gpu_engine/core/beams/search.py).

Shapes: N rows, V columns of the logits, M `MAX_LOGPROBS`, W' words of a mask row, E edits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kernels.library import address, native
from kernels.row_kinds import APPLY, DEAD_END, DEFER, FORCED, STEERED
from kernels.step_tensors import MAX_LOGPROBS, AcceptResult

_GROUPS = 8
"""Groups of rows on a CPU, each with scratch of its own: at least the threads of most machines that serve without a
GPU, and a bound of the memory."""


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Inputs and results, of fixed addresses. The rows from `count_1` on have no defined result."""

    tokens_N: torch.Tensor  # int32
    count_1: torch.Tensor  # int32, rows to compute; on a CPU all are computed
    wanted_1: torch.Tensor  # int32, alternatives of each row, at most M
    logprob_N: torch.Tensor  # float32
    top_ids_NM: torch.Tensor  # int32, most likely first
    top_logprobs_NM: torch.Tensor  # float32
    scratch_GV: torch.Tensor  # float32; empty on a GPU

    @classmethod
    def allocate(cls, num_rows: int, vocab_size: int, device: torch.device | str = "cpu") -> RowLogprobs:
        """Return zeroed tensors."""
        groups = _GROUPS if torch.device(device).type == "cpu" else 0

        def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            zeros(torch.int32, num_rows),
            zeros(torch.int32, 1),
            zeros(torch.int32, 1),
            zeros(torch.float32, num_rows),
            zeros(torch.int32, num_rows, MAX_LOGPROBS),
            zeros(torch.float32, num_rows, MAX_LOGPROBS),
            zeros(torch.float32, groups, -(-vocab_size // 64) * 64),
        )


_POINTERS = ("logits", "tokens", "logprob", "top_ids", "top_logprobs", "scratch")


class _Args(ctypes.Structure):
    """Mirror of `struct logprobs_args`."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in _POINTERS],
        *[(name, ctypes.c_int64) for name in ("logits_stride", "scratch_stride")],
        *[(name, ctypes.c_int32) for name in ("num_rows", "num_groups", "top", "vocab_size", "bf16")],
    ]


def row_logprobs(logits_NV: torch.Tensor, rows: RowLogprobs) -> None:
    """Fill the results of `rows` for logits [n, V] in CPU memory, bf16 or fp32, n at most the rows of `rows`."""
    (n, V), (groups, stride) = logits_NV.shape, rows.scratch_GV.shape
    assert logits_NV.dtype in (torch.bfloat16, torch.float32), logits_NV.dtype
    assert logits_NV.stride(1) == 1
    assert n <= len(rows.tokens_N), (n, len(rows.tokens_N))
    assert stride >= V
    tensors = (logits_NV, rows.tokens_N, rows.logprob_N, rows.top_ids_NM, rows.top_logprobs_NM, rows.scratch_GV)
    sizes = (n, groups, int(rows.wanted_1), V, int(logits_NV.dtype == torch.bfloat16))
    native().lockstep_logprobs(ctypes.byref(_Args(*[address(t) for t in tensors], logits_NV.stride(0), stride, *sizes)))


ROW_MISSING, ROW_IN_ERROR, CLOSES = -1, -2, 64
"""What `beam_candidates` leaves in place of a token's log-probability: the number of candidates, plus CLOSES where the
row is steered; or one of the first two."""


class Edit(NamedTuple):
    """A change of one token's log-probability: x + `added`, divided or multiplied by `factor`, minus `less`."""

    token: int
    added: float
    """-inf bans the token."""
    factor: float = 1.0
    """A repetition penalty: positive values are divided by it, others multiplied."""
    less: float = 0.0


@dataclass(frozen=True, slots=True)
class BeamRows:
    """The lanes of a step that are beams, on its device: N of them."""

    lanes_N: torch.Tensor  # int64
    edit_ids_NE: torch.Tensor | None  # int64; None: no lane has an edit
    edits_N3E: torch.Tensor | None  # float32: added, factor, less

    @classmethod
    def of(cls, lanes: Sequence[int], edits: Sequence[Sequence[Edit]], device: torch.device) -> BeamRows:
        """Return the tensors. The copies to a device do not wait for it."""

        def on_device(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

        lanes_N = on_device(torch.tensor(lanes))
        longest = max(map(len, edits), default=0)
        if not longest:
            return cls(lanes_N, None, None)
        # A lane's last edit is repeated, because the order of two writes to one place is not defined.
        padded = [[*row, *[row[-1] if row else Edit(0, 0.0)] * (longest - len(row))] for row in edits]
        ids_NE = torch.tensor([[edit.token for edit in row] for row in padded])
        values_NE3 = torch.tensor([[edit[1:] for edit in row] for row in padded], dtype=torch.float32)
        return cls(lanes_N, on_device(ids_NE), on_device(values_NE3.transpose(1, 2).contiguous()))


def beam_candidates(
    logits_NV: torch.Tensor,
    beams: BeamRows,
    kinds_BR: torch.Tensor,
    forced_BR: torch.Tensor,
    mask_NW: torch.Tensor | None,
    result: AcceptResult,
) -> None:
    """Leave the best M candidates of each beam in `result`, and make its row one at which `accept` emits nothing.

    A candidate's value is its log-probability under the model's own distribution; illegal tokens are left out, and the
    lane's edits are applied, as transformers' beam search does with its processors. Rows of `result` at [lane, 0]:
    `top_ids_BRN` and `top_logprobs_BRN`, best first, and a code in `logprob_BR`.

    Args:
        logits_NV: of the beams, in the order of `beams.lanes_N`; bf16 or fp32.
        beams: which lanes they are.
        kinds_BR: uint8 RowKind of the step's lanes; written at [lane, 0].
        forced_BR: int32, the one token of a FORCED row; STEERED for a narrowed row.
        mask_NW: int32 bitmask of each beam's row, read where the kind is APPLY; None: no lane is guided.
        result: of the step.
    """
    lanes_N, V = beams.lanes_N, logits_NV.shape[1]
    x_NV = torch.log_softmax(logits_NV.float(), dim=-1)
    kind_N, forced_N = kinds_BR[lanes_N, 0], forced_BR[lanes_N, 0]
    if mask_NW is not None:
        bits_NV = (mask_NW[:, :, None] >> torch.arange(32, device=mask_NW.device, dtype=torch.int32) & 1).flatten(1)
        illegal_NV = (kind_N == APPLY)[:, None] & (bits_NV[:, :V] == 0)
        columns_V = torch.arange(V, device=x_NV.device, dtype=torch.int32)
        illegal_NV |= (kind_N == FORCED)[:, None] & (columns_V != forced_N[:, None])
        x_NV.masked_fill_(illegal_NV, -torch.inf)
    if beams.edit_ids_NE is not None and beams.edits_N3E is not None:
        added_NE, factor_NE, less_NE = beams.edits_N3E.unbind(1)
        y_NE = x_NV.gather(1, beams.edit_ids_NE) + added_NE
        y_NE = torch.where(y_NE > 0, y_NE / factor_NE, y_NE * factor_NE) - less_NE
        x_NV.scatter_(1, beams.edit_ids_NE, y_NE)
    count = min(MAX_LOGPROBS, V)
    values_NM, ids_NM = x_NV.topk(count, dim=-1)
    num_N = (values_NM > -torch.inf).sum(1)
    code_N = num_N + CLOSES * (forced_N == STEERED)
    code_N = torch.where(kind_N == DEFER, ROW_MISSING, torch.where(kind_N > DEFER, ROW_IN_ERROR, code_N))
    code_N = torch.where(kind_N == DEAD_END, 0, code_N)
    result.logprob_BR[lanes_N, 0] = code_N.float()
    result.top_ids_BRN[lanes_N, 0, :count] = ids_NM.int()
    result.top_logprobs_BRN[lanes_N, 0, :count] = values_NM
    kinds_BR[lanes_N, 0] = kind_N.clamp(min=DEFER)
