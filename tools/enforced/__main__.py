"""`python -m tools.enforced`: measures what the installed backends enforce, and prints or writes the section."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from grammar_service.backends.registry import NAMES, installed, installed_version
from tools.enforced.measure import Outcome, measure
from tools.enforced.report import section

PAGE = Path(__file__).resolve().parents[2] / "docs" / "grammars.md"
BEGIN, END = "<!-- python -m tools.enforced --write -->", "<!-- the end of what it writes -->"

EPILOG = """
examples:
  python -m tools.enforced            print what the libraries of this environment enforce, as Markdown
  python -m tools.enforced --write    write it to docs/grammars.md (needs every backend)

The exit status is 1 if a backend accepted an invalid text without a warning.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.enforced",
        description="Tries each keyword of JSON Schema with the installed backends: is it enforced, refused, stricter?",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--write", action="store_true", help="write it to docs/grammars.md instead of printing")
    options = parser.parse_args(arguments)
    names = [name for name in NAMES if installed(name)]
    if options.write and names != list(NAMES):
        parser.error(f"--write needs every backend; installed are: {', '.join(names) or 'none'}")
    verdicts = {name: measure(name) for name in names}
    text = section(verdicts, {name: installed_version(name) for name in names})
    if options.write:
        before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")
    else:
        print(text)
    silent = [(name, v) for name, each in verdicts.items() for v in each if v.outcome is Outcome.SILENT]
    for name, verdict in silent:
        print(f"{name} silently accepts: {verdict.case.name}: {verdict.texts or verdict.error}", file=sys.stderr)
    return int(bool(silent))


if __name__ == "__main__":
    sys.exit(main())
