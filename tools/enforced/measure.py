"""Measures what a backend does with a case: it enforces it, is stricter, refuses it, or accepts an invalid text.

Invariant: a verdict depends only on the texts that a matcher accepted or rejected, byte by byte and with the stop
token, and on the errors of `compile`. White space is of the kind `any`.
Not responsible for: the page (see report.py).
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

from grammar_service.backends.backend import Backend, Compiled
from grammar_service.backends.registry import load_backend
from grammar_service.errors import InvalidGrammar, LimitExceeded
from grammar_service.grammar.value import Grammar, Kind, Reading, Whitespace, parse
from tools.enforced.bytes_vocabulary import STOP, bytes_vocabulary
from tools.enforced.case import Case
from tools.enforced.combinations import APPLICATORS, ARRAYS
from tools.enforced.formats import FORMATS
from tools.enforced.keywords import ANY_VALUE, NUMBERS, OBJECTS, STRINGS

KEYWORDS: tuple[Case, ...] = (*ANY_VALUE, *NUMBERS, *STRINGS, *OBJECTS, *ARRAYS, *APPLICATORS)
ALL: tuple[Case, ...] = (*KEYWORDS, *FORMATS)


class Outcome(enum.Enum):
    """The result of a case."""

    ENFORCED = "enforced"
    STRICTER = "stricter"
    """No invalid text is accepted, and some valid texts are rejected too."""
    VERIFIED = "verified"
    """As REFUSED; and with UNENFORCED_VERIFY every text is told apart."""
    REFUSED = "refused"
    """The error names the keyword. With `allow_unenforced` the grammar is accepted with a warning."""
    ANNOTATION = "annotation"
    """The keyword has no effect, as JSON Schema says, and a warning names it."""
    IMPOSSIBLE = "refused always"
    """The library cannot compile the schema at all."""
    SILENT = "silent"
    """An invalid text was accepted without a warning: a defect."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The behaviour of one backend in one case."""

    case: Case
    outcome: Outcome
    texts: tuple[str, ...] = ()
    """The texts that decided: invalid texts that were accepted (SILENT), valid texts that were rejected (STRICTER)."""
    beyond: tuple[str, ...] = ()
    """Texts of the case's `beyond` that were accepted."""
    error: str = ""
    """The error message of a refusal."""


def measure(name: str, cases: Iterable[Case] = ALL) -> list[Verdict]:
    """Return the verdicts for one backend. Takes seconds. Raises NotSupported if the backend is not installed."""
    backend = load_backend(name, bytes_vocabulary())
    return [_verdict(backend, case) for case in cases]


def _verdict(backend: Backend, case: Case) -> Verdict:
    grammar = parse(Kind.JSON_SCHEMA, json.dumps(case.schema), Whitespace.ANY)
    try:
        compiled = backend.load(grammar, backend.compile(grammar))
    except (InvalidGrammar, LimitExceeded) as error:
        return _refusal(backend, case, grammar, str(error))
    accepted = tuple(text for text in case.invalid if _takes(compiled, text))
    rejected = tuple(text for text in case.valid if not _takes(compiled, text))
    beyond = tuple(text for text in case.beyond if _takes(compiled, text))
    if compiled.warnings and case.keyword == "format":
        return Verdict(case, Outcome.ANNOTATION)
    if accepted or compiled.warnings:
        return Verdict(case, Outcome.SILENT, accepted, beyond)
    return Verdict(case, Outcome.STRICTER if rejected else Outcome.ENFORCED, rejected, beyond)


def _refusal(backend: Backend, case: Case, grammar: Grammar, error: str) -> Verdict:
    try:
        compiled = backend.load(grammar, backend.compile(grammar, allow_unenforced=True))
    except (InvalidGrammar, LimitExceeded):
        return Verdict(case, Outcome.IMPOSSIBLE, error=error)
    if not compiled.warnings:
        return Verdict(case, Outcome.SILENT, error=error)
    verifies = replace(grammar, reading=Reading(verify=True))
    try:
        compiled = backend.load(verifies, backend.compile(verifies))
    except (InvalidGrammar, LimitExceeded):
        return Verdict(case, Outcome.REFUSED, error=error)
    if accepted := tuple(text for text in case.invalid if _takes(compiled, text)):
        return Verdict(case, Outcome.SILENT, accepted, error=error)
    tells = all(_takes(compiled, text) for text in case.valid)
    return Verdict(case, Outcome.VERIFIED if tells else Outcome.REFUSED, error=error)


def _takes(compiled: Compiled, text: str) -> bool:
    matcher = compiled.matcher()
    return all(matcher.accept(byte) for byte in text.encode()) and matcher.accept(STOP)
