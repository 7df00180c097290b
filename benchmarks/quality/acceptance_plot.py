"""Plots of tokens per step over drafts per step, with the figures that TensorRT-LLM published, and of tokens/s of all
over tokens/s of a user.

Invariant: a plot shows the figures of its table, and nothing is measured here.
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


def published_length(variant: str, group: str) -> float | None:
    """Return the published tokens a step at K = 3 of the drafter that a variant is like; None: there is none."""
    drafter, *marks = variant.split("+")
    masked = "masked" if "masked" in marks else "free"
    name = {"ngram": "n-gram", "eagle3": f"EAGLE3, {masked} drafts"}.get(drafter)
    if group not in PUBLISHED_GROUPS:
        return None
    return next((row[2 + PUBLISHED_GROUPS.index(group)] for row in PUBLISHED if row[0] == name), None)  # type: ignore[return-value]


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


class Paced(Protocol):
    """A point of a Pareto plot."""

    @property
    def variant(self) -> str:
        """The drafter."""

    @property
    def drafts(self) -> int:
        """K."""

    @property
    def users(self) -> int:
        """Requests at a time."""

    @property
    def group(self) -> str:
        """The prompts."""

    @property
    def user_speed(self) -> float:
        """Tokens/s of a user."""

    @property
    def speed(self) -> float:
        """Tokens/s of all."""


def draw_pareto(points: Sequence[Paced], title: str, path: Path) -> None:
    """Write a PNG: tokens/s of all over tokens/s of a user, a panel a group, a line a drafter and K; each mark has its
    number of users next to it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = list(dict.fromkeys(point.group for point in points))
    figure, axes = plt.subplots(1, len(groups), figsize=(6 * len(groups), 4.5), squeeze=False)
    for axis, group in zip(axes[0], groups, strict=True):
        of_group = [point for point in points if point.group == group]
        for variant, drafts in dict.fromkeys((point.variant, point.drafts) for point in of_group):
            line = sorted((p for p in of_group if (p.variant, p.drafts) == (variant, drafts)), key=lambda p: p.users)
            label = f"{variant}, K = {drafts}" if drafts else variant
            axis.plot([p.user_speed for p in line], [p.speed for p in line], marker="o", markersize=4, label=label)
            for point in line:
                axis.annotate(str(point.users), (point.user_speed, point.speed), fontsize=6)
        axis.set_title(group, fontsize=10)
        axis.set_xlabel("tokens/s of a user", fontsize=8)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=6)
    axes[0][0].set_ylabel("tokens/s of all", fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
