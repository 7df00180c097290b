"""Questions with functions as OpenAI's API takes them, from the data of PyPI's `bfcl-eval`.

Invariant: equal files give equal prompts in the same order. Names and types become OpenAI's as the leaderboard's own
harness makes them (`_cast_to_openai_type` and `GORILLA_TO_OPENAPI` of bfcl-eval); every other keyword stays as it is.

Not responsible for: whether a call is the right one. This project ships no copy of the data.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.tool_calls import INSTALL, ToolDataMissing

CATEGORIES = (
    "simple_python",
    "simple_java",
    "simple_javascript",
    "multiple",
    "parallel",
    "parallel_multiple",
    "live_simple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
)
"""The files of the data whose questions have functions and one turn that calls them."""

_TYPES = {
    "any": "string", "array": "array", "bigint": "integer", "bool": "boolean", "boolean": "boolean", "byte": "integer",
    "char": "string", "dict": "object", "double": "number", "float": "number", "hashmap": "object",
    "hashtable": "object", "integer": "integer", "arraylist": "array", "list": "array", "long": "integer",
    "number": "number", "object": "object", "queue": "array", "short": "integer", "stack": "array", "string": "string",
    "tuple": "array",
}  # fmt: skip
"""The data's names of types, in lower case, and JSON Schema's. A parameter of any other type is a string."""


@dataclass(frozen=True, slots=True)
class FunctionPrompt:
    """A conversation and the functions that may be called."""

    name: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    """As `tools` of the chat API."""

    def schemas(self) -> dict[str, str]:
        """Return the JSON Schema of each function's arguments, as text, by the function's name."""
        return {tool["function"]["name"]: json.dumps(tool["function"]["parameters"]) for tool in self.tools}


def read_prompts(folder: Path, count: int) -> list[FunctionPrompt]:
    """Return `count` prompts: each category in turn gives one, taken evenly from its file; all where there are fewer.

    Raises:
        ToolDataMissing: `folder` lacks a file of a category.

    """
    share = -(-count // len(CATEGORIES))
    files = [_entries(folder / f"BFCL_v4_{category}.json") for category in CATEGORIES]
    even = [_spread(entries, min(share, len(entries))) for entries in files]
    # A file with fewer entries than its share leaves room; other files fill it with entries not taken yet.
    rest = [[entry for entry in entries if entry not in taken] for entries, taken in zip(files, even, strict=True)]
    return [_prompt(entry) for entry in itertools.islice(itertools.chain(_in_turn(even), _in_turn(rest)), count)]


def _entries(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise ToolDataMissing(f"{path} does not exist: {INSTALL}")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _spread(entries: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    return [entries[i * len(entries) // count] for i in range(count)]


def _in_turn(lists: list[list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    for row in itertools.zip_longest(*lists):
        yield from (entry for entry in row if entry is not None)


def _prompt(entry: dict[str, Any]) -> FunctionPrompt:
    tools = tuple({"type": "function", "function": _function(each)} for each in entry["function"])
    return FunctionPrompt(entry["id"], tuple(entry["question"][0]), tools)


def _function(described: dict[str, Any]) -> dict[str, Any]:
    parameters = json_schema(described["parameters"]) | {"type": "object"}
    return {
        "name": re.sub(r"\.", "_", described["name"]),
        "description": described["description"],
        "parameters": parameters,
    }


def json_schema(described: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of a parameter as the data describes it."""
    kind = str(described.get("type", "string")).lower()
    schema = described | {"type": _TYPES.get(kind, "string")}
    if kind == "float":
        schema["format"] = "float"
    if isinstance(described.get("properties"), dict):
        schema["properties"] = {name: json_schema(inner) for name, inner in described["properties"].items()}
    if isinstance(described.get("items"), dict):
        schema["items"] = json_schema(described["items"])
    return schema
