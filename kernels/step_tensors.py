"""The tensors and constants of one verification step, shared by the CPU's and the GPU's kernels.

Invariant: plain data; every tensor keeps its address, and each field names its writer. Not responsible for: the
arithmetic over it (see kernels/accept.py, kernels/cuda/accept.py).

Shapes: B batch entries, S slots, R rows a slot, P rows of this step (P <= R), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch

from kernels.cuda.row_state import DeviceRows
from kernels.row_kinds import ALL

MAX_LOGPROBS = 20
"""Largest number of alternatives of a token whose log-probabilities are returned."""
MASKED_LOGPROBS = 32
"""Added to a slot's number of alternatives: its log-probabilities are over the legal tokens of each row."""
RUN_ON, STOP_TOKEN, STOP_LENGTH, STOP_STEERED = 0, 1, 2, 3
"""Values of `AcceptResult.finish_B`; STOP_STEERED is a stop token at a row whose `forced` is STEERED."""
PREFIX = np.dtype([("token", np.int32), ("next", np.int32), ("child", np.int32), ("log_mass", np.float32)])
"""A known prefix of the answers of an exact slot, as `struct prefix` in kernels/native/accept.h.

Prefix 0 is the empty one, `child` is the first prefix with one more token, and `next` the next one with the same prefix
before its token; -1: none. A draw adds `log_mass` to the logit of `token`."""
PARENT_SHIFT = 24
"""Of a node in a record: the bits from here on are the parent's row, those below the token."""
TREE_ROWS, TREE_WIDTH = 16, 4
"""The most nodes that a head expands for one tree, which is the most rows that attention takes for a tree; and the most
candidates after a node."""
TREE_CANDIDATES = TREE_WIDTH + TREE_ROWS * TREE_WIDTH


@dataclass(frozen=True, slots=True)
class SlotParams:
    """Constants of a sequence while it has its slot. Writer: the engine, when a sequence gets the slot. All [S]."""

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
    num_logprobs_S: torch.Tensor  # int32, -1: none; see MASKED_LOGPROBS
    rules_S: torch.Tensor  # int64, address of the slot's rules (see `pack_rules`), 0: none
    prefixes_S: torch.Tensor  # int64, on a CPU the address of known prefixes (see `PREFIX`), 0: the slot is not exact

    @classmethod
    def allocate(cls, num_slots: int, device: torch.device | str = "cpu") -> SlotParams:
        """Return zeroed parameters. On a GPU `rules_S` is not read: kernels/cuda/row_state.py has the rules."""
        floats = {"temperature_S", "top_p_S", "min_p_S", "repetition_S", "presence_S", "frequency_S"}
        longs = {"seed_S", "rules_S", "prefixes_S"}
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
    """The result of a step. Writer: the step. Valid until the next; [B, R] rows beyond `num_emitted_B` are stale."""

    emitted_BR: torch.Tensor  # int32
    num_emitted_B: torch.Tensor  # int32
    num_accepted_B: torch.Tensor  # int32, drafts among the emitted
    finish_B: torch.Tensor  # int32: RUN_ON, STOP_TOKEN, STOP_LENGTH, STOP_STEERED
    blocked_B: torch.Tensor  # int32, kind of the row at which nothing could be emitted, else 0
    logprob_BR: torch.Tensor  # float32
    top_ids_BRN: torch.Tensor  # int32
    top_logprobs_BRN: torch.Tensor  # float32
    masses_BR2: (
        torch.Tensor
    )  # float32, of exact slots: log p of the token, and of the other tokens that are legal and new
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
            ints(B, R),
            ints(B),
            ints(B),
            ints(B),
            ints(B),
            floats(B, R),
            ints(B, R, MAX_LOGPROBS),
            floats(B, R, MAX_LOGPROBS),
            floats(B, R, 2),
            floats(B, V),
            ints(B, V),
        )


def pack_rules(
    stop: tuple[int, ...],
    bad: tuple[int, ...],
    words: tuple[tuple[int, ...], ...],
    biases: tuple[tuple[int, float], ...] = (),
) -> torch.Tensor:
    """Return a slot's rules, int32: stop ids, ids never drawn, id sequences that must not appear, and (id, bias) pairs.

    Stop ids end a sequence, and are not drawn before `min_tokens`. Biases are for a CPU: on a GPU
    `kernels.cuda.row_state.SlotBiases` has them. The caller owns the tensor, and holds it as long as the slot."""
    flat = [len(stop), *stop, len(bad), *bad, len(words)]
    for word in words:
        flat += [len(word), *word]
    rules = torch.tensor([*flat, len(biases)], dtype=torch.int32)
    if not biases:
        return rules
    pairs = torch.empty(len(biases), 2, dtype=torch.int32)
    pairs[:, 0] = torch.tensor([token for token, _ in biases], dtype=torch.int32)
    pairs[:, 1] = torch.tensor([bias for _, bias in biases], dtype=torch.float32).view(torch.int32)
    return torch.cat([rules, pairs.flatten()])


