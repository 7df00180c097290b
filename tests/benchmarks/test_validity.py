"""The judge is strict where it must be, and the tally keeps what must be looked at."""

from __future__ import annotations

import pytest

from benchmarks.harness.validity import Judge, Tally, Verdict

PERSON = '{"type":"object","properties":{"age":{"type":"integer","minimum":0}},"required":["age"]}'


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ('{"age": 3}', Verdict.VALID),
        ('{"age": -3}', Verdict.INVALID),
        ("{}", Verdict.INVALID),
        ('{"age": 3', Verdict.INVALID),
        ('{"age": 3} and more', Verdict.INVALID),
        ("", Verdict.INVALID),
        ("[" * 200_000, Verdict.INVALID),
    ],
)
def test_verdicts(text: str, verdict: Verdict) -> None:
    assert Judge().judge(PERSON, text).verdict is verdict


def test_nan_is_not_json() -> None:
    assert Judge().judge('{"type":"number"}', "NaN").verdict is Verdict.INVALID


def test_the_draft_that_a_schema_names_is_the_draft_that_judges() -> None:
    tuple_of_strings = '{"$schema":"http://json-schema.org/draft-07/schema#","items":[{"type":"string"}]}'
    assert Judge().judge(tuple_of_strings, "[1]").verdict is Verdict.INVALID
    assert Judge().judge(tuple_of_strings, '["a", 1]').verdict is Verdict.VALID


def test_formats_are_asserted_on_demand() -> None:
    schema = '{"type":"string","format":"ipv4"}'
    assert Judge().judge(schema, '"nowhere"').verdict is Verdict.VALID
    assert Judge(formats=True).judge(schema, '"nowhere"').verdict is Verdict.INVALID


@pytest.mark.parametrize(
    "schema",
    ['{"type":"nonsense"}', '{"$ref":"#/$defs/missing"}', '{"type":"string","pattern":"(?<n>\\\\p{L})"}'],
)
def test_what_the_judge_cannot_judge_is_never_valid(schema: str) -> None:
    assert Judge().judge(schema, '"x"').verdict is Verdict.UNJUDGED


def test_only_complete_answers_are_judged() -> None:
    tally = Tally()
    judge = Judge()
    tally.answered("a", "stop", '{"age":1}', PERSON, judge)
    tally.answered("b", "grammar_incomplete", '{"ag', PERSON, judge)
    failed_before = tally.failed
    tally.answered("c", "stop", '{"age":"1"}', PERSON, judge)
    tally.refused("INVALID_ARGUMENT", "oneOf")
    assert tally.endings == {"stop/valid": 1, "grammar_incomplete": 1, "stop/INVALID": 1, "refused INVALID_ARGUMENT": 1}
    assert tally.refusals == {"INVALID_ARGUMENT: oneOf": 1}
    assert (failed_before, tally.failed) == (False, True)
    assert [(name, text) for name, _, text in tally.invalid] == [("c", '{"age":"1"}')]
    assert "$.age" in tally.invalid[0][1]
