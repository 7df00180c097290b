"""The table of what is enforced: no silent acceptance, correct cases, and equality with the committed page."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import jsonschema
import pytest

from grammar_service.backends.registry import NAMES, installed_version
from tools.enforced.case import Case
from tools.enforced.measure import ALL, KEYWORDS, Outcome, Verdict, measure
from tools.enforced.report import section

ASSERTIONS = [
    *("type", "enum", "const", "multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum"),
    *("maxLength", "minLength", "pattern", "format", "maxItems", "minItems", "uniqueItems", "maxContains"),
    *("minContains", "contains", "maxProperties", "minProperties", "required", "dependentRequired", "properties"),
    *("patternProperties", "additionalProperties", "propertyNames", "items", "prefixItems", "unevaluatedItems"),
    *("unevaluatedProperties", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "$ref", "$anchor"),
    "$dynamicRef",
]

OTHER_RULES = {"pattern", "dependencies", "items, an array, as in draft 7", "$ref, to another document"}
"""Cases that the jsonschema package reads differently: patterns, draft 7, documents that it would have to fetch."""


@pytest.fixture(scope="module")
def verdicts() -> dict[str, list[Verdict]]:
    return {name: measure(name) for name in NAMES if importlib.util.find_spec(name)}


def test_every_assertion_of_the_draft_has_a_case() -> None:
    assert sorted(set(ASSERTIONS) - {case.keyword for case in ALL}) == []
    assert len({case.name for case in ALL}) == len(ALL)


def _is_validated(case: Case) -> bool:
    return case.keyword not in OTHER_RULES and case.name not in OTHER_RULES


@pytest.mark.parametrize("case", [case for case in KEYWORDS if _is_validated(case)], ids=lambda case: case.name)
def test_the_cases_agree_with_a_json_schema_validator(case: Case) -> None:
    dialect = jsonschema.validators.validator_for(case.schema, default=jsonschema.Draft202012Validator)
    validator = dialect(case.schema, format_checker=jsonschema.FormatChecker(["date", "email"]))
    assert [text for text in case.valid if not validator.is_valid(json.loads(text))] == []
    assert [text for text in case.invalid if _is_json(text) and validator.is_valid(json.loads(text))] == []


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=lambda name: pytest.fail(name) if name != "NaN" else 1 / 0)
    except (json.JSONDecodeError, ZeroDivisionError):
        return False
    return True


@pytest.mark.slow
def test_no_backend_accepts_an_invalid_text_silently(verdicts: dict[str, list[Verdict]]) -> None:
    assert verdicts
    for name, each in verdicts.items():
        assert [(name, v.case.name, v.texts) for v in each if v.outcome is Outcome.SILENT] == []


@pytest.mark.slow
def test_a_refusal_names_its_keyword(verdicts: dict[str, list[Verdict]]) -> None:
    refused = [(name, v) for name, each in verdicts.items() for v in each if v.outcome is Outcome.REFUSED]
    assert refused
    for name, verdict in refused:
        assert f"{name} would not enforce all of it: " in verdict.error
    placed = ("not", "contains", "uniqueItems", "dependentRequired")
    assert all(f": /{v.case.keyword}: " in v.error for _, v in refused if v.case.keyword in placed and v.case.use == "")


@pytest.mark.slow
def test_the_committed_page_agrees_with_the_libraries(verdicts: dict[str, list[Verdict]], root: Path) -> None:
    committed = (root / "docs/grammars.md").read_text(encoding="utf-8")
    if set(verdicts) != set(NAMES):
        pytest.skip(f"the page needs {', '.join(NAMES)}; installed are {', '.join(verdicts)}")
    versions = {name: installed_version(name) for name in verdicts}
    if any(f"{name} {version}" not in committed for name, version in versions.items()):
        pytest.skip(f"the page was made with other versions than {versions}; run python -m tools.enforced --write")
    assert section(verdicts, versions) in committed, "run python -m tools.enforced --write"


def test_the_section_shows_silent_acceptance() -> None:
    verdict = Verdict(KEYWORDS[0], Outcome.SILENT, ('"|"',))
    assert '**silently accepts**: `"\\|"`' in section({"toy": [verdict]}, {"toy": "1"})
