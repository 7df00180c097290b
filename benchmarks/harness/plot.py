"""One picture of a `serve` run: tokens per second of every system, a panel per workload and concurrency.

Invariant: the picture shows the figures of the table, and nothing is measured here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness.measure import Summary
from benchmarks.harness.report import Cell


def draw(results: Mapping[Cell, Mapping[str, Summary | str]], systems: Sequence[str], title: str, path: Path) -> None:
    """Write a PNG of tokens/s. A system that failed in a panel has no bar there and says so.

    Raises:
        ImportError: matplotlib is not installed.

    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    workloads = list(dict.fromkeys(workload for workload, _ in results))
    levels = list(dict.fromkeys(level for _, level in results))
    figure, axes = plt.subplots(
        len(workloads),
        len(levels),
        figsize=(6.5 * len(levels), 0.42 * len(systems) * len(workloads) + 2),
        squeeze=False,
    )
    for (workload, level), cell in results.items():
        axis = axes[workloads.index(workload)][levels.index(level)]
        speeds = [_speed(cell.get(system, "")) for system in systems]
        known = [0.0 if math.isnan(speed) else speed for speed in speeds]
        colours = ["#1f77b4" if system.startswith("lockstep") else "#b0b0b0" for system in systems]
        axis.barh(range(len(systems)), known, color=colours)
        for place, speed in enumerate(speeds):
            words = " did not run" if math.isnan(speed) else f" {speed:.0f}"
            axis.text(known[place], place, words, va="center", fontsize=8)
        axis.set_yticks(range(len(systems)), systems, fontsize=8)
        axis.invert_yaxis()
        axis.set_xlim(0, max([*known, 1.0]) * 1.15)
        axis.set_title(f"{workload}, concurrency {level}", fontsize=10)
        axis.set_xlabel("tokens/s", fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _speed(summary: Summary | str) -> float:
    return math.nan if isinstance(summary, str) else summary.tokens_per_s
