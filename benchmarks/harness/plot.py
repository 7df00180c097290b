"""One picture of a `serve` run: tokens/s and the time to the first token of every system, over the concurrency.

Invariant: the picture shows the figures of the table, and nothing is measured here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import Summary
from benchmarks.harness.report import Results

_ROWS: tuple[tuple[str, Callable[[Summary], float]], ...] = (
    ("tokens/s", lambda summary: summary.tokens_per_s),
    ("time to the first token, p50, ms", lambda summary: summary.ttft_p50_ms),
)
_OURS = ("#08519c", "#4292c6", "#9ecae1")
_PEERS = ("#e6550d", "#fdae6b", "#31a354", "#a1d99b", "#756bb1", "#bcbddc", "#636363", "#969696", "#bdbdbd")
_MARKERS = "os^vDP*X<>"


def curve(
    results: Results, workload: str, system: str, figure: Callable[[Summary], float]
) -> tuple[list[int], list[float]]:
    """Return the concurrencies at which `system` has a figure on `workload`, ascending, and the figures."""
    points = []
    for (name, level), cell in results.items():
        summary = cell.get(system, "")
        if name == workload and isinstance(summary, Summary) and not math.isnan(figure(summary)):
            points.append((level, figure(summary)))
    points.sort()
    return [level for level, _ in points], [value for _, value in points]


def styles(systems: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the line style of each system: this engine in blue and thick, the others in other colours."""
    ours = [system for system in systems if system.startswith("lockstep")]
    peers = [system for system in systems if system not in ours]
    found: dict[str, dict[str, Any]] = {}
    for names, colours, width in ((ours, _OURS, 2.6), (peers, _PEERS, 1.4)):
        for place, name in enumerate(names):
            marker = _MARKERS[place % len(_MARKERS)]
            found[name] = {"color": colours[place % len(colours)], "linewidth": width, "marker": marker}
    return found


def draw(results: Results, systems: Sequence[str], title: str, path: Path) -> None:
    """Write a PNG: a column per workload, tokens/s above, the time to the first token below on a logarithmic scale.

    A system that failed in a cell has no point there.

    Raises:
        ImportError: matplotlib is not installed.

    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    workloads = list(dict.fromkeys(workload for workload, _ in results))
    levels = sorted({level for _, level in results})
    look = styles(systems)
    figure, axes = plt.subplots(2, len(workloads), figsize=(3.9 * len(workloads) + 0.6, 7.4), squeeze=False)
    for column, workload in enumerate(workloads):
        for row, (label, value) in enumerate(_ROWS):
            axis = axes[row][column]
            for system in systems:
                x, y = curve(results, workload, system, value)
                axis.plot(x, y, label=system, markersize=5, **look[system])
            axis.set_xscale("log", base=2)
            axis.set_xlim(levels[0] / 1.2, levels[-1] * 1.2)
            axis.set_xticks(levels, [str(level) for level in levels])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
            axis.set_xlabel("at a time", fontsize=8)
            axis.tick_params(labelsize=8)
            if column == 0:
                axis.set_ylabel(label, fontsize=9)
        axes[0][column].set_ylim(bottom=0)
        axes[0][column].set_title(workload, fontsize=10)
        if any(curve(results, workload, system, _ROWS[1][1])[1] for system in systems):
            lower = axes[1][column]
            lower.set_yscale("log")
            lower.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            lower.yaxis.set_major_formatter("{x:g}")
            lower.minorticks_off()
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=9)
    figure.tight_layout(rect=(0, 0.03 + 0.025 * math.ceil(len(systems) / 4), 1, 1))
    figure.savefig(path, dpi=130)
    plt.close(figure)
