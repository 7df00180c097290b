"""Post, wait and fetch as kernels on the mapped segment: the step plane without a host function. See flags.cu.

One invariant: every launch takes addresses that live as long as the graph that captured it. The caller registers the
segment with CUDA first and passes its layout's numbers, so that this package knows no layout of its own.

Shapes: B lanes, R rows a slot, S slots, W' words of a row's stride.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import torch

from kernels.cuda.nvrtc import INT, POINTER, UINT, ULONG, Kernel, kernel

_SOURCE = Path(__file__).with_name("flags.cu")


@dataclass(frozen=True, slots=True)
class SegmentNumbers:
    """Where things are in the mapped segment, as the device sees it. The order is that of the enum in flags.cu."""

    words: int
    rec: int
    ans: int
    mask: int
    rec_entry_stride: int
    num_slots: int
    num_rows: int
    num_recs: int
    rec_head_bytes: int
    rec_stride: int
    ans_stride: int
    ans_forced: int
    mask_buffer_bytes: int
    row_stride: int

    def on_device(self) -> torch.Tensor:
        """Return the numbers as the kernels read them: int64 [14] on the current device."""
        return torch.tensor([getattr(self, f.name) for f in fields(self)], dtype=torch.int64, device="cuda")


class DeviceFlags:
    """The three kernels, bound to one segment. Compiles at construction; owns the counter and the device mask rows."""

    def __init__(self, numbers: SegmentNumbers, start_seq: int = 0) -> None:
        self.numbers = numbers
        self.cfg = numbers.on_device()
        self.counter = torch.tensor([start_seq, 0, 0, 0, 0, 0], dtype=torch.int64, device="cuda")
        """Last posted sequence, the one to wait for, nanoseconds waited, lanes that were not answered in time, of the
        nanoseconds those for drafts, the device's time up to which they are counted."""
        self.mask_SRW = torch.zeros(
            numbers.num_slots, numbers.num_rows, numbers.row_stride // 4, dtype=torch.int32, device="cuda"
        )
        """Rows of the last waits and fetches, [S, R, W']."""
        self._post: Kernel = kernel(_SOURCE, "lockstep_post", [POINTER] * 9 + [INT] * 2)
        self._wait: Kernel = kernel(_SOURCE, "lockstep_wait", [POINTER] * 7 + [UINT, ULONG, UINT])
        self._fetch: Kernel = kernel(_SOURCE, "lockstep_fetch", [POINTER] * 5 + [UINT])

    def post(
        self,
        slots_B: torch.Tensor,
        slot_gens_B: torch.Tensor,
        commit_pos_B: torch.Tensor,
        n_commit_B: torch.Tensor,
        n_draft_B: torch.Tensor,
        need_rows_B: torch.Tensor,
        tokens_BT: torch.Tensor,
        stage: int,
    ) -> None:
        """Write the records of lanes with slot >= 0 and release their sequence. int32 on the device, tokens [B, 2R]."""
        tensors = (slots_B, slot_gens_B, commit_pos_B, n_commit_B, n_draft_B, need_rows_B, tokens_BT)
        assert all(t.dtype == torch.int32 and t.is_contiguous() for t in tensors)
        assert tokens_BT.shape == (len(slots_B), 2 * self.numbers.num_rows)
        addresses = [t.data_ptr() for t in (self.cfg, self.counter, *tensors)]
        self._post((1, 1), 256, *addresses, len(slots_B), stage)

    def wait(
        self,
        slots_B: torch.Tensor,
        slot_gens_B: torch.Tensor,
        kinds_BR: torch.Tensor,
        forced_BR: torch.Tensor,
        *,
        rows_wanted: int,
        timeout_ns: int,
        draft: bool = False,
    ) -> None:
        """Wait for the last post's answers and fetch APPLY rows into `mask_SRW`; what is not there in time is DEFER.

        `draft`: the time counts as that of drafts, too.
        """
        B, R = kinds_BR.shape
        assert self.numbers.num_rows == R
        assert kinds_BR.dtype == torch.uint8
        assert all(t.dtype == torch.int32 for t in (slots_B, slot_gens_B, forced_BR))
        tensors = (self.cfg, self.counter, slots_B, slot_gens_B, kinds_BR, forced_BR, self.mask_SRW)
        self._wait((B, R), 256, *[t.data_ptr() for t in tensors], rows_wanted, timeout_ns, int(draft))

    def fetch(self, seq: torch.Tensor, slots_B: torch.Tensor, kinds_BR: torch.Tensor, *, rows_wanted: int) -> None:
        """Fetch the APPLY rows of a sequence (int64 [1], device) that a host function has waited for."""
        B, R = kinds_BR.shape
        assert self.numbers.num_rows == R
        tensors = (self.cfg, seq, slots_B, kinds_BR, self.mask_SRW)
        self._fetch((B, R), 256, *[t.data_ptr() for t in tensors], rows_wanted)
