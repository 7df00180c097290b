"""What a tree of drafts needs next to a chain: acceptance along one path, and its keys and values moved together.

Acceptance begins at row 0 and goes to the child whose draft is the token of the row, as long as there is one. So a
path is accepted exactly as a chain of its drafts would be, and siblings cost rows and nothing else. Row j stores its
keys and values after the last token's at distance j, so that no two rows share a place; after acceptance those of
the path are moved to the distance of their depth, where the next step reads them. Invariant: only emitted tokens
reach history, length and counts, and only places after the history of before the step are written. Not responsible
for: attention inside the tree (see attention/tree_decode.py), the scores of the rows (see rows.py), the proposal of a
tree (see branch.py).

Shapes: B lanes, S slots, R rows a slot, N pages of a sequence, Hkv KV heads, T tokens a page, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels.cuda.acceptance import empty_lane, stopping, target_tokens
from kernels.cuda.rows import DEAD_END, DEFER, SEEN, STEERED
from kernels.kv_pages import KVPages
from kernels.step_tensors import TreeRows


@triton.jit
def tree_acceptance_kernel(
    slots: tl.tensor,
    drafts: tl.tensor,
    num_drafts: tl.tensor,
    kinds: tl.tensor,
    forced: tl.tensor,
    history: tl.tensor,
    length: tl.tensor,
    max_length: tl.tensor,
    temperature: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    top_k: tl.tensor,
    rules: tl.tensor,
    seen: tl.tensor,
    done: tl.tensor,
    best: tl.tensor,
    best_column: tl.tensor,
    peaks: tl.tensor,
    chosen: tl.tensor,
    emitted: tl.tensor,
    num_emitted: tl.tensor,
    num_accepted: tl.tensor,
    finish: tl.tensor,
    blocked: tl.tensor,
    parents: tl.tensor,
    walked: tl.tensor,
    lane_stride: tl.tensor,
    history_stride: tl.tensor,
    rules_stride: tl.tensor,
    seen_stride: tl.tensor,
    partial_stride: tl.tensor,
    tiles: tl.tensor,
    V: tl.tensor,
    num_rows: tl.tensor,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    RULES: tl.constexpr,
    FILTERS: tl.constexpr,
) -> None:
    """Grid (B): fill the lane's results and `walked`, append to history, advance length, count the emitted tokens.

    The rules are those of `acceptance_kernel`. Of siblings with equal tokens the first one counts.
    """
    b = tl.program_id(0)
    s = tl.load(slots + b).to(tl.int64)
    if s < 0:
        empty_lane(b, num_emitted, num_accepted, finish, blocked)
        return
    j = tl.arange(0, ROWS)
    n = tl.load(length + s)
    live = (j <= tl.load(num_drafts + b)) & (j < num_rows)
    lane = b * lane_stride + j
    kind = tl.load(kinds + lane, mask=live, other=0).to(tl.int32)
    ended = tl.load(done + s) != 0  # by a step whose results the host has not read yet
    kind = tl.where(ended, tl.full([ROWS], DEFER, tl.int32), kind)
    token = target_tokens(
        b, s, live, temperature, top_p, min_p, top_k, best, best_column, peaks, chosen, partial_stride, tiles, V,
        num_rows, ROWS, TILES, FILTERS,
    )  # fmt: skip
    stops = stopping(token, rules + s * rules_stride, RULES)
    # A place of row 0, or of a row that is not used, has no parent.
    parent = tl.load(parents + lane, mask=live & (j > 0), other=-1)
    draft = tl.load(drafts + lane - 1, mask=live & (j > 0), other=-1)
    most = tl.load(max_length + s)
    row = tl.zeros([], tl.int32)
    count = tl.zeros([], tl.int32)
    accepted = tl.zeros([], tl.int32)
    how = tl.zeros([], tl.int32)
    why = tl.zeros([], tl.int32)
    walking = 1
    while walking > 0:
        here = j == row
        drawn = tl.max(tl.where(here, token, -1), axis=0)
        state = tl.sum(tl.where(here, kind, 0), axis=0)
        if (state >= DEFER) | (drawn < 0):
            why = tl.where(state >= DEFER, state, DEAD_END)
            walking = 0
        else:
            tl.store(emitted + b * lane_stride + count, drawn)
            tl.store(walked + b * lane_stride + count, row)
            tl.store(history + s * history_stride + n + count, drawn)
            word = seen + s * seen_stride + drawn
            tl.atomic_or(word, SEEN)
            tl.atomic_add(word, 1)
            count += 1
            stop = tl.sum(tl.where(here, stops, 0), axis=0)
            steered = tl.load(forced + b * lane_stride + row) == STEERED
            full = n + count >= most
            how = tl.where(stop > 0, tl.where(steered, 3, 1), tl.where(full, 2, 0))
            child = tl.min(tl.where((parent == row) & (draft == drawn), j, ROWS), axis=0)
            accepted += (child < ROWS).to(tl.int32)
            walking = ((child < ROWS) & (how == 0)).to(tl.int32)
            row = child
    tl.store(length + s, n + count)
    tl.store(num_emitted + b, count)
    tl.store(num_accepted + b, accepted)
    tl.store(finish + b, how)
    tl.store(blocked + b, why)
    if (how != 0) | (why > DEFER):
        tl.store(done + s, 1)


@triton.jit
def compact_kernel(
    slots: tl.tensor,
    length: tl.tensor,
    num_emitted: tl.tensor,
    walked: tl.tensor,
    table: tl.tensor,
    addresses: tl.tensor,
    like: tl.tensor,
    R: tl.tensor,
    table_stride: tl.tensor,
    Hkv: tl.tensor,
    T: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Grid (B, Hkv, tensors): see `PathCompaction`.

    Token i comes from row walked[i] >= i, which rises with i. A thread copies its channels of one token after the
    other, so none is overwritten before it was read.
    """
    b = tl.program_id(0)
    h = tl.program_id(1)
    s = tl.load(slots + b)
    count = tl.load(num_emitted + b)
    if (s < 0) | (count < 2):
        return
    pages = tl.load(addresses + tl.program_id(2)).to(like.dtype)
    d = tl.arange(0, BLOCK_D)
    first = tl.load(length + s) - count - 1
    rows = table + b.to(tl.int64) * table_stride
    for i in range(1, count):
        row = tl.load(walked + b * R + i)
        if row != i:
            source = first + row
            target = first + i
            page = tl.load(rows + source // T).to(tl.int64)
            values = tl.load(pages + ((page * Hkv + h) * T + source % T) * D + d, mask=d < D)
            page = tl.load(rows + target // T).to(tl.int64)
            tl.store(pages + ((page * Hkv + h) * T + target % T) * D + d, values, mask=d < D)


class PathCompaction:
    """Moves the keys and values of accepted paths, in every layer, with one launch for each shape of a layer.

    Args:
        pages: token-major, one a layer; this object keeps them.
    """

    def __init__(self, pages: Sequence[KVPages]) -> None:
        assert all(layer.token_major for layer in pages)
        shapes: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}
        for layer in pages:
            for tensor in (layer.k, layer.v):
                assert tensor.is_contiguous()
                shapes.setdefault((tensor.shape[1:], tensor.dtype), []).append(tensor)
        self._groups = [
            (torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64).to(tensors[0].device), tensors)
            for tensors in shapes.values()
        ]

    def __call__(
        self,
        slots_B: torch.Tensor,
        length_S: torch.Tensor,
        num_emitted_B: torch.Tensor,
        tree: TreeRows,
        page_table_BN: torch.Tensor,
    ) -> None:
        """Move what the rows of `tree.walked_BR` stored after each other. Runs after the acceptance, whose new
        `length_S` it takes. All int32."""
        R = tree.walked_BR.shape[1]
        assert page_table_BN.stride(1) == 1
        for addresses, tensors in self._groups:
            _, Hkv, T, D = tensors[0].shape
            compact_kernel[(slots_B.shape[0], Hkv, len(tensors))](
                slots_B,
                length_S,
                num_emitted_B,
                tree.walked_BR,
                page_table_BN,
                addresses,
                tensors[0],
                R,
                page_table_BN.stride(0),
                Hkv,
                T=T,
                D=D,
                BLOCK_D=triton.next_power_of_2(D),
                num_warps=1,
            )

    def __repr__(self) -> str:
        return f"<PathCompaction of {sum(len(tensors) for _, tensors in self._groups)} tensors>"
