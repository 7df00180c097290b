"""The static tensors of the step program, for each slot and for each lane of a batch.

A lane is an index into the batch; a slot belongs to a sequence. Invariant: nothing here is allocated or moved after
the start, so a captured program may contain the addresses. Each field names its writer. Not responsible for: the values
in it (see launches.py and core/running.py).

Shapes: S slots, B lanes of this step, R rows a slot (max(K, F) + 1), P rows of this step, L tokens of a full sequence,
N pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_engine.api.request import Request
from gpu_engine.model.attention import PromptRows
from kernels.accept import AcceptResult, SlotParams
from kernels.logprobs import BeamRows
from kernels.step_tensors import TreeRows


@dataclass(frozen=True, slots=True)
class SlotBuffers:
    """The numbers of a sequence while it holds its slot."""

    history_SL: torch.Tensor
    """int32, prompt then answer. The engine writes the prompt, the step appends."""
    length_S: torch.Tensor
    """int32, tokens in history. The engine when it assigns the slot, then the step."""
    drafts_SR: torch.Tensor
    """int32, proposed for the next step. Writer: the drafter."""
    num_drafts_S: torch.Tensor
    """int32. Writer: the drafter; the engine zeroes it when it assigns the slot."""
    draft_limit_S: torch.Tensor
    """int32, drafts of a step up to which a drafter may add its own, at most K.
    Writer: the engine, at the assignment."""
    jump_forward_limit_S: torch.Tensor
    """int32, jump-forward drafts of a step; more than `draft_limit_S` only where that is K. Writer: the
    engine, at the assignment."""
    done_S: torch.Tensor
    """bool: the sequence has ended on the device, though the host may not know yet; later steps do not change the slot.
    The engine clears it when it assigns the slot, the step sets it."""
    posted_S: torch.Tensor
    """int32, answer tokens that were posted to the sidecar. The engine when a matcher is bound, then the step."""
    page_table_SN: torch.Tensor
    """int32, page numbers. Writer: the engine, before a step that needs them."""
    params: SlotParams
    """Writer: the engine, when it assigns the slot."""
    adapter_S: torch.Tensor
    """int32, the number of the LoRA adapter, 0 for none. Writer: the engine, when it assigns the slot; read where the
    model takes adapters alone."""
    parents_SR: torch.Tensor | None = None
    """int32, the parent row of each draft, where the drafts that a step verifies are a tree: on a GPU with
    draft_tree=on. None: they are a chain. Writer: the drafter."""

    @classmethod
    def allocate(
        cls,
        num_slots: int,
        num_rows: int,
        max_model_len: int,
        page_size: int,
        device: torch.device | str = "cpu",
        *,
        trees: bool = False,
    ) -> SlotBuffers:
        """Return zeroed buffers in the device's memory."""

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            history_SL=ints(num_slots, max_model_len + num_rows),
            length_S=ints(num_slots),
            drafts_SR=ints(num_slots, num_rows),
            num_drafts_S=ints(num_slots),
            draft_limit_S=ints(num_slots),
            jump_forward_limit_S=ints(num_slots),
            done_S=torch.zeros(num_slots, dtype=torch.bool, device=device),
            posted_S=ints(num_slots),
            page_table_SN=ints(num_slots, -(-(max_model_len + num_rows) // page_size)),
            params=SlotParams.allocate(num_slots, device),
            adapter_S=ints(num_slots),
            parents_SR=ints(num_slots, num_rows) if trees else None,
        )


@dataclass(frozen=True, slots=True)
class LaneInputs:
    """What the engine writes for each lane before a step, side by side in one memory. The fields are views."""

    memory: torch.Tensor
    """uint8."""
    slots_B: torch.Tensor
    slot_gens_B: torch.Tensor
    draft_limit_B: torch.Tensor
    guided_B: torch.Tensor

    @staticmethod
    def num_bytes(num_lanes: int) -> int:
        """Return the size of so many lanes: three int32 and a bool each."""
        return 13 * num_lanes

    @classmethod
    def of(cls, memory: torch.Tensor) -> LaneInputs:
        """Return the views of `memory`, of `num_bytes` bytes."""
        L = len(memory) // 13
        slots_B, slot_gens_B, draft_limit_B = memory[: 12 * L].view(torch.int32).view(3, L)
        return cls(memory, slots_B, slot_gens_B, draft_limit_B, memory[12 * L :].view(torch.bool))


@dataclass(frozen=True, slots=True)
class LaneBuffers:
    """The inputs and results of one step, lane by lane; a step uses the first B lanes."""

    slots_B: torch.Tensor
    """int32. Writer: the engine, before the step."""
    guided_B: torch.Tensor
    """bool, the lane waits for rows. Writer: the engine, before the step."""
    draft_limit_B: torch.Tensor
    """int32, the most drafts that the step verifies; R before the first step. Writer: the engine, before the step."""
    slot_gens_B: torch.Tensor
    """int32. Writer: the engine, before the step."""
    drafting_B: torch.Tensor
    """bool, the lane goes on to draft. Writer: the step, after accept."""
    drafts_BR: torch.Tensor
    """int32, the drafts under verification, then the new ones. Writer: the step."""
    num_drafts_B: torch.Tensor
    """int32. Writer: the step."""
    kinds_BR: torch.Tensor
    """uint8 RowKind. Writer: the sync."""
    forced_BR: torch.Tensor
    """int32. Writer: the sync."""
    num_jump_forward_B: torch.Tensor
    """int32, jump-forward tokens, which the drafter proposes before its own. They are in `drafts_SR`
    and in `history_SL` after the last token. -1: the lane emitted nothing and its drafts are unchanged, since mask
    rows are cached for them. Writer: the sync, in steps with a guided lane; 0 without jump-forward."""
    result: AcceptResult
    """Writer: the step."""
    inputs: torch.Tensor
    """uint8: the memory of what the engine writes before a step, so that one copy fills it; see `LaneInputs`."""
    tree: TreeRows | None = None
    """Of the drafts under verification, where they are a tree. Writer: the step."""

    @classmethod
    def allocate(
        cls,
        num_lanes: int,
        num_rows: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        *,
        trees: bool = False,
    ) -> LaneBuffers:
        """Return zeroed buffers in the device's memory."""

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        inputs = LaneInputs.of(torch.zeros(LaneInputs.num_bytes(num_lanes), dtype=torch.uint8, device=device))
        inputs.draft_limit_B.fill_(num_rows)
        return cls(
            inputs=inputs.memory,
            slots_B=inputs.slots_B,
            guided_B=inputs.guided_B,
            draft_limit_B=inputs.draft_limit_B,
            slot_gens_B=inputs.slot_gens_B,
            drafting_B=torch.zeros(num_lanes, dtype=torch.bool, device=device),
            drafts_BR=ints(num_lanes, num_rows),
            num_drafts_B=ints(num_lanes),
            kinds_BR=torch.zeros(num_lanes, num_rows, dtype=torch.uint8, device=device),
            forced_BR=ints(num_lanes, num_rows),
            num_jump_forward_B=ints(num_lanes),
            result=AcceptResult.allocate(num_lanes, num_rows, vocab_size, device),
            tree=TreeRows.allocate(num_lanes, num_rows, device) if trees else None,
        )


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step's cut of the static buffers: the first `num_lanes` lanes, `num_rows` rows each."""

    slot: SlotBuffers
    lane: LaneBuffers
    num_lanes: int
    num_rows: int
    """P: 1 + the largest number of drafts of a lane."""
    any_guided: bool
    max_rows: int = 16
    """Rows that the next step will have for a lane: a drafter proposes at most one less. 1: nothing is proposed."""
    place_B: torch.Tensor | None = None
    """int64 [B], each lane's slot, where the launcher knows that no lane is padding; None: see `launches.place_of`."""
    prompts: PromptRows | None = None
    """Tokens of prompts that share the step's forward, on a stream that runs at once."""
    max_links: int = 15
    """The most drafts of a lane that a drafting network computes."""
    host_processed: tuple[Request | None, ...] = ()
    """The requests of the lanes whose logits processors the host calls; empty: no lane has any."""
    captured_processing: bool = False
    """The launches include the captured logits processors. Never together with `host_processed`."""
    adapted: bool = True
    """The launches include the products of LoRA adapters, where the model takes some; False: no lane has one."""
    beams: BeamRows | None = None
    """Lanes that give candidates in place of tokens. Such a step is never captured."""
    late_lanes: tuple[int, ...] = ()
    """Lanes that are posted after the forward. Such a step is never captured."""

    @property
    def tree(self) -> TreeRows | None:
        """The tree of the drafts of each lane; None: they are chains, or the step verifies none."""
        return self.lane.tree if self.num_rows > 1 else None

    @property
    def slots_B(self) -> torch.Tensor:
        """int32 slot numbers of the lanes in use."""
        return self.lane.slots_B[: self.num_lanes]
