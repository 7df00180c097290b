"""Estimates the acceptance length of a head: replays answers of the target and counts the drafts that are right.

Invariant: a draft is right when it equals the token of the answer, and a step yields its right drafts and one token
more, as in verification. So the mean is the acceptance length of greedy drafts without masks.
Not responsible for: masks and other drafters (see benchmarks/quality/acceptance.py, which measures on the engine).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from gpu_engine.drafters.heads.eagle3_head import Eagle3Head
from tools.training.unroll import Sequence, unroll


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts over all replayed answers."""

    steps: int
    tokens: int
    right: tuple[int, ...]
    """Right drafts by depth."""
    tried: tuple[int, ...]
    """Drafts by depth whose earlier drafts in the same step were all right."""

    @property
    def length(self) -> float:
        """Tokens per step, the bonus token included; 0 without a step."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def rates(self) -> list[float]:
        """Share of right drafts among those tried, by depth."""
        return [right / tried if tried else 0.0 for right, tried in zip(self.right, self.tried, strict=True)]


@torch.inference_mode()
def replay(head: Eagle3Head, embedding: torch.Tensor, sequences: Iterable[Sequence], num_drafts: int) -> Acceptance:
    """Replay every answer with `num_drafts` drafts per step. `embedding` is the target's, [V, H]."""
    steps = tokens = 0
    right, tried = [0] * num_drafts, [0] * num_drafts
    target_ids = head.target_ids
    for sequence in sequences:
        hits = [
            (target_ids[logits.argmax(-1)] == wanted).tolist()
            for logits, wanted in unroll(head, embedding, sequence, num_drafts)
        ]
        base, bases = 0, len(sequence.region)
        while base < bases:
            accepted = 0
            for j in range(num_drafts):
                if base + j >= bases:
                    break
                tried[j] += 1
                if not hits[j][base]:
                    break
                right[j] += 1
                accepted += 1
            emitted = min(accepted + 1, bases - base)
            steps, tokens, base = steps + 1, tokens + emitted, base + emitted
    return Acceptance(steps, tokens, tuple(right), tuple(tried))
