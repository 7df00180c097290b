"""Each example runs in some test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*/*.py")) + sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_test_runs_the_example(path: Path) -> None:
    """Either by its path, or by its name through the helper `example` of tests/e2e/test_executor.py."""
    name = path.relative_to(ROOT).as_posix()
    texts = [test.read_text() for test in (ROOT / "tests").rglob("test_*.py")]
    assert any(name in text or f'example("{path.stem}", server)' in text for text in texts), name
