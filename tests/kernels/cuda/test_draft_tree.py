"""The tree that a head grows has the nodes of its definition in plain Python, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

from gpu_engine.api.engine_settings import MAX_DRAFT_TOKENS, MAX_EXPANDED_NODES
from kernels.accept import gumbel_noise
from kernels.cuda.attention.paged import MAX_DECODE_QUERIES
from kernels.cuda.draft_tree import grow_tree, num_candidates, take_tree
from kernels.step_tensors import TREE_CANDIDATES, TREE_ROWS, DraftTree, tree_shape
from tests.kernels.accept_cases import Case, reference_logits, step_of

R, V = 12, 90


@dataclass
class Head:
    """A head whose logits are those of random numbers by the tokens on the way, over `ids`, some of the tokens."""

    ids: list[int]

    def logits(self, way: list[int]) -> torch.Tensor:
        g = torch.Generator().manual_seed(hash(tuple(way)) % (1 << 31))
        return torch.randn(len(self.ids), generator=g) * 3


def scores(case: Case, head: Head, way: list[int]) -> torch.Tensor:
    """Return the log-probabilities [V] of the tokens after `way`; -inf for those that the head lacks."""
    x = torch.full((V,), -math.inf, dtype=torch.float64)
    x[head.ids] = head.logits(way).double()
    x = reference_logits(case, case.history + way, x, 0)
    if case.temperature:
        x = x / case.temperature + gumbel_noise(case.seed, len(case.history) + len(way), V).double()
    return x.log_softmax(-1) if x.max() > -math.inf else x


def wanted(case: Case, head: Head, forced: list[int], most: int, room: int) -> tuple[list[int], list[int]]:
    """Return the drafts and the row of each one's parent."""
    width, levels = tree_shape(most)
    nodes: list[tuple[float, int, list[int]]] = []
    front: list[tuple[float, int, list[int]]] = [(0.0, -1, [])]
    for k in range(levels):
        level: list[tuple[float, int, list[int]]] = []
        for score, at, way in front:
            if k < len(forced):
                level.append((0.0, at, [*way, forced[k]]))
                continue
            best = scores(case, head, way).topk(width)
            own = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            level += [(score + value, at, [*way, token]) for value, token in own]
        order = sorted(range(len(level)), key=lambda i: (-level[i][0], i))[: 1 if k < len(forced) else width]
        front = [(level[i][0], len(nodes) + i, level[i][2]) for i in order]
        nodes += level
    legal = [i for i in range(len(nodes)) if nodes[i][0] > -math.inf]
    taken = sorted(legal, key=lambda i: (-nodes[i][0], i))[: max(0, min(most, room))]
    rows = {-1: 0} | {at: row + 1 for row, at in enumerate(taken)}
    drafts, parents = [nodes[at][2][-1] for at in taken], [rows[nodes[at][1]] for at in taken]
    return drafts + forced[len(drafts) :], [*parents, *range(len(drafts), len(forced))]


CASES = [
    Case([5, 6, 7], 1, temperature=0.0, max_length=100),
    Case([8, 9, 8, 9, 8, 9], 3, temperature=0.7, seed=4, frequency=0.4, repetition=1.2, max_length=100),
    Case([1, 2], 2, temperature=1.3, seed=9, bad=(3, 4, 5), words=((2, 11), (11, 12)), max_length=7),
    Case([3] * 9, 9, temperature=0.2, seed=1, biases=((20, 9.0), (21, 8.5)), max_length=100),
]


