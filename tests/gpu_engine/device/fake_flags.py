"""`kernels.cuda.flags.DeviceFlags` over CPU tensors: the same calls, made with the native functions.

Invariant: like the kernels, it copies a row only for kind APPLY, and every other row of `mask_SRW` is unchanged.
"""

from __future__ import annotations

import torch

from kernels.cuda.flags import COUNTER_WORDS
from shared_mem.channel import EngineEnd
from shared_mem.errors import InvalidField
from shared_mem.layout import RowKind, Stage
from tests.gpu_engine.device.happens_before import hint
from tests.gpu_engine.device.recorded_stream import opaque


class FakeFlags:
    def __init__(self, channel: EngineEnd) -> None:
        layout = channel.layout
        self._channel = channel
        self._arrays = channel.batch_arrays(layout.num_slots * 2)
        self.mask_SRW = torch.zeros(layout.num_slots, layout.num_rows, layout.row_stride // 4, dtype=torch.int32)
        self.counter = torch.zeros(COUNTER_WORDS, dtype=torch.int64)
        self.refused = torch.zeros(1, dtype=torch.int64)
        hint(self.refused)
        self.waits: list[tuple[int, bool]] = []
        """`rows_wanted` and `fetches` of every wait."""

    @opaque
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
        a, B = self._arrays, len(slots_B)
        for target, source in (
            (a.slots, slots_B),
            (a.slot_gens, slot_gens_B),
            (a.commit_pos, commit_pos_B),
            (a.n_commit, n_commit_B),
            (a.n_draft, n_draft_B),
            (a.need_rows, need_rows_B),
            (a.tokens, tokens_BT),
        ):
            target[:B] = source.numpy()
        if stage == Stage.VERIFY:
            self.refused.zero_()
        try:
            self.counter[1] = self._channel.post_batch(a, B, stage)
        except InvalidField:
            self.counter[1] = 0
            self.refused.fill_(a.post_args.bad_lane << 8 | -a.post_args.status)
        self.counter[0] = self._channel.last_seq

    @opaque
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
        a, B, seq = self._arrays, len(slots_B), int(self.counter[1])
        self.waits.append((rows_wanted, fetches))
        a.slots[:B], a.slot_gens[:B] = slots_B.numpy(), slot_gens_B.numpy()
        answer = self._channel.await_batch(a, seq, B, timeout_s=timeout_ns / 1e9)
        self.counter[2] += answer.waited_ns
        self.counter[3] += answer.num_missing
        for row in range(kinds_BR.shape[1]):
            if rows_wanted >> row & 1:
                kinds_BR[:, row] = torch.from_numpy(answer.kinds[:, row])
                forced_BR[:, row] = torch.from_numpy(answer.forced[:, row])
        self._copy(seq, slots_B, kinds_BR, rows_wanted)

    @opaque
    def fetch(self, seq: torch.Tensor, slots_B: torch.Tensor, kinds_BR: torch.Tensor, *, rows_wanted: int) -> None:
        self._copy(int(seq), slots_B, kinds_BR, rows_wanted)

    def _copy(self, seq: int, slots_B: torch.Tensor, kinds_BR: torch.Tensor, rows_wanted: int) -> None:
        masks_SRW = torch.from_numpy(self._channel.mask_rows(seq))
        for lane, slot in enumerate(slots_B.tolist()):
            for row in range(kinds_BR.shape[1]):
                wanted = rows_wanted >> row & 1 and slot >= 0
                if wanted and kinds_BR[lane, row] == int(RowKind.APPLY):
                    self.mask_SRW[slot, row] = masks_SRW[slot, row]
