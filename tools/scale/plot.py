"""One picture of a plan: the percentiles of both times over the number of engines, with the goals as lines.

Invariant: the picture shows the figures of the table, and nothing is simulated here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from tools.scale.plan import Goals, Size


def draw(sizes: Sequence[Size], goals: Goals, title: str, path: Path) -> None:
    """Write a PNG: the time to the first token on the left, between responses on the right, on logarithmic scales.

    Raises:
        ImportError: matplotlib is not installed.

    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9.6, 3.9))
    numbers = [size.num_engines for size in sizes]
    panels = (
        ("time to the first token", [(s.ttft_s, s.ttft_spread_s) for s in sizes], goals.ttft_s),
        ("time between two responses", [(s.itl_s, s.itl_spread_s) for s in sizes], goals.itl_s),
    )
    for axis, (label, values, goal) in zip(axes, panels, strict=True):
        times, spreads = [v * 1e3 for v, _ in values], [v * 1e3 for _, v in values]
        axis.errorbar(numbers, times, yerr=spreads, color="#08519c", marker="o", linewidth=2, capsize=3)
        if not math.isinf(goal):
            axis.axhline(goal * 1e3, color="#e6550d", linestyle="--", linewidth=1.2)
        axis.set_yscale("log")
        axis.set_xlabel("engines")
        axis.set_ylabel(f"p{goals.quantile:g}, ms")
        axis.set_title(label, fontsize=10)
        axis.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
        axis.grid(alpha=0.25)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
