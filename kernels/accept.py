"""Verification and sampling of one decode step: mask, penalties, filters, shared noise, acceptance, advance.

The rule: the token at absolute position p is argmax(filtered(masked logits) / T + Gumbel(seed, p)); a draft is accepted
iff it equals that token. The noise is Philox4x32-10 keyed by (seed, position, token), so speculation changes no token.
Greedy is T = 0. One invariant: a slot's result depends on its own rows alone. Not here: waiting for rows, drafting.

Shapes: B batch entries, S slots, R rows a slot, P rows of this step (P <= R), V vocabulary, W = ceil(V / 32).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

from kernels.library import address, native

if TYPE_CHECKING:
    from kernels.cuda.row_state import DeviceRows

MAX_LOGPROBS = 20
RUN_ON, STOP_TOKEN, STOP_LENGTH, STOP_STEERED = 0, 1, 2, 3
"""Values of `AcceptResult.finish_B`; STOP_STEERED is a stop token at a row whose `forced` is STEERED."""
STEERED = -2
"""In `StepTensors.forced_BR` of a row that is not FORCED: the grammar process is leading the answer to its end."""

_FORCED = 2
"""RowKind.FORCED, which this leaf may not import."""

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
    *("num_logprobs", "rules", "emitted", "num_emitted", "num_accepted", "finish", "blocked", "logprob", "top_ids"),
    *("top_logprobs", "scratch", "counts"),
)
_LONGS = ("logits_stride", "row_stride", "history_stride", "mask_slot_stride", "mask_row_stride", "scratch_stride")
_INTS = ("num_batch", "num_rows", "vocab_size", "bf16")


class _Args(ctypes.Structure):
    """Mirror of `struct accept_args`."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in _POINTERS],
        *[(name, ctypes.c_int64) for name in _LONGS],
        *[(name, ctypes.c_int32) for name in _INTS],
    ]


@dataclass(frozen=True, slots=True)
class SlotParams:
    """What does not change while a sequence holds its slot. Writer: the engine, when it seats a sequence. All [S]."""

    prompt_length_S: torch.Tensor  # int32
    max_length_S: torch.Tensor  # int32, prompt plus answer at most
    min_tokens_S: torch.Tensor  # int32
    temperature_S: torch.Tensor  # float32
    top_p_S: torch.Tensor  # float32
    min_p_S: torch.Tensor  # float32
    repetition_S: torch.Tensor  # float32
    presence_S: torch.Tensor  # float32
    frequency_S: torch.Tensor  # float32
    top_k_S: torch.Tensor  # int32, 0: all
    seed_S: torch.Tensor  # int64, the bits of an unsigned 64-bit seed
    num_logprobs_S: torch.Tensor  # int32, -1: none
    rules_S: torch.Tensor  # int64, address of the slot's rules (see `pack_rules`), 0: none

    @classmethod
    def allocate(cls, num_slots: int, device: torch.device | str = "cpu") -> SlotParams:
        """Return zeroed parameters. On a GPU `rules_S` is not read: kernels/cuda/row_state.py has the rules."""
        floats = {"temperature_S", "top_p_S", "min_p_S", "repetition_S", "presence_S", "frequency_S"}
        longs = {"seed_S", "rules_S"}
        return cls(
            **{
                f.name: torch.zeros(
                    num_slots,
                    dtype=torch.float32 if f.name in floats else torch.int64 if f.name in longs else torch.int32,
                    device=device,
                )
                for f in fields(cls)
            }
        )


