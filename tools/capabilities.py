"""Writes the table of refused settings in docs/features.md: `python -m tools.capabilities --write`.

The invariant: every row is one of gpu_engine/api/capabilities.py, with the message that its example gets.

Not responsible for: refused requests, which the page lists by itself.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from gpu_engine.api.capabilities import OF_ENGINE, OF_SERVER, OF_START, Refusal, Start, refuse
from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.api.transfer_config import TransferConfig

PAGE = Path(__file__).resolve().parents[1] / "docs/features.md"
HEADING = "## Refused settings"

_EXAMPLES = """
examples:
  python -m tools.capabilities            print the table
  python -m tools.capabilities --write    write it to docs/features.md
"""


def start_with(settings: Mapping[str, Any]) -> Start:
    """Return the settings of a start. Raises ValueError for a combination that is refused."""
    own: dict[type[Any], dict[str, Any]] = {}
    for kind in (EngineConfig, ServerConfig, TransferConfig):
        names = {field.name for field in fields(kind)}
        own[kind] = {name: value for name, value in settings.items() if name in names}
    engine = EngineConfig(**own[EngineConfig], transfer=TransferConfig(**own[TransferConfig]))
    start = Start(engine, ServerConfig(**own[ServerConfig]))
    refuse(OF_START, start)
    return start


def refusals() -> Iterator[Refusal[Any]]:
    """Return the refusals of settings, without those that a file or a package decides."""
    yield from OF_ENGINE
    yield from OF_SERVER
    yield from OF_START


def message(example: Mapping[str, Any]) -> str:
    """Return the message that these settings get."""
    try:
        start_with(example)
    except ValueError as error:
        return str(error)
    raise AssertionError(f"{example} is not refused")


def table() -> str:
    """Return the Markdown table."""
    lines = ["| settings | message |", "|---|---|"]
    for refusal in refusals():
        settings = ", ".join(f"`{name} = {_toml(value)}`" for name, value in refusal.example.items())
        lines.append(f"| {settings} | {message(refusal.example)} |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """Return the page with the table under its heading."""
    pattern = re.compile(rf"({re.escape(HEADING)}\n.*?)\n\|.*?\n(?=\n|\Z)", re.DOTALL)
    found, count = pattern.subn(lambda match: f"{match[1]}\n{table()}", page)
    assert count == 1, f"{HEADING} has no table"
    return found


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def main() -> int:
    """Print the table, or write it with `--write`."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.capabilities",
        description="Make the table of refused settings from the code.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--write", action="store_true", help="write the table instead of printing it")
    if parser.parse_args().write:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")))
    else:
        sys.stdout.write(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
