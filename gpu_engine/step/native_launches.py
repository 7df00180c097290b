"""The launches of a step on a CPU: short native calls, see `StepLaunches`.

Invariant: no method calls an operation of torch. Not responsible for: the arithmetic (see
kernels/step_launches.py, kernels/accept.py). The tests compare each method with plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gpu_engine.step.buffers import LaneBuffers, SlotBuffers, StepBatch
from gpu_engine.step.mask_rows import RowStore
from gpu_engine.step.post_buffers import PostBuffers
from kernels.accept import StepTensors, accept
from kernels.logprobs import RowLogprobs, row_logprobs
from kernels.step_launches import LaneArgs, NativeStep, PostArgs, SlotArgs, StoreArgs

MaskAddress = Callable[[int], int]


class NativeLaunches:
    """One native call a method.

    Args:
        slot, lane: the buffers of every batch; they never move.
        mask_address: returns where the mask rows of a sequence number start, [S, R, W'] in shared memory, for
            `cache_rows`. None: without a grammar process.
    """

    def __init__(self, slot: SlotBuffers, lane: LaneBuffers, mask_address: MaskAddress | None = None) -> None:
        self._slot, self._lane, self._mask_address = slot, lane, mask_address
        self._step = NativeStep(_slot_args(slot), _lane_args(lane))
        self._stores: dict[int, tuple[RowStore, StoreArgs]] = {}
        self._posts: dict[int, tuple[PostBuffers, PostArgs]] = {}
        self._arrays: dict[int, tuple[torch.Tensor, np.ndarray[Any, np.dtype[Any]]]] = {}
        """The three by identity, with the object, so that no other one gets the same identity."""

    def load(
        self, batch: StepBatch, ids_BP: torch.Tensor, positions_BP: torch.Tensor, page_table_BN: torch.Tensor
    ) -> None:
        """See `StepLaunches.load`."""
        assert batch.slot is self._slot
        assert batch.lane is self._lane
        self._step.load(batch.num_lanes, ids_BP, positions_BP, page_table_BN)

    def accept(self, batch: StepBatch, logits_NV: torch.Tensor, step: StepTensors) -> None:
        """See `StepLaunches.accept`."""
        # The slot may have ended in a step that the host has not read yet.
        self._step.block_ended(batch.num_lanes)
        accept(logits_NV, step, num_rows=batch.num_rows)
        self._step.mark_ended(batch.num_lanes)

    def advance(self, batch: StepBatch, store: RowStore) -> None:
        """See `StepLaunches.advance`."""
        self._step.advance(batch.num_lanes, self._store_args(store) if batch.any_guided else None)

    def pack(self, batch: StepBatch, store: RowStore, post: PostBuffers, k: int) -> None:
        """See `StepLaunches.pack`."""
        self._step.pack(batch.num_lanes, self._store_args(store), self._post_args(post), k, batch.max_rows)

    def cache_rows(
        self, batch: StepBatch, store: RowStore, post: PostBuffers, k: int, post_seq: torch.Tensor | None
    ) -> None:
        """See `StepLaunches.cache_rows`. Copies the requested mask rows into the store."""
        seq, masks = self._array_of(post.awaited).item(), 0
        if post_seq is not None:
            self._array_of(post_seq)[0] = seq
        if seq:
            assert self._mask_address is not None, "a guided lane without a grammar process"
            masks = self._mask_address(seq)
        self._step.cache_rows(batch.num_lanes, self._store_args(store), self._post_args(post), k, masks)

    def take_jump_forward(self, batch: StepBatch, post: PostBuffers, vocab_size: int) -> None:
        """See `StepLaunches.take_jump_forward`."""
        self._step.take_jump_forward(batch.num_lanes, self._post_args(post), vocab_size)

    def drop_drafts(self, batch: StepBatch) -> None:
        """See `StepLaunches.drop_drafts`."""
        self._step.drop_drafts(batch.num_lanes)

    def row_logprobs(self, logits_NV: torch.Tensor, rows: RowLogprobs) -> None:
        """See `StepLaunches.row_logprobs`."""
        row_logprobs(logits_NV, rows)

    def propose_ngram(self, batch: StepBatch, ngram_max: int, *, jump_forward: bool) -> None:
        """Raise NotImplementedError: on a CPU the drafter `ngram` is drafters/suffix.py."""
        raise NotImplementedError("on a CPU drafts come from the suffix votes")

    def _array_of(self, tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[Any]]:
        """Return the tensor as an array, for its one number."""
        if id(tensor) not in self._arrays:
            self._arrays[id(tensor)] = tensor, tensor.numpy()
        return self._arrays[id(tensor)][1]

    def _store_args(self, store: RowStore) -> StoreArgs:
        if id(store) not in self._stores:
            assert store.mask_SRW.is_contiguous()
            self._stores[id(store)] = (
                store,
                StoreArgs.of(
                    {
                        "masks": store.mask_SRW,
                        "kinds": store.kind_SR,
                        "forced": store.forced_SR,
                        "cached": store.cached_SR,
                    },
                    mask_words=store.mask_SRW.shape[2],
                ),
            )
        return self._stores[id(store)][1]

    def _post_args(self, post: PostBuffers) -> PostArgs:
        if id(post) not in self._posts:
            names = (
                "slots",
                "slot_gens",
                "commit_pos",
                "n_commit",
                "n_draft",
                "need_rows",
                "tokens",
                "kinds",
                "forced",
            )
            self._posts[id(post)] = post, PostArgs.of({name: getattr(post, name) for name in names})
        return self._posts[id(post)][1]

    def __repr__(self) -> str:
        return f"<NativeLaunches {self._step}>"


def _slot_args(slot: SlotBuffers) -> SlotArgs:
    tensors = {
        "history": slot.history_SL,
        "length": slot.length_S,
        "drafts": slot.drafts_SR,
        "num_drafts": slot.num_drafts_S,
        "posted": slot.posted_S,
        "jump_forward_limit": slot.jump_forward_limit_S,
        "prompt_length": slot.params.prompt_length_S,
        "max_length": slot.params.max_length_S,
        "page_table": slot.page_table_SN,
        "done": slot.done_S,
    }
    (S, R), L, N = slot.drafts_SR.shape, slot.history_SL.shape[1], slot.page_table_SN.shape[1]
    return SlotArgs.of(tensors, history_stride=L, table_stride=N, num_slots=S, num_rows=R)


def _lane_args(lane: LaneBuffers) -> LaneArgs:
    r = lane.result
    return LaneArgs.of({
        "slots": lane.slots_B,
        "draft_limit": lane.draft_limit_B,
        "slot_gens": lane.slot_gens_B,
        "guided": lane.guided_B,
        "drafting": lane.drafting_B,
        "kinds": lane.kinds_BR,
        "drafts": lane.drafts_BR,
        "num_drafts": lane.num_drafts_B,
        "forced": lane.forced_BR,
        "num_jump_forward": lane.num_jump_forward_B,
        "num_emitted": r.num_emitted_B,
        "finish": r.finish_B,
        "blocked": r.blocked_B,
    })  # fmt: skip
