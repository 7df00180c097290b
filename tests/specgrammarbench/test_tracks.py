"""SpecGrammarBench over a scripted server: every verdict can fail, and says what the server did."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jsonschema
import pytest

from lockstep_bench.cases import Case, Data, Grammar, Keyword, hostile_schema, read_data
from lockstep_bench.endpoint import About, Ask, Endpoint, Outcome, Reply
from lockstep_bench.judge import problem
from lockstep_bench.report import table
from lockstep_bench.tracks import TRACKS, Finding, Run, as_json, of_keyword

DATA = read_data()


@dataclass
class Scripted:
    """An endpoint whose answers a function makes. Four pieces arrive `gap_s` apart, by a clock of their own."""

    answer: Callable[[Ask], Reply]
    drafts_by_request: bool = True
    gap_s: Callable[[Ask], float] = lambda ask: 0.01
    hostile: int = 0
    """Hostile requests that run."""

    async def about(self) -> About:
        return About("scripted 1", "none")

    async def ask(self, ask: Ask) -> Reply:
        is_hostile = ask.prompt == "Answer:"
        self.hostile += is_hostile
        try:
            await asyncio.sleep(0.2 if is_hostile else 0.25 if self.hostile else 0.01)
            reply = self.answer(ask)
            gap_s = self.gap_s(ask) * (5 if self.hostile else 1)
            reply.arrivals, reply.tokens = [gap_s * (1 + i) for i in range(4)], 4
            return reply
        finally:
            self.hostile -= is_hostile

    async def aclose(self) -> None:
        pass


def done(text: str, finish: str = "stop") -> Reply:
    return Reply(Outcome.DONE, text, finish)


def instance(case: Case) -> str:
    """Return a valid answer of a guided case."""
    return ANSWERS[case.name]


ANSWERS = {
    "person": '{"name": "a", "age": 3, "city": "b"}',
    "date": "2024-02-03",
    "sentiment": "mixed",
    "sum": "1+2=3",
}
FEW = replace(DATA, guided=[case for case in DATA.guided if case.name in ANSWERS])


def grammars(ask: Ask) -> Case:
    return next(case for case in FEW.guided if case.grammar == ask.grammar)


async def found(track: str, endpoint: Endpoint, data: Data = FEW, **options: Any) -> Finding:
    steps: list[None] = []
    run = Run(data, endpoint, step=lambda: steps.append(None), **options)
    finding = await TRACKS[track](run)
    if "not offered" not in finding.figures:
        assert len(steps) == run.total([track])
    return finding


async def test_valid_and_invalid_answers_are_told_apart() -> None:
    def answer(ask: Ask) -> Reply:
        name = grammars(ask).name
        texts = {"person": done('{"name": "a"}'), "date": done("2024-02", "length"), "sum": Reply(Outcome.NOT_OFFERED)}
        return texts.get(name) or done(ANSWERS[name])

    finding = await found("valid", Scripted(answer))
    kinds = {name: finding.figures[name] for name in ("valid", "invalid", "cut off", "not offered")}
    assert kinds == {"valid": 1, "invalid": 1, "cut off": 1, "not offered": 1}
    assert finding.figures["by kind"]["json"] == {"invalid": 1}
    (note,) = finding.notes
    assert note.startswith("person (json): invalid: ")


async def test_a_refused_answer_is_none_that_failed() -> None:
    replies = {"person": Reply(Outcome.REFUSED, detail="400: no"), "date": Reply(Outcome.FAILED, detail="reset")}
    finding = await found(
        "valid", Scripted(lambda ask: replies.get(grammars(ask).name) or done(instance(grammars(ask))))
    )
    assert (finding.figures["refused"], finding.figures["failed"], finding.figures["valid"]) == (1, 1, 2)


@pytest.mark.parametrize("differs", [False, True])
async def test_a_draft_that_changes_an_answer_is_seen(differs: bool) -> None:
    def answer(ask: Ask) -> Reply:
        return done("other" if differs and ask.drafts and ask.temperature else "same")

    finding = await found("equal", Scripted(answer))
    count = len(FEW.guided)
    wanted = {"greedy, equal": count, "seeded, different" if differs else "seeded, equal": count}
    assert finding.figures == wanted
    assert len(finding.notes) == count * differs


async def test_an_endpoint_without_drafts_is_asked_for_them() -> None:
    asked: list[bool] = []

    def plain(ask: Ask) -> Reply:
        asked.append(ask.drafts)
        return done("")

    other = Scripted(plain, drafts_by_request=False)
    await found("equal", Scripted(lambda ask: done(""), drafts_by_request=False), without_drafts=other)
    assert asked == [False] * 2 * len(FEW.guided)
    finding = await found("equal", Scripted(lambda ask: done(""), drafts_by_request=False))
    assert "--without-drafts" in finding.figures["not offered"]


async def test_the_cost_of_a_grammar_is_the_ratio_of_both_paces() -> None:
    endpoint = Scripted(lambda ask: done("x"), gap_s=lambda ask: 0.04 if ask.grammar else 0.01)
    finding = await found("cost", endpoint, rounds=2)
    assert finding.figures["guided / free"] == pytest.approx(0.25)
    assert finding.figures["guided p99 gap ms"] == pytest.approx(40)
    failed = await found("cost", Scripted(lambda ask: Reply(Outcome.FAILED, detail="gone")), rounds=1)
    assert math.isnan(failed.figures["guided / free"])
    assert len(failed.notes) == 2 * len(DATA.steady)


async def test_the_gain_of_drafts_is_the_ratio_of_both_paces() -> None:
    def gap_s(ask: Ask) -> float:
        return 0.01 if ask.drafts else 0.03 if ask.grammar else 0.02

    finding = await found("drafts", Scripted(lambda ask: done("x"), gap_s=gap_s))
    assert finding.figures["guided, drafts / none"] == pytest.approx(3)
    assert finding.figures["free, drafts / none"] == pytest.approx(2)


async def test_bystanders_of_an_attack_are_measured() -> None:
    endpoint = Scripted(lambda ask: done(ANSWERS["person"]))
    finding = await found("bystanders", endpoint, attack_s=2.0, attacks_per_s=8.0)
    assert finding.figures["free p99 attacked / quiet"] == pytest.approx(5)
    assert finding.figures["guided p99 attacked / quiet"] == pytest.approx(5)
    assert 0 < finding.figures["free tokens attacked / quiet"] < 1
    assert finding.figures["hostile requests"]["done"] >= 1
    assert finding.figures["attacked failed streams"] == 0
    assert FEW.guided[0].name == "person"
    assert finding.figures["answers afterwards"] == "valid"


async def test_a_server_that_an_attack_ends_is_seen() -> None:
    gone = False

    def answer(ask: Ask) -> Reply:
        nonlocal gone
        gone = gone or ask.prompt == "Answer:"
        return Reply(Outcome.FAILED, detail="connection refused") if gone else done("x")

    finding = await found("bystanders", Scripted(answer), attack_s=1.5)
    assert finding.figures["attacked failed streams"] > 0
    assert finding.figures["answers afterwards"] == "failed"


TRAP = Keyword("maximum", {"properties": {"n": {"type": "integer"}}}, {"properties": {"n": {"maximum": 9}}}, {"n": 50})
BAD, GOOD = done('{"n": 50}'), done('{"n": 5}')


@pytest.mark.parametrize(
    ("control", "asked", "wanted"),
    [
        (BAD, GOOD, "enforced"),
        (BAD, BAD, "weakened"),
        (GOOD, BAD, "weakened"),
        (GOOD, GOOD, "not shown"),
        (BAD, done('{"n": 5', "length"), "not shown"),
        (Reply(Outcome.FAILED), GOOD, "not shown"),
        (BAD, Reply(Outcome.REFUSED), "refused"),
        (BAD, Reply(Outcome.FAILED), "failed"),
    ],
)
def test_what_a_server_does_with_a_keyword(control: Reply, asked: Reply, wanted: str) -> None:
    assert of_keyword(TRAP, control, asked) == wanted


async def test_a_server_that_ignores_keywords_is_found() -> None:
    def answer(ask: Ask) -> Reply:
        return done(ask.prompt.splitlines()[-1])

    finding = await found("keywords", Scripted(answer))
    assert finding.figures["by keyword"] == {kind.name: "weakened" for kind in DATA.keywords}


async def test_json_that_is_cut_off_is_no_whole_json() -> None:
    texts = iter([done('{"rows": [', "length"), done('{"rows"', "stop"), done("[]", "length")])
    data = replace(DATA, long=[replace(DATA.long[0], grammar=Grammar("json", {"type": ["object", "array"]}))] * 3)
    finding = await found("complete", Scripted(lambda ask: next(texts)), data)
    assert finding.figures == {"asked": 3, "cut off": 1, "invalid": 1, "valid": 1}


@pytest.mark.parametrize("kind", DATA.keywords, ids=lambda kind: kind.name)
def test_a_trap_is_allowed_without_its_keyword_and_not_with_it(kind: Keyword) -> None:
    text = json.dumps(kind.bad)
    assert problem(Grammar("json", kind.base), text) is None
    assert problem(Grammar("json", kind.whole), text) is not None
    assert text in kind.prompt


def test_every_schema_is_one() -> None:
    schemas = [case.grammar.source for case in (*DATA.guided, *DATA.long, *DATA.steady) if case.grammar.kind == "json"]
    for schema in (
        *schemas,
        *(kind.whole for kind in DATA.keywords),
        *(hostile_schema(number) for number in range(12)),
    ):
        jsonschema.Draft202012Validator.check_schema(schema)
    assert len({json.dumps(hostile_schema(number)) for number in range(12)}) == 12


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar("json", {"type": "integer", "maximum": 3}), "3", "4"),
        (Grammar("json", {"type": "number"}), "1", "NaN"),
        (Grammar("json", {"format": "date"}), '"2024-02-29"', '"2023-02-29"'),
        (Grammar("regex", "a+"), "aa", "aa\n"),
        (Grammar("choice", ["a", "b"]), "b", "ab"),
        (Grammar("ebnf", 'root ::= "a"', "a"), "a", "b"),
    ],
)
def test_the_judge(grammar: Grammar, good: str, bad: str) -> None:
    assert problem(grammar, good) is None
    assert problem(grammar, bad)


def result(name: str, *findings: Finding, version: str = "1") -> dict[str, Any]:
    return {"name": name, "data_version": version, "tracks": as_json(findings)}


def test_a_table_has_what_was_found_and_says_what_was_not_run() -> None:
    mine = result(
        "mine", Finding("valid", {"asked": 5, "valid": 3, "not offered": 2}), Finding("equal", {"greedy, equal": 2})
    )
    theirs = result("theirs", Finding("equal", {"not offered": "no"}), Finding("cost", {"guided / free": math.nan}))
    cells = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:4]]
        for line in table([mine, theirs]).splitlines()
    }
    assert cells["question"] == ["mine", "theirs"]
    assert cells["guided answers valid"] == ["3 of 3", "not run"]
    assert cells["with drafts equal to without, greedy"] == ["2 of 2", "not offered"]
    assert cells["guided over free"] == ["not run", "n/a"]


def test_results_of_different_data_are_not_compared() -> None:
    with pytest.raises(ValueError, match="versions 1, 2"):
        table([result("a"), result("b", version="2")])
