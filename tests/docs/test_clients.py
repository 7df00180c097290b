"""docs/http.md says which client does what, and the tests show it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.clients import PAGE, table, written


@pytest.mark.slow
def test_the_table_is_made_from_the_tests(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.clients"], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = PAGE.read_text(encoding="utf-8")
    assert written(page, done.stdout.rstrip("\n")) == page, "run python -m tools.clients --write"


def test_a_cell_says_what_its_tests_say() -> None:
    made = table({("openai", "chat"): "yes", ("lm-eval", "chat"): "refused"}).splitlines()
    assert made[2] == "| chat | yes | | | | | | | refused |"
    assert written("a\n\n| feature | x |\n|---|\n\nb", "made") == "a\n\nmade\n\nb"
    with pytest.raises(ValueError, match="has no table"):
        written("a", "made")


MARKED = """
import pytest

@pytest.mark.client("openai", "chat")
def test_one():
    pass

@pytest.mark.client("openai", "chat"{outcome})
@pytest.mark.client("outlines", "{feature}")
def test_other():
    {body}
"""


@pytest.mark.parametrize(
    ("outcome", "feature", "error"),
    [("", "chatting", "'chatting'): is not a word"), (', "ignored"', "chat", "another test says otherwise")],
)
def test_a_mark_that_makes_no_sense_is_named(tmp_path: Path, outcome: str, feature: str, error: str) -> None:
    done = run(tmp_path, MARKED.format(outcome=outcome, feature=feature, body="pass"))
    assert done.returncode != 0
    assert error in done.stdout + done.stderr


@pytest.mark.parametrize(("body", "why"), [("pytest.skip('no such extra')", "no such extra"), ("assert 0", "failed")])
def test_a_test_that_did_not_pass_is_named(tmp_path: Path, body: str, why: str) -> None:
    done = run(tmp_path, MARKED.format(outcome="", feature="chat", body=body))
    assert f"test_other: {why}" in done.stdout.replace("Skipped: ", "")
    assert "test_one:" not in done.stdout


def run(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    """Run marked tests in their own folder, and print which did not pass."""
    (folder / "test_marked.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = client\n")
    code = (
        "import sys, pytest; from tools.clients import Marks; marks = Marks();"
        f"status = pytest.main(['-q', '-p', 'no:cacheprovider', {str(folder)!r}], plugins=[marks]);"
        "print(*marks.not_passed, sep='\\n'); sys.exit(int(status) if not marks.not_passed else 0)"
    )
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # their imports take two seconds
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
