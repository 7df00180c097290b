"""Verification and sampling of one decode step: mask, penalties, filters, shared noise, acceptance, advance.

The rule: the token at absolute position p is argmax(filtered(masked logits) / T + Gumbel(seed, p)); a draft is accepted
iff it equals that token. The noise is Philox4x32-10 keyed by (seed, position, token), so speculation changes no token.
Greedy is T = 0. Invariant: a slot's result depends only on its own rows. A step with `device` runs as Triton kernels
(kernels/cuda/accept.py), any other as C (kernels/native/accept.h).
Not responsible for: waiting for rows, and drafting (see gpu_engine/step/, gpu_engine/drafters/).

Shapes: B batch entries, S slots, R rows a slot, P rows of this step (P <= R), V vocabulary, W = ceil(V / 32).
"""

from __future__ import annotations

import ctypes

import torch

from kernels.library import address, native
from kernels.row_kinds import FORCED, STEERED
from kernels.step_tensors import (
    MAX_LOGPROBS,
    RUN_ON,
    STOP_LENGTH,
    STOP_STEERED,
    STOP_TOKEN,
    AcceptResult,
    SlotParams,
    StepTensors,
    pack_rules,
)

__all__ = [
    "MAX_LOGPROBS",
    "RUN_ON",
    "STEERED",
    "STOP_LENGTH",
    "STOP_STEERED",
    "STOP_TOKEN",
    "AcceptResult",
    "SlotParams",
    "StepTensors",
    "accept",
    "accept_arguments",
    "draw_drafts",
    "gumbel_noise",
    "pack_rules",
]

_POINTERS = (
    *("logits", "slots", "drafts", "num_drafts", "kinds", "forced", "masks", "history", "length", "prompt_length"),
    *(
        "max_length",
        "min_tokens",
        "temperature",
        "top_p",
        "min_p",
        "repetition",
        "presence",
        "frequency",
        "top_k",
        "seed",
    ),
    *("num_logprobs", "rules", "prefixes", "emitted", "num_emitted", "num_accepted", "finish", "blocked", "logprob"),
    *("top_ids", "top_logprobs", "masses", "scratch", "counts", "first_row"),
)
_LONGS = ("logits_stride", "row_stride", "history_stride", "mask_slot_stride", "mask_row_stride", "scratch_stride")
_INTS = ("num_batch", "num_rows", "vocab_size", "bf16")