@pytest.mark.parametrize(
    ("most", "whole", "forced"),
    [
        pytest.param(7, True, [[], [], [], []], marks=pytest.mark.slow),
        pytest.param(11, False, [[], [50, 51], [], [3] * 6], marks=pytest.mark.slow),
        (3, False, [[7], [], [2, 3], [1, 2, 3, 4, 5]]),
        (1, True, [[], [], [9], []]),
    ],
)
def test_the_drafts_are_the_best_nodes(device: torch.device, most: int, whole: bool, forced: list[list[int]]) -> None:
    ids = [*range(V)] if whole else [*range(2, 60), *range(70, 80)]
    head, (width, levels), B = Head(ids), tree_shape(most), len(CASES)
    d2t = (torch.tensor(ids) - torch.arange(len(ids))).int().to(device)
    made, tree = step_of(CASES, V, R, device, rows=width, block=64), DraftTree.allocate(B, device)
    step = made.step
    drafts, parents = (torch.full((B, R), 77, dtype=torch.int32, device=device) for _ in range(2))
    num, limit = torch.zeros(B, dtype=torch.int32, device=device), torch.full((B,), R - 1).int().to(device)
    limit[3] = 5
    lengths = torch.tensor([len(tokens) for tokens in forced]).int().to(device)
    for b, tokens in enumerate(forced):
        drafts[b, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    going = torch.ones(B, dtype=torch.bool, device=device)
    kept = {"width": width, "levels": levels, "num_jump_forward_B": lengths if any(forced) else None}
    for k in range(levels):
        rows = [(b, None if k == 0 else (k - 1) * width + w) for b in range(B) for w in range(width if k else 1)]
        ways = [[] if x is None else tree.tokens_BXX[b, x, :k].tolist() for b, x in rows]
        logits = torch.stack([head.logits(way) for way in ways]).to(device)
        grow_tree(logits, step, tree, k, going, drafts, d2t_V=None if whole else d2t, **kept)
    take_tree(step, tree, going, limit, drafts, num, parents, max_drafts=most, **kept)
    for b, case in enumerate(CASES):
        room = min(int(limit[b]), case.max_length - len(case.history) - 1)
        want, above = wanted(case, head, forced[b], most, room)
        assert drafts[b, : int(num[b])].tolist() == want, case
        assert parents[b, : int(num[b])].tolist() == above
        assert all(parent <= i for i, parent in enumerate(above))
        assert len({*zip(above, want, strict=True)}) == len(want), "siblings have different tokens"
        for x in range((levels - 1) * width):
            depth = int(tree.depth_BX[b, x])
            assert depth == x // width + 1
            assert int(tree.positions_BX[b, x]) == len(case.history) + depth - 2
            assert int(tree.rows_BXX[b, x, depth - 1]) == x
            assert int(tree.tokens_BXX[b, x, depth - 1]) == int(tree.ids_BX[b, x])
    assert not made.rows.done_S.any()


def test_lanes_that_do_not_draft_are_unchanged(device: torch.device) -> None:
    """A lane that emitted nothing has its drafts, one that stopped has none, and an idle lane touches no slot."""
    slots, tree = torch.tensor([0, 1, -1, 3]).int().to(device), DraftTree.allocate(4, device)
    step = replace(step_of(CASES, V, R, device, rows=2, block=64).step, slots_B=slots)
    step.result.num_emitted_B.copy_(torch.tensor([0, 2, 1, 1]))
    going = torch.tensor([False, False, False, True], device=device)
    drafts, parents = (torch.full((4, R), 77, dtype=torch.int32, device=device) for _ in range(2))
    num, limit = torch.full((4,), 3).int().to(device), torch.full((4,), R).int().to(device)
    shape = {"width": 2, "levels": 2}
    for k in range(2):
        logits = torch.randn(4 * (2 if k else 1), V, generator=torch.Generator().manual_seed(k)).to(device)
        grow_tree(logits, step, tree, k, going, drafts, **shape)
    take_tree(step, tree, going, limit, drafts, num, parents, max_drafts=2, **shape)
    assert num.tolist() == [3, 0, 3, 2]
    assert (drafts[:3] == 77).all()
    assert (parents[:3] == 77).all()
    assert (tree.positions_BX[:3, :2] == -1).all()
    assert tree.positions_BX[3, :2].tolist() == [8, 8]


def test_a_row_without_a_legal_token_has_no_candidates(device: torch.device) -> None:
    case = Case([1, 2], 1, temperature=0.5, bad=tuple(range(40)), max_length=100)
    step, tree = step_of([case], V, R, device, rows=2, block=64).step, DraftTree.allocate(1, device)
    drafts, parents = (torch.zeros(1, R, dtype=torch.int32, device=device) for _ in range(2))
    num, limit = torch.ones(1).int().to(device), torch.full((1,), R).int().to(device)
    going, shape = torch.ones(1, dtype=torch.bool, device=device), {"width": 2, "levels": 2}
    d2t = torch.zeros(40, dtype=torch.int32, device=device)
    for k in range(2):
        logits = torch.zeros(2 if k else 1, 40, device=device)
        grow_tree(logits, step, tree, k, going, drafts, d2t_V=d2t, **shape)
    take_tree(step, tree, going, limit, drafts, num, parents, max_drafts=2, **shape)
    assert num.tolist() == [0]


def test_every_tree_is_within_the_limits() -> None:
    """A record holds `MAX_DRAFT_TOKENS` nodes; the rows of a head's forward are those of a tree in attention, and the
    head's keys are within the pages that a sequence owns."""
    assert TREE_ROWS == MAX_EXPANDED_NODES == MAX_DECODE_QUERIES
    for most in range(1, MAX_DRAFT_TOKENS + 1):
        width, levels = tree_shape(most)
        assert 1 <= width <= most
        assert 1 <= levels <= most
        assert width * (levels - 1) <= TREE_ROWS
        assert most <= num_candidates(width, levels) <= TREE_CANDIDATES
