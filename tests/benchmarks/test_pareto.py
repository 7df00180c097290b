"""Speed of a user over the speed of all: points, the front, the table, the plot, and the passes behind them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.harness.measure import Answer, Run
from benchmarks.quality.acceptance_plot import draw_pareto, published_length
from benchmarks.quality.acceptance_prompts import own_prompts
from benchmarks.quality.pareto import Point, build_parser, cells_of, front, measure, result_table
from tests.benchmarks.conftest import Serve
from tests.benchmarks.fake_engine import Script


def point(variant: str, drafts: int, users: int, gap_ms: float, wall_s: float, group: str = "extraction") -> Point:
    """Return a point of one answer with 10 tokens in 4 steps, `gap_ms` for each."""
    answer = Answer("a", "", tuple(range(10)), "stop", 1.0, 1.0 + gap_ms / 200, 1.0 + gap_ms / 100, 4)
    return Point(variant, drafts, users, group, (Run((answer,), wall_s),))


def test_a_point_has_the_medians_of_its_rounds() -> None:
    slow, fast = point("a", 3, 1, 20.0, 2.0), point("a", 3, 1, 10.0, 1.0)
    both = Point("a", 3, 1, "extraction", (*slow.runs, *fast.runs, *fast.runs))
    assert slow.user_speed == pytest.approx(50.0)
    assert slow.speed == pytest.approx(5.0)
    assert slow.length == pytest.approx(2.5)
    assert both.user_speed == pytest.approx(100.0)
    assert both.speed == pytest.approx(10.0)


def test_the_front_has_the_points_that_none_beats() -> None:
    alone, many = point("a", 3, 1, 10.0, 2.0), point("a", 3, 4, 20.0, 1.0)
    beaten, elsewhere = point("b", 3, 4, 25.0, 1.5), point("b", 3, 4, 25.0, 1.5, "generation")
    assert front([beaten, many, elsewhere, alone]) == [alone, many, elsewhere]


def test_the_table_has_each_point_beside_the_published_length() -> None:
    points = [
        point("no drafts", 0, 1, 20.0, 2.0),
        point("ngram+noindex", 3, 1, 10.0, 1.0),
        point("grammar", 3, 1, 9.0, 9),
    ]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in result_table(points).splitlines()[2:]]
    assert rows == [
        ["extraction", "no drafts", "0", "1", "50.0", "5.0", "2.50", "-", ""],
        ["extraction", "ngram+noindex", "3", "1", "100.0", "10.0", "2.50", "2.59", "*"],
        ["extraction", "grammar", "3", "1", "111.1", "1.1", "2.50", "-", "*"],
    ]


@pytest.mark.parametrize(
    ("variant", "group", "want"),
    [
        ("ngram", "generation", 1.89),
        ("eagle3+masked", "extraction", 2.86),
        ("eagle3+free", "generation", 2.33),
        ("eagle3", "extraction", 2.65),
        ("decoupled", "extraction", None),
        ("ngram", "repeated", None),
    ],
)
def test_published_lengths_are_those_of_the_same_drafter(variant: str, group: str, want: float | None) -> None:
    assert published_length(variant, group) == want


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "pareto.png"
    draw_pareto([point("a", k, c, 10.0 * c, 1.0, g) for k in (0, 3) for c in (1, 2) for g in "xy"], "title", path)
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_every_cell_runs_every_prompt_with_its_drafts_and_users(serve_fake: Serve) -> None:
    address, engine = serve_fake(Script())
    prompts, stepped = own_prompts(2, ["extraction", "generation"]), list[str]()
    cells = [("no drafts", 0), ("ngram", 3)]
    points = asyncio.run(measure(address, prompts, cells, [1, 2], 2, 16, stepped.append))
    found = {(p.variant, p.drafts, p.users, p.group): [len(run.answers) for run in p.runs] for p in points}
    assert found == {
        (*cell, users, group): [2 * users, 2 * users]
        for cell in cells
        for users in (1, 2)
        for group in ("extraction", "generation")
    }
    assert len(stepped) == 16
    asked = [request.speculation.num_draft_tokens for request in engine.requests[2:]]
    assert asked.count(0) == asked.count(3) == 24
    assert engine.most_running == 2


@pytest.mark.parametrize(
    ("flags", "problem"),
    [(["--drafts", "0"], r"^--drafts: 0"), (["--concurrency", "0"], r"^--rounds and --concurrency")],
)
def test_wrong_numbers_are_refused(flags: list[str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        cells_of(build_parser().parse_args(flags))
    variants, drafts, levels = cells_of(build_parser().parse_args([]))
    assert ([each.name for each in variants], drafts, levels) == (["ngram"], [3, 7], [1, 2, 4, 8, 16])
