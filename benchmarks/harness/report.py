"""The tables and the JSON of a `serve` run.

Invariant: a system that failed has a row that says so and a line with the reason; no system is omitted silently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from benchmarks.harness.measure import GuidanceCost, Summary
from benchmarks.harness.tables import number, share, table

BASELINE = "transformers + xgrammar processor"
"""The system that the ratio column divides by."""

Cell = tuple[str, int]
"""(workload, concurrency)."""


def result_table(cell: Mapping[str, Summary | str]) -> str:
    """Return the table of one workload at one concurrency."""
    base = cell.get(BASELINE)
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
        ratio = number(summary.tokens_per_s / base.tokens_per_s, 2, "x") if isinstance(base, Summary) else "-"
        rows.append([
            system,
            number(summary.tokens_per_s),
            ratio,
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
    results: Mapping[Cell, Mapping[str, Summary | str]], costs: Mapping[Cell, GuidanceCost | str]
) -> dict[str, object]:
    """Return what was measured as plain data; a failure is its message."""

    def plain(value: Summary | GuidanceCost | str) -> object:
        return value if isinstance(value, str) else dataclasses.asdict(value)

    return {
        "workloads": [
            {"workload": name, "concurrency": level, "systems": {system: plain(row) for system, row in cell.items()}}
            for (name, level), cell in results.items()
        ],
        "guidance": [{"system": name, "concurrency": level, "cost": plain(c)} for (name, level), c in costs.items()],
    }
