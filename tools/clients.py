"""Writes the table of clients in docs/http.md from the tests that run them: `python -m tools.clients --write`.

A test says what it shows with the marker `client(CLIENT, FEATURE)`, or `client(CLIENT, FEATURE, outcome)` where the
feature does not work through that client. Invariant: a cell of the table is filled exactly where a test says so, and
`--write` writes nothing unless every one of these tests ran and passed.

Not responsible for: the tests (tests/e2e), what smg makes of a request (docs/gateways.md).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/http.md"
TESTS = "tests/e2e"

SMG = "openai through smg"
CLIENTS = (
    "openai",
    SMG,
    "langchain-openai",
    "pydantic-ai",
    "outlines",
    "instructor",
    "guidellm",
    "lm-eval",
)
"""The columns."""

FEATURES = (
    "chat",
    "chat, streamed, with usage",
    "chat, `n`",
    "chat, `stop`",
    "chat, `seed`",
    "chat, `logprobs`",
    "a pydantic model, by `response_format` (`.parse`)",
    "a pydantic model, by a function",
    "`response_format` json_object",
    "`response_format` structural_tag",
    "`structured_outputs` of vLLM",
    "tools, `tool_choice` auto",
    "tools, `tool_choice` required",
    "tools, `tool_choice` with a name",
    "strict tools, `tool_choice` auto",
    "tool calls, streamed",
    "tools, `tool_choice` required, and `response_format`",
    "tools, `tool_choice` auto, and `response_format`",
    "custom tools",
    "a tool's result, sent back",
    "completions, `n`",
    "completions of several prompts",
    "completions, streamed",
    "completions, `logprobs`",
    "completions, `echo`",
    "completions, `echo` with `logprobs`",
    "`responses.create`",
    "`responses.stream`",
    "`responses.parse`",
    "functions in `responses.create`",
    "`logit_bias`",
    "an unknown field, refused by name",
)
"""The rows."""

OUTCOMES = ("yes", "ignored", "refused")
"""What a cell may say."""

_TABLE = re.compile(r"(?<=\n\n)\| feature \|.*?(?=\n\n)", re.DOTALL)

_EXAMPLES = """
examples:
  python -m tools.clients            print the table, from the marks of the tests
  python -m tools.clients --write    run these tests, and write the table to docs/http.md

needs the extras `dev` and `clients`, and the embedded model, for --write
"""


class Marks:
    """A plugin of pytest: the cells that the collected tests fill, and the tests that did not pass.

    Raises UsageError for a mark whose words are not in `CLIENTS`, `FEATURES` and `OUTCOMES`, and for two tests that
    contradict each other.
    """

    def __init__(self) -> None:
        self.cells: dict[tuple[str, str], str] = {}
        self.not_passed: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Read the marks of all collected tests."""
        for item in session.items:
            for mark in item.iter_markers("client"):
                client, feature, outcome = (*mark.args, "yes")[:3]
                for word, known in ((client, CLIENTS), (feature, FEATURES), (outcome, OUTCOMES)):
                    if word not in known:
                        raise pytest.UsageError(f"{item.nodeid}: client({word!r}): is not a word of tools/clients.py")
                if self.cells.setdefault((client, feature), outcome) != outcome:
                    raise pytest.UsageError(f"{item.nodeid}: another test says otherwise about {client}: {feature}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that failed or was skipped."""
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else "skipped"
            self.not_passed.append(f"{report.nodeid}: {reason}")
        elif report.failed:
            self.not_passed.append(f"{report.nodeid}: failed")


def collected() -> Marks:
    """Return the marks of the tests, without running them."""
    marks = Marks()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = _pytest(marks, "--collect-only", "-q")
    if status:
        raise SystemExit(f"the tests cannot be collected:\n{printed.getvalue()}")
    return marks


def passed() -> Marks:
    """Return the marks of the tests, which all ran and passed. Raises SystemExit that names the others."""
    marks = Marks()
    if _pytest(marks) or marks.not_passed:
        raise SystemExit("\n".join(["these tests did not pass, so the table stays:", *marks.not_passed]))
    return marks


def _pytest(marks: Marks, *flags: str) -> int:
    return int(pytest.main(["-m", "client", "-p", "no:cacheprovider", *flags, str(ROOT / TESTS)], plugins=[marks]))


def table(cells: dict[tuple[str, str], str]) -> str:
    """Return the table in Markdown."""
    lines = [f"| feature | {' | '.join(CLIENTS)} |", "|---" * (len(CLIENTS) + 1) + "|"]
    for feature in FEATURES:
        words = [feature, *(cells.get((client, feature), "") for client in CLIENTS)]
        lines.append("".join(f"| {word} " if word else "| " for word in words) + "|")
    return "\n".join(lines)


def written(page: str, made: str) -> str:
    """Return the page with `made` in the place of its table. Raises ValueError where it has none."""
    if len(_TABLE.findall(page)) != 1:
        raise ValueError(f"{PAGE.name} has no table that begins with `| feature |`, or several")
    return _TABLE.sub(lambda _: made, page)


def main() -> int:
    """Print the table, or write it with `--write`."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.clients",
        description="Make the table of clients in docs/http.md from the tests that run them.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--write", action="store_true", help="run the tests, and write the table instead of printing it"
    )
    if parser.parse_args().write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), table(passed().cells)), encoding="utf-8")
    else:
        print(table(collected().cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
