"""The launches of a step on a GPU: one Triton kernel for each, see `StepLaunches`.

Importing this module imports Triton, which a CPU installation lacks. Only modules that build a device executor import
this module, and no other module of `gpu_engine` imports Triton. Not responsible for: the kernels (see kernels/cuda).

Shapes: S slots, R rows a slot, W' words of a mask row's stride.
"""

from __future__ import annotations

import torch

from gpu_engine.step.buffers import StepBatch
from gpu_engine.step.launches import PROPOSE, VERIFY
from gpu_engine.step.mask_rows import RowStore
from gpu_engine.step.post_buffers import PostBuffers
from kernels.accept import StepTensors
from kernels.cuda import posting
from kernels.cuda.accept import accept
from kernels.cuda.advance import advance
from kernels.cuda.branch import add_branch
from kernels.cuda.draft_tree import grow_tree, take_tree
from kernels.cuda.jump_forward import take_jump_forward
from kernels.cuda.logprobs import row_logprobs
from kernels.cuda.ngram import propose_ngram
from kernels.cuda.step_inputs import load_step
from kernels.logprobs import RowLogprobs
from kernels.step_tensors import DraftTree


class TritonLaunches:
    """One kernel a method.

    Args:
        source_NSRW: int32, the mask rows that `cache_rows` reads: the mapped segment's two buffers [2, S, R, W'], or
        the
            store's own rows [1, S, R, W'] when the wait has fetched them. None: without a grammar process.
    """

    def __init__(self, source_NSRW: torch.Tensor | None = None) -> None:
        self._source_NSRW = source_NSRW

    def load(
        self, batch: StepBatch, ids_BP: torch.Tensor, positions_BP: torch.Tensor, page_table_BN: torch.Tensor
    ) -> None:
        """See `StepLaunches.load`."""
        slot, lane = batch.slot, batch.lane
        load_step(
            slots_B=batch.slots_B,
            history_SL=slot.history_SL,
            length_S=slot.length_S,
            drafts_SR=slot.drafts_SR,
            num_drafts_S=slot.num_drafts_S,
            done_S=slot.done_S,
            page_table_SN=slot.page_table_SN,
            ids_BP=ids_BP,
            positions_BP=positions_BP,
            drafts_BR=lane.drafts_BR,
            num_drafts_B=lane.num_drafts_B,
            page_table_BN=page_table_BN,
            draft_limit_B=lane.draft_limit_B,
            parents_SR=slot.parents_SR if batch.tree is not None else None,
            tree=batch.tree,
        )

    def accept(self, batch: StepBatch, logits_NV: torch.Tensor, step: StepTensors) -> None:
        """See `StepLaunches.accept`."""
        accept(logits_NV, step, num_rows=batch.num_rows)

    def advance(self, batch: StepBatch, store: RowStore) -> None:
        """See `StepLaunches.advance`."""
        lane, r, B = batch.lane, batch.lane.result, batch.num_lanes
        lanes = (batch.slots_B, r.num_emitted_B[:B], r.finish_B[:B], r.blocked_B[:B], lane.drafting_B[:B])
        advance(*lanes, _rows(store).cached_SR)

    def pack(self, batch: StepBatch, store: RowStore, post: PostBuffers, k: int) -> None:
        """See `StepLaunches.pack`."""
        slot, lane, B = batch.slot, batch.lane, batch.num_lanes
        posting.pack_post(
            slots_B=batch.slots_B,
            guided_B=lane.guided_B[:B],
            drafting_B=lane.drafting_B[:B],
            slot_gens_B=lane.slot_gens_B[:B],
            drafts_BR=lane.drafts_BR[:B],
            num_drafts_B=lane.num_drafts_B[:B],
            history_SL=slot.history_SL,
            length_S=slot.length_S,
            prompt_length_S=slot.params.prompt_length_S,
            posted_S=slot.posted_S,
            rows=_rows(store),
            out=_tensors(post),
            k=k,
            # A lane that drafts has not stopped.
            done_S=slot.done_S if k == VERIFY else None,
            limits=(slot.jump_forward_limit_S, slot.params.max_length_S) if k == PROPOSE else None,
            max_rows=batch.max_rows,
            tree=batch.tree if k == VERIFY else None,
        )

    def cache_rows(
        self, batch: StepBatch, store: RowStore, post: PostBuffers, k: int, post_seq: torch.Tensor | None
    ) -> None:
        """See `StepLaunches.cache_rows`. Copies the requested mask rows into the store."""
        assert self._source_NSRW is not None, "a guided lane without a grammar process"
        lane, B = batch.lane, batch.num_lanes
        posting.cache_rows(
            slots_B=batch.slots_B,
            guided_B=lane.guided_B[:B],
            drafting_B=lane.drafting_B[:B],
            answer=_tensors(post),
            seq=post.awaited,
            source_NSRW=self._source_NSRW,
            rows=_rows(store),
            kinds_BR=lane.kinds_BR[:B],
            forced_BR=lane.forced_BR[:B],
            k=k,
            reported_seq=post_seq,
        )

    def take_jump_forward(self, batch: StepBatch, post: PostBuffers, vocab_size: int) -> None:
        """See `StepLaunches.take_jump_forward`."""
        slot, lane, B = batch.slot, batch.lane, batch.num_lanes
        take_jump_forward(
            slots_B=batch.slots_B,
            num_emitted_B=lane.result.num_emitted_B[:B],
            posted_B=post.slots,
            need_rows_B=post.need_rows,
            kinds_BR=post.kinds,
            forced_BR=post.forced,
            length_S=slot.length_S,
            history_SL=slot.history_SL,
            drafts_SR=slot.drafts_SR,
            num_drafts_S=slot.num_drafts_S,
            num_jump_forward_B=lane.num_jump_forward_B[:B],
            vocab_size=vocab_size,
        )

    def drop_drafts(self, batch: StepBatch) -> None:
        """Raise NotImplementedError: a captured step that proposes nothing follows no step with drafts."""
        raise NotImplementedError("only steps that run at once drop drafts")

    def row_logprobs(self, logits_NV: torch.Tensor, rows: RowLogprobs) -> None:
        """See `StepLaunches.row_logprobs`."""
        row_logprobs(logits_NV, rows)

    def propose_ngram(self, batch: StepBatch, ngram_max: int, *, jump_forward: bool) -> None:
        """See `StepLaunches.propose_ngram`."""
        slot = batch.slot
        propose_ngram(
            slots_B=batch.slots_B,
            history_SL=slot.history_SL,
            length_S=slot.length_S,
            prompt_length_S=slot.params.prompt_length_S,
            draft_limit_S=slot.draft_limit_S,
            max_length_S=slot.params.max_length_S,
            drafts_SR=slot.drafts_SR,
            num_drafts_S=slot.num_drafts_S,
            ngram_max=ngram_max,
            max_rows=batch.max_rows,
            num_jump_forward_B=batch.lane.num_jump_forward_B if jump_forward else None,
        )
        if slot.parents_SR is not None:
            add_branch(
                slots_B=batch.slots_B,
                guided_B=batch.lane.guided_B[: batch.num_lanes],
                history_SL=slot.history_SL,
                length_S=slot.length_S,
                prompt_length_S=slot.params.prompt_length_S,
                draft_limit_S=slot.draft_limit_S,
                max_length_S=slot.params.max_length_S,
                drafts_SR=slot.drafts_SR,
                num_drafts_S=slot.num_drafts_S,
                parents_SR=slot.parents_SR,
                ngram_max=ngram_max,
                max_rows=batch.max_rows,
                num_jump_forward_B=batch.lane.num_jump_forward_B if jump_forward else None,
            )

    def grow_tree(
        self, batch: StepBatch, step: StepTensors, tree: DraftTree, logits_NV: torch.Tensor, k: int,
        shape: tuple[int, int], d2t_V: torch.Tensor | None, *, jump_forward: bool,
    ) -> None:  # fmt: skip
        """See `TreeLaunches.grow_tree`."""
        slot, lane, (width, levels) = batch.slot, batch.lane, shape
        grow_tree(
            logits_NV=logits_NV,
            step=step,
            tree=tree,
            k=k,
            drafting_B=lane.drafting_B[: batch.num_lanes],
            drafts_SR=slot.drafts_SR,
            width=width,
            levels=levels,
            d2t_V=d2t_V,
            num_jump_forward_B=lane.num_jump_forward_B if jump_forward else None,
        )

    def take_tree(
        self, batch: StepBatch, step: StepTensors, tree: DraftTree, shape: tuple[int, int], max_drafts: int, *,
        jump_forward: bool,
    ) -> None:  # fmt: skip
        """See `TreeLaunches.take_tree`."""
        slot, lane, (width, levels) = batch.slot, batch.lane, shape
        assert slot.parents_SR is not None
        take_tree(
            step=step,
            tree=tree,
            drafting_B=lane.drafting_B[: batch.num_lanes],
            draft_limit_S=slot.draft_limit_S,
            drafts_SR=slot.drafts_SR,
            num_drafts_S=slot.num_drafts_S,
            parents_SR=slot.parents_SR,
            width=width,
            levels=levels,
            max_drafts=max_drafts,
            num_jump_forward_B=lane.num_jump_forward_B if jump_forward else None,
        )


def _rows(store: RowStore) -> posting.CachedRows:
    S = len(store.mask_SRW)
    return posting.CachedRows(store.mask_SRW, store.kind_SR[:S], store.forced_SR[:S], store.cached_SR[:S])


def _tensors(post: PostBuffers) -> posting.PostTensors:
    inputs = (post.slots, post.slot_gens, post.commit_pos, post.n_commit, post.n_draft, post.need_rows, post.tokens)
    return posting.PostTensors(*inputs, post.kinds, post.forced)
