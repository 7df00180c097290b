"""Text that comes from the command line, from files and from stdin.

The invariant: text is UTF-8, and an error names the flag or the file that it came from.

Not responsible for: what the text means (see grammar_flags.py, request_flags.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO


def text(value: str) -> str:
    """Return the value of a flag; argparse names the flag in the error. Raises ArgumentTypeError."""
    try:
        value.encode()
    except UnicodeEncodeError as error:  # bytes that are no UTF-8 arrive as lone surrogates
        raise argparse.ArgumentTypeError(f"is no UTF-8 at character {error.start}") from None
    return value


def read_text(flag: str, path: str) -> str:
    """Return the text of the file that a flag names. Raises ValueError with the flag and the path."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{flag}: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag}: {path} is no UTF-8 at byte {error.start}") from None


def read_stdin(stdin: TextIO) -> str:
    """Return all of stdin; on a terminal, print first which key ends it. Raises ValueError."""
    if stdin.isatty():
        print("reading from stdin; Control-D ends it", file=sys.stderr)
    try:
        read = stdin.read()
        read.encode()
    except UnicodeError:
        raise ValueError("stdin (the prompt): is no UTF-8") from None
    return read


def json_of(flag: str, source: str) -> Any:
    """Return the value of a JSON text. Raises ValueError with the flag and the place."""
    try:
        return json.loads(source)
    except ValueError as error:
        raise ValueError(f"{flag}: is no JSON: {error}") from None


def text_or_file(flag: str, value: str) -> str:
    """Return the value of a flag if it is JSON, else the text of the file that the value names. Raises ValueError."""
    return value if value.lstrip().startswith("{") else read_text(flag, value)


def with_files(question: str, texts: Sequence[tuple[str, str]]) -> str:
    """Return a question followed by the texts of files, each after its name; without a question, one text as it is.

    texts: (path, text) of each file.
    """
    if not question and len(texts) == 1:
        return texts[0][1]
    files = [f"{Path(path).name}:\n```\n{text.removesuffix(chr(10))}\n```" for path, text in texts]
    return "\n\n".join(filter(None, [question, *files]))
