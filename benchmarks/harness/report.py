"""The tables and the JSON of a `serve` run.

Invariant: a system that failed has a row that says so and a line with the reason; no system is omitted silently.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping

from benchmarks.harness.measure import GuidanceCost, Summary
from benchmarks.harness.tables import number, share, table

Cell = tuple[str, int]
"""(workload, concurrency)."""

Results = Mapping[Cell, Mapping[str, Summary | str]]
"""Per cell and system the summary, or why the system failed."""

Peers = Mapping[str, Collection[str]]
"""Per workload the systems that count as peers of this engine."""


def best_peer(cell: Mapping[str, Summary | str], peers: Collection[str]) -> tuple[str, float] | None:
    """Return the name and the tokens/s of the fastest of `peers` in a cell; None when none of them has a figure."""
    speeds = {
        system: summary.tokens_per_s
        for system, summary in cell.items()
        if system in peers and isinstance(summary, Summary) and summary.tokens_per_s > 0
    }
    return max(speeds.items(), key=lambda entry: entry[1]) if speeds else None


def ratio_to_best(summary: Summary, cell: Mapping[str, Summary | str], peers: Collection[str]) -> float:
    """Return tokens/s over those of the cell's best peer; NaN without one."""
    best = best_peer(cell, peers)
    return math.nan if best is None else summary.tokens_per_s / best[1]


def result_table(cell: Mapping[str, Summary | str], peers: Collection[str]) -> str:
    """Return the table of one workload at one concurrency, with every figure."""
    header = (
        "system",
        "tok/s",
        "ratio",
        "req/s",
        "TTFT p50",
        "TPOT p50",
        "TPOT p99",
        "tok/step",
        "valid",
        "stop",
        "tokens",
    )
    rows = []
    for system, summary in cell.items():
        if isinstance(summary, str):
            rows.append([system, "fails", "", "", "", "", "", "", "", "", ""])
            continue
        rows.append([
            system,
            number(summary.tokens_per_s),
            number(ratio_to_best(summary, cell, peers), 2, "x"),
            number(summary.requests_per_s, 2),
            number(summary.ttft_p50_ms, 0, " ms"),
            number(summary.tpot_p50_ms, 1, " ms"),
            number(summary.tpot_p99_ms, 1, " ms"),
            number(summary.acceptance_length, 2),
            share(summary.valid_share),
            share(summary.stop_share),
            str(summary.tokens),
        ])  # fmt: skip
    failures = [f"fails: {system}: {words}" for system, words in cell.items() if isinstance(words, str)]
    return "\n".join([table(header, rows), *failures])


def overview_table(results: Results, peers: Peers) -> str:
    """Return one table over all workloads: a row per system, a column per concurrency.

    A cell holds tokens/s, the median time to the first token, and tokens/s over those of the cell's best peer. The
    best peer's own cell has a star.
    """
    workloads = list(dict.fromkeys(name for name, _ in results))
    levels = list(dict.fromkeys(level for _, level in results))
    rows = []
    for name in workloads:
        for system in dict.fromkeys(system for level in levels for system in results[name, level]):
            cells = [_overview(system, results[name, level], peers[name]) for level in levels]
            rows.append([name, system, *cells])
    return table(["workload", "system", *(f"{level} at a time" for level in levels)], rows)


def _overview(system: str, cell: Mapping[str, Summary | str], peers: Collection[str]) -> str:
    summary = cell[system]
    if isinstance(summary, str):
        return "fails"
    best = best_peer(cell, peers)
    star = "*" if best is not None and best[0] == system else ""
    ratio = number(ratio_to_best(summary, cell, peers), 2, "x")
    return f"{number(summary.tokens_per_s, 0)} tok/s, {number(summary.ttft_p50_ms, 0, ' ms')}, {ratio}{star}"


def skipped_line(absent: Mapping[str, str]) -> str:
    """Return one line that names every system that did not start, by reason; "" when all did."""
    names: dict[str, list[str]] = {}
    for name, reason in absent.items():
        first = reason.strip().splitlines() or ["no reason given"]
        names.setdefault(first[0], []).append(name)
    parts = [f"{', '.join(these)} ({reason})" for reason, these in names.items()]
    return f"skipped: {'; '.join(parts)}" if parts else ""


def guidance_table(costs: Mapping[Cell, GuidanceCost | str]) -> str:
    """Return the table of the guided / free comparison."""
    header = (
        "system",
        "c",
        "guided step",
        "free step",
        "guided / free",
        "mask wait",
        "tok/step guided",
        "free",
        "pairs",
    )
    rows = []
    for (system, level), cost in costs.items():
        if isinstance(cost, str):
            rows.append([system, str(level), f"fails: {cost}"])
            continue
        rows.append([
            system,
            str(level),
            number(cost.guided_step_ms, 2, " ms"),
            number(cost.free_step_ms, 2, " ms"),
            number(cost.ratio, 3),
            share(cost.mask_wait_share),
            number(cost.guided_acceptance, 2),
            number(cost.free_acceptance, 2),
            str(cost.pairs),
        ])  # fmt: skip
    return table(header, rows)


def as_json(
    results: Results, costs: Mapping[Cell, GuidanceCost | str], peers: Peers, absent: Mapping[str, str]
) -> dict[str, object]:
    """Return what was measured as plain data; a failure is its message. NaN becomes None."""

    def plain(value: Summary | GuidanceCost | str) -> object:
        if isinstance(value, str):
            return value
        fields = dataclasses.asdict(value)
        return {key: None if isinstance(field, float) and math.isnan(field) else field for key, field in fields.items()}

    workloads = []
    for (name, level), cell in results.items():
        best = best_peer(cell, peers[name])
        workloads.append({
            "workload": name,
            "concurrency": level,
            "best_peer": None if best is None else best[0],
            "systems": {system: plain(row) for system, row in cell.items()},
        })  # fmt: skip
    return {
        "workloads": workloads,
        "guidance": [{"system": name, "concurrency": level, "cost": plain(c)} for (name, level), c in costs.items()],
        "skipped": dict(absent),
    }