@dataclass(frozen=True, slots=True)
class TreeRows:
    """The rows of each lane as nodes of a tree, on a GPU. Row 0 has the last token, row j draft j - 1.

    A row's parent has a smaller number, so the first rows of a lane are always a tree. A row's depth is the number of
    drafts on the way to it: its position after the last token. Writer: `kernels.cuda.step_inputs.load_step`, but of
    `walked_BR` the acceptance. All int32, contiguous.
    """

    parent_BR: torch.Tensor  # of row j; 0 for row 0
    depth_BR: torch.Tensor
    rows_BRR: torch.Tensor  # [b, j, d]: the row at depth d on the way to row j, for d <= depth
    tokens_BRR: torch.Tensor  # [b, j, i]: draft i on the way to row j, for i < depth
    walked_BR: torch.Tensor  # the row that gave emitted token i, for i < num_emitted; rises with i

    @classmethod
    def allocate(cls, num_batch: int, num_rows: int, device: torch.device | str = "cpu") -> TreeRows:
        """Return the rows of chains of no drafts."""
        shapes = ((num_rows,), (num_rows,), (num_rows, num_rows), (num_rows, num_rows), (num_rows,))
        return cls(*(torch.zeros(num_batch, *shape, dtype=torch.int32, device=device) for shape in shapes))


@dataclass(frozen=True, slots=True)
class DraftTree:
    """The tree that a head grows for each lane, level by level, on a GPU. Writer: `kernels.cuda.draft_tree`.

    Level k has W candidates after each node that was expanded on level k - 1; level 0 has W after the last token.
    Candidates lie level by level. The W candidates of level k with the best scores are expanded: they are rows k * W to
    k * W + W - 1, best first. X is `TREE_ROWS`, C is `TREE_CANDIDATES`. All int32 but the scores, contiguous.
    """

    score_BC: torch.Tensor  # float32, log-probability of the candidate and of all before it; -inf: no draft
    token_BC: torch.Tensor
    parent_BC: torch.Tensor  # the candidate in front; -1: the last token
    node_BX: torch.Tensor  # the candidate that is row x
    above_BX: torch.Tensor  # where among the rows of the level in front its parent is
    ids_BX: torch.Tensor
    positions_BX: torch.Tensor  # where the pair of the row is stored; -1: the lane does not draft
    depth_BX: torch.Tensor  # drafts on the way to the token after the row
    tokens_BXX: torch.Tensor  # [b, x, i]: draft i on this way, for i < depth
    rows_BXX: torch.Tensor  # [b, x, d]: the row at depth d on the way to row x, for d < depth
    kinds_BX: torch.Tensor  # uint8, ALL: the drafts of a tree are not masked

    @classmethod
    def allocate(cls, num_batch: int, device: torch.device | str = "cpu") -> DraftTree:
        """Return a tree without candidates."""
        B, C, X = num_batch, TREE_CANDIDATES, TREE_ROWS

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            score_BC=torch.full((B, C), -torch.inf, device=device),
            token_BC=ints(B, C),
            parent_BC=ints(B, C),
            node_BX=ints(B, X),
            above_BX=ints(B, X),
            ids_BX=ints(B, X),
            positions_BX=ints(B, X),
            depth_BX=ints(B, X),
            tokens_BXX=ints(B, X, X),
            rows_BXX=ints(B, X, X),
            kinds_BX=torch.full((B, X), ALL, dtype=torch.uint8, device=device),
        )


def tree_shape(num_drafts: int) -> tuple[int, int]:
    """Return (width, levels) of the tree from which `num_drafts` drafts, at least one, are taken."""
    width = min(TREE_WIDTH, num_drafts)
    return width, min(num_drafts, 1 + TREE_ROWS // width)


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The tensors that verification and drafting read and write besides logits; the same ones at every step.

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
    first_row_B: torch.Tensor | None = None
    """int32 [B], where the rows of each lane begin in the logits of `accept`, on a CPU. None: at b * P."""
    model_logits_NV: torch.Tensor | None = None
    """On a GPU: logits whose log-probabilities `accept` returns, where its own are changed ones. None: its own."""
    tree: TreeRows | None = None
    """On a GPU: the drafts of a lane are a tree. None: they are a chain."""
    arguments: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)
    """Of `accept`: the last call's logits and its native arguments, which the next call with them needs again."""
