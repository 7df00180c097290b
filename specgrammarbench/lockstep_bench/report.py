"""Result files and the table over them.

Invariant: a table is made from result files only, so a printed table can be made again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Figures = Mapping[str, Any]


def write(result: Mapping[str, Any], path: Path) -> None:
    """Write a result file; NaN becomes null."""
    path.write_text(json.dumps(_finite(result), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """Read a result file. Raises ValueError, with the path, for a file that is none."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(result, dict) or "data_version" not in result or "tracks" not in result:
        raise ValueError(f"{path}: no result of lockstep-bench")
    return result


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _share(*names: str) -> Callable[[Figures], str]:
    """Return what prints the sum of some counts over all that were asked and could be asked."""

    def text(figures: Figures) -> str:
        asked = figures.get("asked", 0) - figures.get("not offered", 0)
        return f"{sum(figures.get(name, 0) for name in names)} of {asked}"

    return text


def _equal(name: str) -> Callable[[Figures], str]:
    def text(figures: Figures) -> str:
        counts = [figures.get(f"{name}, {each}", 0) for each in ("equal", "different", "not answered")]
        missing = f", {counts[2]} not answered" if counts[2] else ""
        return f"{counts[0]} of {counts[0] + counts[1]}{missing}"

    return text


def _number(name: str, digits: int = 2) -> Callable[[Figures], str]:
    def text(figures: Figures) -> str:
        value = figures.get(name)
        return "n/a" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"

    return text


def _listed(name: str) -> Callable[[Figures], str]:
    def text(figures: Figures) -> str:
        return ", ".join(f"{count} {what}" for what, count in figures.get(name, {}).items() if count) or "none"

    return text


ROWS: Sequence[tuple[str, str, Callable[[Figures], str]]] = (
    ("guided answers valid", "valid", _share("valid")),
    ("invalid", "valid", _share("invalid")),
    ("cut off, refused or failed", "valid", _share("cut off", "refused", "failed")),
    ("grammars that the API cannot express", "valid", lambda figures: str(figures.get("not offered", 0))),
    ("with drafts equal to without, greedy", "equal", _equal("greedy")),
    ("with drafts equal to without, seeded", "equal", _equal("seeded")),
    ("tokens/s free", "cost", _number("free tok/s", 1)),
    ("tokens/s guided", "cost", _number("guided tok/s", 1)),
    ("guided over free", "cost", _number("guided / free")),
    ("drafts over none, guided", "drafts", _number("guided, drafts / none")),
    ("drafts over none, free", "drafts", _number("free, drafts / none")),
    ("bystander's p99 gap, attacked over quiet, free", "bystanders", _number("free p99 attacked / quiet")),
    ("bystander's p99 gap, attacked over quiet, guided", "bystanders", _number("guided p99 attacked / quiet")),
    ("bystander's tokens, attacked over quiet, free", "bystanders", _number("free tokens attacked / quiet")),
    ("bystander's tokens, attacked over quiet, guided", "bystanders", _number("guided tokens attacked / quiet")),
    ("streams that failed under attack", "bystanders", lambda figures: str(figures.get("attacked failed streams", 0))),
    ("hostile requests", "bystanders", _listed("hostile requests")),
    ("answer after the attack", "bystanders", lambda figures: str(figures.get("answers afterwards"))),
    ("keywords enforced", "keywords", lambda figures: str(figures.get("enforced", 0))),
    ("keywords refused by name", "keywords", lambda figures: str(figures.get("refused", 0))),
    ("keywords weakened in silence", "keywords", lambda figures: str(figures.get("weakened", 0))),
    (
        "keywords not shown, or failed",
        "keywords",
        lambda figures: str(figures.get("not shown", 0) + figures.get("failed", 0)),
    ),
    ("JSON whole at max_tokens", "complete", _share("valid")),
    ("JSON cut off", "complete", _share("cut off")),
    ("JSON cut off and said to be whole", "complete", _share("invalid")),
)
"""(what a line says, its track, its cell)."""


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of some results in Markdown, a column for each.

    Raises ValueError where they are of different versions of the data.
    """
    versions = sorted({str(result["data_version"]) for result in results})
    if len(versions) > 1:
        raise ValueError(f"results of different data cannot be compared: versions {', '.join(versions)}")
    rows = [["question", *(str(result["name"]) for result in results)]]
    for title, track, cell in ROWS:
        cells = []
        for result in results:
            figures = result["tracks"].get(track, {}).get("figures")
            missing = (
                "not run" if figures is None else "not offered" if isinstance(figures.get("not offered"), str) else None
            )
            cells.append(missing or cell(figures))
        rows.append([title, *cells])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])
