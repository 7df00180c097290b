"""`python -m benchmarks function_calls` against the gateway, over functions in the form of bfcl-eval's data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quality import function_calls
from benchmarks.quality.function_prompts import CATEGORIES

pytestmark = [pytest.mark.model, pytest.mark.slow]

BOOK: dict[str, Any] = {
    "name": "travel.book",
    "description": "Books a trip.",
    "parameters": {
        "type": "dict",
        "properties": {
            "city": {"type": "string", "description": "Where to.", "maxLength": 16},
            "days": {"type": "integer", "description": "For how long.", "minimum": 1, "maximum": 30},
            "class": {"type": "string", "enum": ["first", "second"], "default": "second"},
        },
        "required": ["city", "days"],
    },
}
PAINT: dict[str, Any] = {
    "name": "paint",
    "description": "Paints points.",
    "parameters": {
        "type": "dict",
        "properties": {
            "points": {"type": "array", "items": {"type": "tuple", "items": {"type": "float"}, "maxItems": 2}},
            "style": {"type": "dict", "properties": {"bold": {"type": "boolean"}}, "required": ["bold"]},
        },
        "required": ["points"],
    },
}
QUESTIONS = ("Book five days in Oslo and paint (1, 2) bold.", "Paint the corners of a square.", "I want to see Rome.")


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A Python that finds such data where bfcl-eval would be."""
    data = tmp_path / "bfcl_eval" / "data"
    data.mkdir(parents=True)
    for at, category in enumerate(CATEGORIES):
        turns = [[{"role": "user", "content": QUESTIONS[at % 3]}]]
        entry = {"id": category, "question": turns, "function": [[BOOK, PAINT], [BOOK], [PAINT]][at % 3]}
        (data / f"BFCL_v4_{category}.json").write_text(json.dumps(entry) + "\n")
    made = tmp_path / "python"
    made.write_text(f"#!/bin/sh\necho {data.parent / '__init__.py'}\n")
    made.chmod(0o755)
    return made


@pytest.mark.parametrize("choices", ["required", "named,auto"])
def test_calls_fit_and_drafts_change_no_token(
    gateway: str, python: Path, choices: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--bfcl-python", str(python), "--address", gateway, "--count", "10", "--max-tokens", "100"]
    status = function_calls.main([*flags, "--choices", choices])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert printed.count("10 of 10") == 2
