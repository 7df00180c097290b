"""Writes the synchronous modules of the client from the asynchronous ones: `python -m tools.client_twins --write`.

The rules: `async` and `await` go, a name loses its `Async` or `async_`, and the table `NAMES` has the rest. A line
`# sync: CODE` becomes CODE; what is between `# async:` and `# end` is left out. `TEXTS` has the sentences that differ.

The invariant: the committed files are what this writes; tests/test_architecture.py compares them.

Not responsible for: what has no common form (see client/lockstep_client/concurrency.py).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CLIENT = ROOT / "client/lockstep_client"
TWINS = {
    "async_rpc.py": "rpc.py",
    "async_client.py": "client.py",
    "executing/async_executor.py": "executing/executor.py",
}
"""Source and twin, in the client's folder."""
NAMES = {
    "aclose": "close",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "AsyncIterator": "Iterator",
    "StopAsyncIteration": "StopIteration",
    "in_thread": "in_this_thread",
    "grpc.aio.insecure_channel": "grpc.insecure_channel",
    "grpc.aio.secure_channel": "grpc.secure_channel",
    "_channel.close(None)": "_channel.close()",
}
TEXTS = {
    "async_rpc.py": {
        "An asynchronous context manager": "A context manager",
        "`rpc.py` is generated from this file": "Generated from async_rpc.py",
    },
    "async_client.py": {
        "The asynchronous client. `client.py` is generated from this file": (
            "The synchronous client. Generated from async_client.py"
        ),
        "A client\nbelongs to the event loop on which it is made.": "A client\nmay be used from several threads.",
        "An asynchronous iterator and context manager. Leaving it\n    cancels the call.": (
            "An iterator and a context manager; leaving it cancels the call."
        ),
        "A client of one server, for one event loop. An asynchronous context manager.": (
            "A client of one server. A context manager; may be used from several threads."
        ),
        "Return a client with its own server, which starts at the `with` block, or at `client.start()`.": (
            "Start a server of the client's own, and return when it serves."
        ),
        "Raises EngineNotInstalled; the start raises EmbeddedServerError": (
            "Raises EngineNotInstalled, or EmbeddedServerError"
        ),
    },
    "executing/async_executor.py": {
        "The asynchronous executor. `executor.py` is generated from this file": (
            "The synchronous executor. Generated from async_executor.py"
        ),
        "An executor belongs to the event loop on\nwhich it is started; its tasks end with it.": (
            "Methods may be called\nfrom several threads."
        ),
        "An asynchronous context manager": "A context manager",
        "Prepare a server for `model`, or a connection to the one at `address`, for `start`.": (
            "Start a server for `model`, or connect to the one at `address`; return when it answers."
        ),
        "def start(": "def _start(",
        "self.start()": "self._start()",
        "the executor is not started: use it in `with`, or `start()`": "the executor is not started",
    },
}
_LEFT_OUT = re.compile(r"^ *# async:\n(?:.*\n)*?^ *# end\n\n?", re.MULTILINE)
_SYNC_LINE = re.compile(r"# sync: ")
_KEYWORD = re.compile(r"\basync (?=def|with|for)|\bawait ")
_AWAITED = re.compile(r"(?<![\w)])\(await ")
_PREFIX = re.compile(r"\b(?:Async(?=[A-Z])|async_(?=[a-z]))")


def twin_of(source: str, texts: dict[str, str]) -> str:
    """Return the synchronous form of `source`, before it is formatted. Raises ValueError for an unused text."""
    code = _SYNC_LINE.sub("", _LEFT_OUT.sub("", _without_parentheses(source)))
    for before, after in NAMES.items():
        code = code.replace(before, after) if "." in before else re.sub(rf"\b{before}\b", after, code)
    code = _PREFIX.sub("", _KEYWORD.sub("", code))
    for before, after in texts.items():
        if before not in code:
            raise ValueError(f"{before!r} is not in the source")
        code = code.replace(before, after)
    return code


def _without_parentheses(code: str) -> str:
    """Return `code` with `(await CALL).name` as `CALL.name`."""
    while found := _AWAITED.search(code):
        start, end = found.start(), _closing(code, found.start())
        code = code[:start] + code[found.end() : end] + code[end + 1 :]
    return code


def _closing(code: str, start: int) -> int:
    depth = 0
    for place in range(start, len(code)):
        depth += {"(": 1, ")": -1}.get(code[place], 0)
        if depth == 0:
            return place
    raise ValueError(f"no parenthesis closes the one before {code[start : start + 40]!r}")


def formatted(code: str, path: Path) -> str:
    """Return `code` with its imports sorted, in ruff's format."""
    for command in (("check", "--select", "I,UP034", "--fix", "--quiet"), ("format", "--quiet")):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(path), "-"],
            input=code, capture_output=True, text=True, cwd=ROOT, check=True,
        )  # fmt: skip
        code = done.stdout
    return code


def files() -> dict[Path, str]:
    """Return the text of each file that this writes."""
    found = {}
    for source, twin in TWINS.items():
        code = twin_of((CLIENT / source).read_text(encoding="utf-8"), TEXTS[source])
        found[CLIENT / twin] = formatted(code, CLIENT / twin)
    return found


def write_or_list(made: dict[Path, str], description: str) -> int:
    """Write made files, or without `--write` print the names of those that differ. Returns the exit status."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--write", action="store_true", help="write the files")
    write = parser.parse_args().write
    differing = {path: text for path, text in made.items() if not path.exists() or path.read_text("utf-8") != text}
    for path, text in differing.items():
        if write:
            path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
    return 0 if write or not differing else 1


if __name__ == "__main__":
    sys.exit(write_or_list(files(), "The client's synchronous modules, from the asynchronous ones."))
