"""Prompt lookup: the tokens after an earlier occurrence of the answer's own suffix (Saxena 2023; LLMA, Yang 2023).

Invariant: it proposes only tokens of the slot's own history, and before them the jump-forward tokens,
if any: the lookup continues after these. Not responsible for: the search itself (see
`StepLaunches.propose_ngram`), masks; verification rejects a draft that breaks the grammar.
"""

from __future__ import annotations

import torch

from gpu_engine.step.buffers import StepBatch
from gpu_engine.step.launches import StepLaunches
from gpu_engine.step.prompt_rows import Chunks, Hidden
from gpu_engine.step.stream import Stream
from kernels.accept import StepTensors


class NgramDrafter:
    """Looks up the longest suffix of at most `ngram_max` tokens, in one launch.

    `jump_forward`: the drafts begin with the tokens that the grammar forces.
    """

    layers: tuple[int, ...] = ()

    def __init__(self, stream: Stream, launches: StepLaunches, ngram_max: int, *, jump_forward: bool = False) -> None:
        self._stream, self._launches = stream, launches
        self._max, self._jump_forward = ngram_max, jump_forward

    def prefill(self, chunks: Chunks, hidden: Hidden) -> None:
        """Return: the history is all that a lookup needs."""

    def propose(self, batch: StepBatch, step: StepTensors, page_table_BN: torch.Tensor, hidden: Hidden) -> None:
        """Enqueue the lookup; a lane that emitted nothing finds the drafts that it has."""
        self._stream.kernel(self._propose, batch)

    def _propose(self, batch: StepBatch) -> None:
        jump_forward = self._jump_forward and batch.any_guided
        self._launches.propose_ngram(batch, self._max, jump_forward=jump_forward)

    def __repr__(self) -> str:
        return f"<NgramDrafter 1 to {self._max}>"


class NoDrafter:
    """Proposes nothing: a slot has no drafts, or only jump-forward tokens."""

    layers: tuple[int, ...] = ()

    def prefill(self, chunks: Chunks, hidden: Hidden) -> None:
        """Return: there is nothing to see."""

    def propose(self, batch: StepBatch, step: StepTensors, page_table_BN: torch.Tensor, hidden: Hidden) -> None:
        """Return: the slots' numbers of drafts are right."""

    def __repr__(self) -> str:
        return "<NoDrafter>"
