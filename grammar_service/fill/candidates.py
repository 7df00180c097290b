"""The choice among the candidates of a proposal: at each node of the tree the first child that the grammar allows.

A lookup in the engine proposes the likeliest continuations, and the likeliest one is often illegal: text of the prompt
in another notation, or the names of another object. A chain of drafts ends at its first illegal token, a tree has the
next likely token next to it. Invariant: the result is legal after the forced tokens, and the matcher does not move. A
chosen token is a draft: verification guards it as any other. Not responsible for: the tree itself (see
kernels/native/suffix.c), when the engine asks (see matchers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shared_mem.layout import parent_of, token_of


class CandidateTree:
    """The candidates of one proposal record; a candidate whose parent is not before it is left out."""

    def __init__(self, candidates: Sequence[int]) -> None:
        self._tokens = [token_of(candidate) for candidate in candidates]
        self._children: list[list[int]] = [[] for _ in range(len(candidates) + 1)]
        """By node: 0 is the end of the committed tokens, j + 1 candidate j."""
        for number, candidate in enumerate(candidates, 1):
            if 0 <= parent_of(candidate) < number:
                self._children[parent_of(candidate)].append(number)

    def choose(
        self, forced: Sequence[int], limit: int, num_legal: Callable[[Sequence[int]], int]
    ) -> tuple[int, ...] | None:
        """Return the chosen tokens after `forced`, at most `limit` with these; None: `forced` is no path of the tree.

        `num_legal` returns how many of some tokens the grammar allows, one after the other. It is called at most once
        for each candidate.
        """
        at = 0
        for token in forced:
            found = [child for child in self._children[at] if self._tokens[child - 1] == token]
            if not found:
                return None
            at = found[0]
        path, illegal = list(forced), 0
        while len(path) < limit:
            for child in self._children[at]:
                if child == illegal:
                    continue
                chain = self._heaviest(child, limit - len(path))
                legal = num_legal([*path, *(self._tokens[node - 1] for node in chain)]) - len(path)
                if legal > 0:
                    path += [self._tokens[node - 1] for node in chain[:legal]]
                    at, illegal = chain[legal - 1], chain[legal] if legal < len(chain) else 0
                    break
            else:
                break
        return tuple(path[len(forced) :])

    def _heaviest(self, node: int, limit: int) -> list[int]:
        """Return the path of first children from `node` on, at most `limit` nodes."""
        chain = [node]
        while len(chain) < limit and self._children[chain[-1]]:
            chain.append(self._children[chain[-1]][0])
        return chain

    def __repr__(self) -> str:
        return f"<CandidateTree of {len(self._tokens)}>"
