"""Post, wait and fetch as kernels on the mapped segment: the step plane without a host function. See flags.cu.

Invariant: every address that a launch takes lives as long as the graph that captured the launch. The caller registers
the segment with CUDA first and passes the numbers of its layout, so that this package has no layout of its own.
Not responsible for: packing a post, or using an answer (see posting.py).

Shapes: B lanes, R rows a slot, S slots, W' words of a row's stride.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import torch

from kernels.cuda.nvrtc import INT, POINTER, UINT, ULONG, Kernel, kernel

COUNTER_WORDS = 6
"""Length of `DeviceFlags.counter`; the enum in flags.cu names the words."""

_SOURCE = Path(__file__).with_name("flags.cu")


@dataclass(frozen=True, slots=True)
class SegmentNumbers:
    """Addresses and strides of the mapped segment, as the device sees them.
    The order is that of the enum in flags.cu."""

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

    def values(self) -> list[int]:
        """Return the numbers in the order in which the kernels read them."""
        return [getattr(self, f.name) for f in fields(self)]


def refusal(refused: torch.Tensor) -> tuple[int, int] | None:
    """Return (lane, negative status as of `ls_post`) of the word that the post kernel writes, or None for a valid post.

    `refused` is int64 [1] in host memory. The read does not wait for the device.
    """
    word = int(refused)
    return (word >> 8, -(word & 0xFF)) if word else None


def wait_launch(num_lanes: int, rows_wanted: int, *, fetches: bool) -> tuple[tuple[int, int], int]:
    """Return the grid and the threads per block of a wait.

    Where mask rows are copied, each wanted row has its own block. Otherwise one small block reads all rows of a
    lane, so that the blocks of a large batch fit on the device at once.
    """
    return ((num_lanes, max(rows_wanted.bit_length(), 1)), 256) if fetches else ((num_lanes, 1), 32)


class DeviceFlags:
    """The three kernels, bound to one segment. Compiles at construction; owns the counter and the device mask rows.

    Args:
        numbers: of the registered segment.
        start_seq: the newest sequence in the segment (`EngineEnd.last_seq`): the first post has the next one.
    """

    def __init__(self, numbers: SegmentNumbers, start_seq: int) -> None:
        self.numbers = numbers
        self.cfg = torch.tensor(numbers.values(), dtype=torch.int64, device="cuda")
        self.counter = torch.tensor([start_seq, *[0] * (COUNTER_WORDS - 1)], dtype=torch.int64, device="cuda")
        """int64: last posted sequence, sequence to wait for, nanoseconds waited, lanes that were not answered in time,
        time up to which the nanoseconds are counted, start of the present wait."""
        self.refused = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        """Cleared by a verify post, and written by every invalid post; read it with `refusal`."""
        self.mask_SRW = torch.zeros(
            numbers.num_slots, numbers.num_rows, numbers.row_stride // 4, dtype=torch.int32, device="cuda"
        )
        """Rows of the last waits and fetches, [S, R, W']."""
        self._post: Kernel = kernel(_SOURCE, "lockstep_post", [POINTER] * 10 + [INT] * 2)
        self._wait: Kernel = kernel(_SOURCE, "lockstep_wait", [POINTER] * 7 + [UINT, ULONG])
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
        """Write the records of lanes with slot >= 0 and release their sequence. int32 on the device, tokens [B, 2R].

        When a record is invalid, nothing is posted: `refused` names its lane, and the wait defers every lane.
        """
        tensors = (slots_B, slot_gens_B, commit_pos_B, n_commit_B, n_draft_B, need_rows_B, tokens_BT)
        assert all(t.dtype == torch.int32 and t.is_contiguous() for t in tensors)
        assert tokens_BT.shape == (len(slots_B), 2 * self.numbers.num_rows)
        addresses = [t.data_ptr() for t in (self.cfg, self.counter, *tensors, self.refused)]
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
        fetches: bool = True,
    ) -> None:
        """Wait for the last post's answers and copy APPLY rows into `mask_SRW`;
        rows that are missing at the end are DEFER.

        `timeout_ns` counts from the first look at a missing answer, for all lanes together. Only rows whose bit is set
        in `rows_wanted` are read and written. `fetches` False: no APPLY row is expected, as in the answer to PROPOSE.
        """
        B, R = kinds_BR.shape
        assert self.numbers.num_rows == R
        assert kinds_BR.dtype == torch.uint8
        assert all(t.dtype == torch.int32 for t in (slots_B, slot_gens_B, forced_BR))
        tensors = (self.cfg, self.counter, slots_B, slot_gens_B, kinds_BR, forced_BR, self.mask_SRW)
        grid, threads = wait_launch(B, rows_wanted & ((1 << R) - 1), fetches=fetches)
        self._wait(grid, threads, *[t.data_ptr() for t in tensors], rows_wanted, timeout_ns)

    def fetch(self, seq: torch.Tensor, slots_B: torch.Tensor, kinds_BR: torch.Tensor, *, rows_wanted: int) -> None:
        """Fetch the APPLY rows of a sequence (int64 [1], device) that a host function has waited for."""
        B, R = kinds_BR.shape
        assert self.numbers.num_rows == R
        tensors = (self.cfg, seq, slots_B, kinds_BR, self.mask_SRW)
        self._fetch((B, R), 256, *[t.data_ptr() for t in tensors], rows_wanted)
