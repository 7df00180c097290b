"""Judges answers: valid by the grammar that was asked for, or not, with the reason.

Invariant: the judges are `jsonschema` with formats asserted and Python's `re`, and share no code with any server.
"""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema

from lockstep_bench.cases import Grammar


def problem(grammar: Grammar, text: str) -> str | None:
    """Return why `text` is no answer by the grammar, or None where it is one."""
    if grammar.kind == "json":
        return _json_problem(grammar.source, text)
    if grammar.kind == "choice":
        return None if text in grammar.source else "none of the choices"
    pattern = grammar.source if grammar.kind == "regex" else grammar.matches
    return None if re.fullmatch(pattern, text) else f"{grammar.kind} does not match"


def _json_problem(schema: Any, text: str) -> str | None:
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    found = next(validator.iter_errors(value), None)
    return None if found is None else f"at {found.json_path}: {found.message[:200]}"


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
