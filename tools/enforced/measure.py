"""What a backend does with a case: it enforces it, is stricter, refuses it, or lets an invalid text by.

Invariant: a verdict is made of texts that a matcher accepted or rejected, byte by byte and with the stop token, with
white space of any kind allowed, and of errors that `compile` raised. Owns the backends it has loaded.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable
from dataclasses import dataclass

from grammar_service.backends.backend import Backend, Compiled
from grammar_service.backends.registry import load_backend
from grammar_service.errors import InvalidGrammar, LimitExceeded
from grammar_service.grammar.value import Grammar, Kind, Whitespace, parse
from tools.enforced.bytes_vocabulary import STOP, bytes_vocabulary
from tools.enforced.case import Case
from tools.enforced.combinations import APPLICATORS, ARRAYS
from tools.enforced.formats import FORMATS
from tools.enforced.keywords import ANY_VALUE, NUMBERS, OBJECTS, STRINGS

KEYWORDS: tuple[Case, ...] = (*ANY_VALUE, *NUMBERS, *STRINGS, *OBJECTS, *ARRAYS, *APPLICATORS)
ALL: tuple[Case, ...] = (*KEYWORDS, *FORMATS)


class Outcome(enum.Enum):
    """What became of a case."""

    ENFORCED = "enforced"
    STRICTER = "stricter"
    """No invalid text is accepted, and some valid ones are not either."""
    REFUSED = "refused"
    """By name; with `allow_unenforced` it is taken with a warning."""
    IMPOSSIBLE = "refused always"
    """The library cannot compile it at all."""
    SILENT = "silent"
    """An invalid text was accepted without a word: a defect."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one backend did with one case."""

    case: Case
    outcome: Outcome
    texts: tuple[str, ...] = ()
    """The texts that made the outcome: accepted ones of SILENT, rejected ones of STRICTER."""
    beyond: tuple[str, ...] = ()
    """Texts of the case's `beyond` that were accepted."""
    said: str = ""
    """The error of a refusal."""


def measure(name: str, cases: Iterable[Case] = ALL) -> list[Verdict]:
    """Return the verdicts of one installed backend. Takes seconds. Raises NotSupported when it is not installed."""
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
    if accepted or compiled.warnings:
        return Verdict(case, Outcome.SILENT, accepted, beyond)
    return Verdict(case, Outcome.STRICTER if rejected else Outcome.ENFORCED, rejected, beyond)


def _refusal(backend: Backend, case: Case, grammar: Grammar, said: str) -> Verdict:
    try:
        compiled = backend.load(grammar, backend.compile(grammar, allow_unenforced=True))
    except (InvalidGrammar, LimitExceeded):
        return Verdict(case, Outcome.IMPOSSIBLE, said=said)
    if not compiled.warnings:
        return Verdict(case, Outcome.SILENT, said=said)
    return Verdict(case, Outcome.REFUSED, said=said)


def _takes(compiled: Compiled, text: str) -> bool:
    matcher = compiled.matcher()
    return all(matcher.accept(byte) for byte in text.encode()) and matcher.accept(STOP)