@dataclass(frozen=True, slots=True)
class AcceptResult:
    """What a step emitted. Writer: the step. Valid until the next; [B, R] rows beyond `num_emitted_B` are stale."""

    emitted_BR: torch.Tensor  # int32
    num_emitted_B: torch.Tensor  # int32
    num_accepted_B: torch.Tensor  # int32, drafts among the emitted
    finish_B: torch.Tensor  # int32: RUN_ON, STOP_TOKEN, STOP_LENGTH, STOP_STEERED
    blocked_B: torch.Tensor  # int32, kind of the row at which nothing could be emitted, else 0
    logprob_BR: torch.Tensor  # float32
    top_ids_BRN: torch.Tensor  # int32
    top_logprobs_BRN: torch.Tensor  # float32
    scratch_BV: torch.Tensor  # float32
    counts_BV: torch.Tensor  # int32, zero between calls

    @classmethod
    def allocate(
        cls, num_batch: int, num_rows: int, vocab_size: int, device: torch.device | str = "cpu"
    ) -> AcceptResult:
        """Return buffers. On a GPU the scratch is empty: `kernels.cuda.row_state.RowScratch` is used there."""
        B, R = num_batch, num_rows
        V = (vocab_size + 63) // 64 * 64 if torch.device(device).type == "cpu" else 0

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def floats(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        return cls(
            *(ints(B, R), ints(B), ints(B), ints(B), ints(B), floats(B, R)),
            *(ints(B, R, MAX_LOGPROBS), floats(B, R, MAX_LOGPROBS), floats(B, V), ints(B, V)),
        )


def pack_rules(stop: tuple[int, ...], bad: tuple[int, ...], words: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    """Return a slot's rules, int32: stop ids, ids never drawn, and id sequences that must not appear.

    Stop ids end a sequence, and are not drawn before `min_tokens`. The caller keeps the tensor while the slot is held.
    """
    flat = [len(stop), *stop, len(bad), *bad, len(words)]
    for word in words:
        flat += [len(word), *word]
    return torch.tensor(flat, dtype=torch.int32)


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What verification and drafting read and write besides logits: the same tensors at every step.

    `slots_B`, `num_drafts_B` int32 [B]; `drafts_BR`, `forced_BR` int32 and `kinds_BR` uint8 RowKind [>= B, R]; the
    bitmask row (slot, j) lies at mask_address + 4 * (slot * mask_strides[0] + j * mask_strides[1]) and is read only for
    kind APPLY; `history_SL` int32 has room for R more tokens than a sequence may have; `length_S` int32.
    """

    slots_B: torch.Tensor
    drafts_BR: torch.Tensor
    num_drafts_B: torch.Tensor
    kinds_BR: torch.Tensor
    forced_BR: torch.Tensor
    mask_address: int
    mask_strides: tuple[int, int]
    history_SL: torch.Tensor
    length_S: torch.Tensor
    params: SlotParams
    result: AcceptResult
    device: DeviceRows | None = None
    """Needed on a GPU; None on a CPU."""

    def arguments(self, logits_NV: torch.Tensor, num_rows: int) -> _Args:
        """Return the native arguments for logits [B * num_rows, V], bf16 or fp32; asserts every shape and dtype."""
        B, R = self.slots_B.shape[0], self.kinds_BR.shape[1]
        V, stride = logits_NV.shape[1], self.result.scratch_BV.shape[1]
        assert logits_NV.dtype in (torch.bfloat16, torch.float32), logits_NV.dtype
        assert logits_NV.shape[0] >= B * num_rows
        assert logits_NV.stride(1) == 1
        assert 1 <= num_rows <= R == self.drafts_BR.shape[1] == self.result.emitted_BR.shape[1]
        assert stride >= V
        assert self.kinds_BR.dtype == torch.uint8
        ints = (self.slots_B, self.drafts_BR, self.num_drafts_B, self.forced_BR, self.history_SL, self.length_S)
        assert all(t.dtype == torch.int32 and t.is_contiguous() for t in ints)
        p, r = self.params, self.result
        tensors = (
            *(self.history_SL, self.length_S, p.prompt_length_S, p.max_length_S, p.min_tokens_S, p.temperature_S),
            *(p.top_p_S, p.min_p_S, p.repetition_S, p.presence_S, p.frequency_S, p.top_k_S, p.seed_S),
            *(p.num_logprobs_S, p.rules_S, r.emitted_BR, r.num_emitted_B, r.num_accepted_B, r.finish_B, r.blocked_B),
            *(r.logprob_BR, r.top_ids_BRN, r.top_logprobs_BRN, r.scratch_BV, r.counts_BV),
        )
        batch = (logits_NV, self.slots_B, self.drafts_BR, self.num_drafts_B, self.kinds_BR, self.forced_BR)
        return _Args(
            *[address(t) for t in batch],
            self.mask_address,
            *[address(t) for t in tensors],
            *(logits_NV.stride(0), R, self.history_SL.stride(0), *self.mask_strides, stride),
            *(B, num_rows, V, int(logits_NV.dtype == torch.bfloat16)),
        )


def accept(logits_NV: torch.Tensor, step: StepTensors, *, num_rows: int) -> None:
    """Verify and sample; append what is emitted to `history_SL` and advance `length_S`; fill `result`.

    `logits_NV` [B * P, V], row b * P + j; `num_rows` is P; `num_drafts_B` < P. A row of kind DEFER, DEAD_END or ERROR
    emits nothing and ends the slot's step; a row without any legal token does the same as DEAD_END.
    """
    if step.device is not None:
        from kernels.cuda import accept as device  # a CPU install has no Triton

        return device.accept(logits_NV, step, num_rows=num_rows)
    native().lockstep_accept(ctypes.byref(step.arguments(logits_NV, num_rows)))


def draw_drafts(logits_BV: torch.Tensor, step: StepTensors, k: int, *, d2t_V: torch.Tensor | None = None) -> None:
    """Draw draft k of every lane into `drafts_BR[:, k]` by the target's own rule, from a drafter's logits [B, V].

    Position and noise are those that verification will use at row k; kinds and forced are read at [b, k]. The draft
    also goes into `history_SL` behind `length_S`, where the next draft's penalties find it. -1: nothing is legal.
    `d2t_V` int32 [Vd] is added to a column of `logits_BV` [B, Vd] to give its token, where the drafter's vocabulary is
    pruned. A row that leaves nothing of that vocabulary gives -1, too: no draft of it could be accepted.
    """
    if step.device is not None:
        from kernels.cuda import accept as device

        return device.draw_drafts(logits_BV, step, k, d2t_V=d2t_V)
    if d2t_V is not None:
        logits_BV = _widened(logits_BV, d2t_V, step, k)
    native().lockstep_draft(ctypes.byref(step.arguments(logits_BV, 1)), ctypes.c_int32(k))


def _widened(logits_BV: torch.Tensor, d2t_V: torch.Tensor, step: StepTensors, k: int) -> torch.Tensor:
    """Return logits over the target's vocabulary, -inf outside of the drafter's; a forced token is always there."""
    B, Vd = logits_BV.shape
    wide_BV = logits_BV.new_full((B, step.result.scratch_BV.shape[1]), -torch.inf)
    wide_BV[:, torch.arange(Vd) + d2t_V] = logits_BV
    forced_B1 = step.forced_BR[:B, k : k + 1].clamp(min=0).long()
    is_forced_B1 = step.kinds_BR[:B, k : k + 1] == _FORCED
    return wide_BV.scatter(1, forced_B1, torch.where(is_forced_B1, 0.0, wide_BV.gather(1, forced_B1)).to(wide_BV.dtype))


def gumbel_noise(seed: int, position: int, vocab_size: int) -> torch.Tensor:
    """Return the noise of one position, float32 [V]: what `accept` adds to logits / T."""
    out = torch.empty((vocab_size + 63) // 64 * 64, dtype=torch.float32)
    lib = native()
    lib.lockstep_gumbel(
        ctypes.c_uint64(seed), ctypes.c_uint32(position), ctypes.c_int64(out.numel()), ctypes.c_void_p(out.data_ptr())
    )
    return out[:vocab_size]