class AcceptArgs(ctypes.Structure):
    """Mirror of `struct accept_args`."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in _POINTERS],
        *[(name, ctypes.c_int64) for name in _LONGS],
        *[(name, ctypes.c_int32) for name in _INTS],
    ]


def accept_arguments(step: StepTensors, logits_NV: torch.Tensor, num_rows: int) -> AcceptArgs:
    """Return the native arguments for logits [N, V], bf16 or fp32; asserts every shape and dtype."""
    if step.arguments and step.arguments[0] is logits_NV and step.arguments[1].num_rows == num_rows:
        same: AcceptArgs = step.arguments[1]
        return same
    B, R = step.slots_B.shape[0], step.kinds_BR.shape[1]
    assert logits_NV.dtype in (torch.bfloat16, torch.float32), logits_NV.dtype
    assert step.first_row_B is not None or logits_NV.shape[0] >= B * num_rows
    assert logits_NV.stride(1) == 1
    assert 1 <= num_rows <= R
    assert step.result.scratch_BV.shape[1] >= logits_NV.shape[1]
    args = AcceptArgs.from_buffer_copy(step.arguments[1]) if step.arguments else _without_logits(step)
    args.logits, args.logits_stride, args.num_rows = address(logits_NV), logits_NV.stride(0), num_rows
    args.vocab_size, args.bf16 = logits_NV.shape[1], logits_NV.dtype == torch.bfloat16
    step.arguments[:] = logits_NV, args
    return args


def _without_logits(step: StepTensors) -> AcceptArgs:
    """Return the arguments that are the same at every call with these tensors."""
    B, R = step.slots_B.shape[0], step.kinds_BR.shape[1]
    assert R == step.drafts_BR.shape[1] == step.result.emitted_BR.shape[1]
    assert step.kinds_BR.dtype == torch.uint8
    ints = (step.slots_B, step.drafts_BR, step.num_drafts_B, step.forced_BR, step.history_SL, step.length_S)
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in ints)
    p, r = step.params, step.result
    tensors = (
        *(step.history_SL, step.length_S, p.prompt_length_S, p.max_length_S, p.min_tokens_S, p.temperature_S),
        *(p.top_p_S, p.min_p_S, p.repetition_S, p.presence_S, p.frequency_S, p.top_k_S, p.seed_S),
        *(p.num_logprobs_S, p.rules_S, p.prefixes_S),
        *(r.emitted_BR, r.num_emitted_B, r.num_accepted_B, r.finish_B, r.blocked_B),
        *(r.logprob_BR, r.top_ids_BRN, r.top_logprobs_BRN, r.masses_BR2, r.scratch_BV, r.counts_BV),
    )
    first_row = None if step.first_row_B is None else address(step.first_row_B)
    batch = (step.slots_B, step.drafts_BR, step.num_drafts_B, step.kinds_BR, step.forced_BR)
    strides = (0, R, step.history_SL.stride(0), *step.mask_strides, r.scratch_BV.shape[1])
    return AcceptArgs(
        None, *map(address, batch), step.mask_address, *map(address, tensors), first_row, *strides, B, 0, 0, 0
    )


def accept(logits_NV: torch.Tensor, step: StepTensors, *, num_rows: int) -> None:
    """Verify and sample; append the emitted tokens to `history_SL` and advance `length_S`; fill `result`.

    `logits_NV` [N, V], row first_row_B[b] + j, without `first_row_B` row b * P + j; `num_rows` is P; `num_drafts_B`
    < P. A row of kind DEFER, DEAD_END or ERROR emits nothing and ends the slot's step; a row without any legal token
    does the same as DEAD_END.
    """
    if step.device is not None:
        from kernels.cuda import accept as device  # a CPU install has no Triton

        return device.accept(logits_NV, step, num_rows=num_rows)
    native().lockstep_accept(ctypes.byref(accept_arguments(step, logits_NV, num_rows)))


def draw_drafts(logits_BV: torch.Tensor, step: StepTensors, k: int, *, d2t_V: torch.Tensor | None = None) -> None:
    """Draw draft k of every lane into `drafts_BR[:, k]` by the target's own rule, from a drafter's logits [B, V].

    Position and noise are those that verification will use at row k; `kinds_BR` and `forced_BR` are read at [b, k]. The
    draft also goes into `history_SL` after `length_S`, where the next draft's penalties find it. -1: nothing is legal.
    `d2t_V` int32 [Vd] is added to a column of `logits_BV` [B, Vd] to give its token, where the drafter's vocabulary is
    pruned. A row that leaves nothing of that vocabulary gives -1 as well: no draft of it could be accepted."""
    if step.device is not None:
        from kernels.cuda import accept as device

        return device.draw_drafts(logits_BV, step, k, d2t_V=d2t_V)
    if d2t_V is not None:
        logits_BV = _widened(logits_BV, d2t_V, step, k)
    native().lockstep_draft(ctypes.byref(accept_arguments(step, logits_BV, 1)), ctypes.c_int32(k))


def _widened(logits_BV: torch.Tensor, d2t_V: torch.Tensor, step: StepTensors, k: int) -> torch.Tensor:
    """Return logits over the target's vocabulary, -inf outside the drafter's; a forced token is always there."""
    B, Vd = logits_BV.shape
    wide_BV = logits_BV.new_full((B, step.result.scratch_BV.shape[1]), -torch.inf)
    wide_BV[:, torch.arange(Vd) + d2t_V] = logits_BV
    forced_B1 = step.forced_BR[:B, k : k + 1].clamp(min=0).long()
    is_forced_B1 = step.kinds_BR[:B, k : k + 1] == FORCED
    return wide_BV.scatter(1, forced_B1, torch.where(is_forced_B1, 0.0, wide_BV.gather(1, forced_B1)).to(wide_BV.dtype))


def gumbel_noise(seed: int, position: int, vocab_size: int) -> torch.Tensor:
    """Return the noise of one position, float32 [V]: what `accept` adds to logits / T."""
    out = torch.empty((vocab_size + 63) // 64 * 64, dtype=torch.float32)
    lib = native()
    lib.lockstep_gumbel(
        ctypes.c_uint64(seed), ctypes.c_uint32(position), ctypes.c_int64(out.numel()), ctypes.c_void_p(out.data_ptr())
    )
    return out[:vocab_size]
