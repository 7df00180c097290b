"""A plot of tokens per step over drafts per step, with the figures that TensorRT-LLM published.

Invariant: the plot shows the figures of the table, and nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

PUBLISHED = (
    ("EAGLE3, masked drafts", "Llama 3.1 8B", 2.86, 2.55),
    ("EAGLE3, free drafts", "Llama 3.1 8B", 2.65, 2.33),
    ("n-gram", "Llama 3.1 8B", 2.59, 1.89),
)
"""At K = 3: (drafter, model, JSON Mode Eval, JSON Schema Bench)."""
PUBLISHED_GROUPS = ("extraction", "generation")
"""The groups that those two benchmarks are like."""


class Measured(Protocol):
    """A cell of the table."""

    @property
    def variant(self) -> str:
        """The drafter."""

    @property
    def drafts(self) -> int:
        """K."""

    @property
    def group(self) -> str:
        """The prompts."""

    @property
    def length(self) -> float:
        """Tokens a step."""


def draw(cells: Sequence[Measured], title: str, path: Path) -> None:
    """Write a PNG: tokens a step over K, a panel a group, the published figures as marks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = list(dict.fromkeys(cell.group for cell in cells))
    figure, axes = plt.subplots(1, len(groups), figsize=(6 * len(groups), 4), squeeze=False, sharey=True)
    for place, group in enumerate(groups):
        axis = axes[0][place]
        for variant in dict.fromkeys(cell.variant for cell in cells if cell.drafts):
            line = sorted((c.drafts, c.length) for c in cells if (c.variant, c.group) == (variant, group) and c.drafts)
            axis.plot([k for k, _ in line], [length for _, length in line], marker="o", label=variant)
        for name, model, *lengths in PUBLISHED if group in PUBLISHED_GROUPS else ():
            length = lengths[PUBLISHED_GROUPS.index(group)]
            axis.plot([3], [length], marker="x", linestyle="", label=f"published: {name} ({model})")
        axis.set_title(group, fontsize=10)
        axis.set_xlabel("drafts a step", fontsize=8)
        axis.legend(fontsize=6)
    axes[0][0].set_ylabel("tokens a step", fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
