"""The path that a grammar allows among the candidates of a proposal is the one that a plain walk finds."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from grammar_service.fill.candidates import CandidateTree
from shared_mem.layout import node

TREE = [node(1, 0), node(2, 0), node(3, 1), node(4, 1), node(5, 2), node(6, 5), node(7, 4)]
"""1 and 2 behind the end; 3 and 4 behind 1, 7 behind 4; 5 behind 2, 6 behind 5."""


class Language:
    """All prefixes of some texts are legal. Counts the questions."""

    def __init__(self, *texts: Sequence[int]) -> None:
        self.prefixes = {tuple(text[:end]) for text in texts for end in range(len(text) + 1)}
        self.asked = 0

    def num_legal(self, tokens: Sequence[int]) -> int:
        self.asked += 1
        return next((n for n in range(len(tokens)) if tuple(tokens[: n + 1]) not in self.prefixes), len(tokens))


@pytest.mark.parametrize(
    ("texts", "forced", "limit", "expected"),
    [
        ([[1, 3]], [], 7, (1, 3)),
        ([[1, 4, 7]], [], 7, (1, 4, 7)),
        ([[2, 5, 6], [1, 9]], [], 7, (1,)),
        ([[2, 5, 6]], [], 7, (2, 5, 6)),
        ([[2, 5, 6]], [], 2, (2, 5)),
        ([[2, 5, 6]], [2], 7, (5, 6)),
        ([[2, 5, 6]], [2, 5, 6], 3, ()),
        ([[9]], [], 7, ()),
        ([[8, 1]], [8], 7, None),
    ],
)
def test_the_first_legal_child_is_chosen(
    texts: list[list[int]], forced: list[int], limit: int, expected: tuple[int, ...] | None
) -> None:
    language = Language(*texts)
    assert CandidateTree(TREE).choose(forced, limit, language.num_legal) == expected
    assert language.asked <= len(TREE)


def test_a_candidate_whose_parent_comes_later_is_left_out() -> None:
    tree = [node(1, 0), node(2, 2), node(3, 7), node(4, 1)]
    assert CandidateTree(tree).choose([], 7, Language([1, 4], [2], [3]).num_legal) == (1, 4)
    assert CandidateTree([node(1, 1), -5]).choose([], 7, Language([1]).num_legal) == ()


def path_to(number: int, tree: Sequence[int]) -> list[int]:
    """Return the tokens from the end of the committed tokens to a node."""
    tokens: list[int] = []
    while number:
        tokens.insert(0, tree[number - 1] & 0xFFFFFF)
        number = tree[number - 1] >> 24
    return tokens


def test_random_trees_are_walked_as_a_plain_walk_does() -> None:
    draw, lengths = random.Random(3), []
    for _ in range(500):
        count = draw.randint(0, 15)
        parents = [draw.randint(0, number) for number in range(count)]
        tree = [node(draw.randrange(4), parent) for parent in parents]
        texts = [path_to(draw.randint(0, count), tree) for _ in range(draw.randint(1, 3))]
        language, limit = Language(*texts), draw.randint(1, 8)
        path: list[int] = []
        at = 0
        while len(path) < limit:
            children = [n for n, parent in enumerate(parents, 1) if parent == at]
            legal = [n for n in children if (*path, tree[n - 1] & 0xFFFFFF) in language.prefixes]
            if not legal:
                break
            at = legal[0]
            path.append(tree[at - 1] & 0xFFFFFF)
        assert CandidateTree(tree).choose([], limit, language.num_legal) == tuple(path)
        assert language.asked <= max(count, 1)
        lengths.append(len(path))
    assert sum(length > 2 for length in lengths) > 40
