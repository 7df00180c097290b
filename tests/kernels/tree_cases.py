"""Random trees of drafts, as the tests of every kernel over trees take them."""

from __future__ import annotations

import torch

from kernels.step_tensors import TreeRows


def random_parents(g: torch.Generator, rows: int) -> list[int]:
    """Return the parent row of each draft of a tree of so many rows: row 0 has none."""
    return [int(torch.randint(max(0, j - 3), j + 1, (1,), generator=g)) for j in range(rows - 1)]


def way_to(parents: list[int], row: int) -> list[int]:
    """Return the rows from row 0 to `row`, both included."""
    way = [row]
    while way[-1]:
        way.append(parents[way[-1] - 1])
    return way[::-1]


def tree_of(trees: list[list[int]], drafts: list[list[int]], R: int, device: torch.device) -> TreeRows:
    """Return the tensors of one tree a lane, filled in plain Python: parents and tokens of its drafts."""
    tree = TreeRows.allocate(len(trees), R)
    for b, (parents, tokens) in enumerate(zip(trees, drafts, strict=True)):
        for row in range(len(parents) + 1):
            way = way_to(parents, row)
            tree.parent_BR[b, row] = parents[row - 1] if row else 0
            tree.depth_BR[b, row] = len(way) - 1
            tree.rows_BRR[b, row, : len(way)] = torch.tensor(way)
            tree.tokens_BRR[b, row, : len(way) - 1] = torch.tensor([tokens[at - 1] for at in way[1:]])
    return TreeRows(*(getattr(tree, name).to(device) for name in TreeRows.__slots__))
