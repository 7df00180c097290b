"""Log-probabilities of given tokens under the model's own distribution: no mask, no bias, no penalty, no temperature.

Invariant: on a CPU, and on a GPU, the numbers of a row are those that `accept` returns for the same logits and token,
bit for bit. Not responsible for: tokens that a step emits (see accept.py).

Shapes: N rows, V columns of the logits, M `MAX_LOGPROBS`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from kernels.library import address, native
from kernels.step_tensors import MAX_LOGPROBS

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
            *(zeros(torch.int32, num_rows), zeros(torch.int32, 1), zeros(torch.int32, 1)),
            *(zeros(torch.float32, num_rows), zeros(torch.int32, num_rows, MAX_LOGPROBS)),
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
