"""Tokens a step by drafter: prompts, variants, the table, and answers that differ."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.harness.measure import Answer
from benchmarks.harness.tables import Progress
from benchmarks.quality.acceptance import Cell, answer, differing, result_table
from benchmarks.quality.acceptance_prompts import facts, own_prompts, read_prompts
from tests.benchmarks.conftest import Serve
from tests.benchmarks.fake_engine import Script


def made(name: str, *tokens: int, steps: int = 1) -> Answer:
    return Answer(name, "", tokens, "stop", 0.0, 0.0, 0.0, steps)


def cell(variant: str, drafts: int, group: str, *answers: Answer, wall_s: float = 2.0) -> Cell:
    return Cell(variant, drafts, group, answers, wall_s)


def test_facts_are_the_leaves() -> None:
    value = {"name": "Orr", "year": 1874, "tags": ["a", "b"], "at": {"city": "Oslo"}, "none": None}
    assert list(facts(value)) == [
        "The name is Orr.",
        "The year is 1874.",
        "The tags is a.",
        "The tags is b.",
        "The at city is Oslo.",
    ]


def test_prompts_come_from_a_file_by_group(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    tests = [{"valid": False, "data": {"n": "no"}}, {"valid": True, "data": {"n": 7}}]
    cases = [{"name": f"JME_{i}", "schema": {"type": "object"}, "tests": tests} for i in range(5)]
    cases += [{"name": f"Other_{i}", "schema": {"type": "object"}, "tests": []} for i in range(5)]
    cases += [{"name": "Other_long", "schema": {"title": "x" * 5000}, "tests": []}]
    path.write_text("\n".join(map(json.dumps, cases)))
    prompts = read_prompts(path, 3)
    assert [prompt.group for prompt in prompts] == ["extraction"] * 3 + ["generation"] * 3
    assert "The n is 7." in prompts[0].messages[1][1]
    assert len(read_prompts(path, 100)) == 10
    path.write_text('{"name": "a"}')
    with pytest.raises(ValueError, match=r"cases\.jsonl:1"):
        read_prompts(path, 3)


def test_the_table_has_tokens_a_step_and_the_ratio_to_no_drafts() -> None:
    cells = [
        cell("no drafts", 0, "extraction", made("a", 1, 2, 3, 4, steps=4)),
        cell("ngram", 3, "extraction", made("a", 1, 2, 3, 4, steps=2), wall_s=1.0),
    ]
    text = result_table(cells)
    assert "| ngram" in text
    row = next(line for line in text.splitlines() if line.startswith("| ngram"))
    assert [part.strip() for part in row.split("|")[1:-1]] == ["ngram", "3", "2.00", "4.0", "2.00"]
    assert "2.86" in text
    repeated = result_table([*cells, cell("ngram", 3, "repeated", made("a", 1, 2))])
    published = next(line for line in repeated.splitlines() if "published: n-gram" in line)
    assert [part.strip() for part in published.split("|")[3:5]] == ["2.59", ""], "nothing like it was published"
    assert "published" not in result_table([cell("ngram", 3, "repeated", made("a", 1, 2))])


def test_an_answer_that_differs_or_was_never_given_is_named() -> None:
    reference = [cell("", 0, "extraction", made("a", 1, 2), made("b", 3))]
    assert differing([cell("", 3, "extraction", made("a", 1, 2))], reference) == []
    found = [cell("", 3, "extraction", made("a", 1, 9), made("c", 3)), cell("", 3, "generation", made("b", 3))]
    assert differing(found, reference) == ["a", "c", "b"]


def test_every_prompt_is_asked_with_its_drafts(serve_fake: Serve) -> None:
    address, engine = serve_fake(Script())
    prompts = own_prompts(2, ["extraction", "generation"])
    cells = asyncio.run(answer(address, prompts, 4, 16, Progress(4)))
    assert [(found.group, len(found.answers)) for found in cells] == [("extraction", 2), ("generation", 2)]
    assert {request.speculation.num_draft_tokens for request in engine.requests} == {4}
    assert all(found.wall_s > 0 for found in cells)
    asyncio.run(answer(address, prompts, 4, 16, Progress(4), named=False))
    assert not any(request.speculation.HasField("num_draft_tokens") for request in engine.requests[4:])
    # The fake's tokens depend on the prompt and not on the drafts.
    again = asyncio.run(answer(address, prompts, 0, 16, Progress(4)))
    assert differing(cells, again) == []
    changed = [replace(again[0], answers=again[1].answers), again[1]]
    assert differing(cells, changed) == [prompt.name for prompt in prompts[:2]]
