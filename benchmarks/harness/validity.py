"""An independent judge of guided answers: is a text valid JSON that satisfies a schema?

Invariant: the judge is `jsonschema` under the draft that the schema names (2020-12 when it names none) and shares no
code with the grammar backends. A schema that it rejects and a reference that it cannot resolve give UNJUDGED, never
VALID.
"""

from __future__ import annotations

import enum
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import jsonschema
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from referencing.exceptions import Unresolvable

COMPLETE = ("stop", "grammar_closed")
"""Endings after which an answer must be valid."""


class Verdict(enum.Enum):
    """What the judge says."""

    VALID = "valid"
    INVALID = "invalid"
    UNJUDGED = "unjudged"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict and, unless it is VALID, the reason."""

    verdict: Verdict
    reason: str = ""


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


class Judge:
    """Judges texts against schemas and keeps one validator per schema. `formats`: is `format` asserted?"""

    def __init__(self, formats: bool = False) -> None:
        self.formats = formats
        self._validators: dict[str, Validator | Judgement] = {}

    def __repr__(self) -> str:
        return f"<Judge formats={self.formats} schemas={len(self._validators)}>"

    def judge(self, schema: str, text: str) -> Judgement:
        """Judge one answer; `schema` and `text` are JSON texts."""
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            return Judgement(Verdict.INVALID, f"not JSON: {error}")
        validator = self._validator(schema)
        if isinstance(validator, Judgement):
            return validator
        try:
            problem = next(validator.iter_errors(value), None)
        except (Unresolvable, re.error, RecursionError, ValueError, TypeError) as failure:
            return Judgement(Verdict.UNJUDGED, f"{type(failure).__name__}: {failure}")
        if problem is None:
            return Judgement(Verdict.VALID)
        return Judgement(Verdict.INVALID, f"at {problem.json_path}: {problem.message[:200]}")

    def _validator(self, schema: str) -> Validator | Judgement:
        if schema not in self._validators:
            self._validators[schema] = self._make(schema)
        return self._validators[schema]

    def _make(self, schema: str) -> Validator | Judgement:
        parsed = json.loads(schema)
        kind = validator_for(parsed, default=jsonschema.Draft202012Validator)
        try:
            kind.check_schema(parsed)
        except (jsonschema.SchemaError, RecursionError) as error:
            return Judgement(Verdict.UNJUDGED, f"schema refused: {str(error).splitlines()[0]}")
        return kind(parsed, format_checker=kind.FORMAT_CHECKER if self.formats else None)


@dataclass(slots=True)
class Tally:
    """Counts of endings and verdicts over many requests, with what must be looked at."""

    endings: Counter[str] = field(default_factory=Counter)
    """Requests by ending: "stop/valid", "stop/INVALID", "length", "refused INVALID_ARGUMENT", ..."""
    refusals: Counter[str] = field(default_factory=Counter)
    """Refused requests by status and reason."""
    invalid: list[tuple[str, str, str]] = field(default_factory=list)
    """(name, reason, text) of every complete answer that is not valid."""
    unjudged: list[tuple[str, str]] = field(default_factory=list)
    """(name, reason) of every complete answer that the judge could not judge."""

    def answered(self, name: str, finish: str, text: str, schema: str, judge: Judge) -> None:
        """Count an answer; one that ended by "stop", or was led to its end, is judged."""
        if finish not in COMPLETE:
            self.endings[finish] += 1
            return
        judgement = judge.judge(schema, text)
        label = "INVALID" if judgement.verdict is Verdict.INVALID else judgement.verdict.value
        self.endings[f"{finish}/{label}"] += 1
        if judgement.verdict is Verdict.INVALID:
            self.invalid.append((name, judgement.reason, text))
        elif judgement.verdict is Verdict.UNJUDGED:
            self.unjudged.append((name, judgement.reason))

    def refused(self, status: str, reason: str) -> None:
        """Count a request that ended with a gRPC status."""
        self.endings[f"refused {status}"] += 1
        self.refusals[f"{status}: {reason}"] += 1

    @property
    def failed(self) -> bool:
        """A complete answer was not valid."""
        return bool(self.invalid)
