"""The workload `tools`: a question, one function, and a guided call of it, from the data of PyPI's `bfcl-eval`.

Invariant: equal files give equal items in the same order. Each item's schema closes every object, so an answer is one
call of that function with arguments of the declared types.
Not responsible for: whether a call is the right one. This project ships no copy of the data.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.harness.workloads import Item, workload

NAME = "tools"
INSTALL = "pip install --no-deps bfcl-eval"
MAX_TOKENS = 160
"""The longest expected call of the data is 135 tokens of the embedded model."""

_FILE = "BFCL_v4_simple_python.json"
_TYPES = {"dict": "object", "float": "number", "tuple": "array"}
"""The data's names of types that JSON Schema calls otherwise."""


class ToolDataMissing(ValueError):
    """The data is not where it should be; the message says what to install."""


def data_folder(python: Path) -> Path:
    """Return the data folder of the package `bfcl_eval` of the environment of `python`; the package is not imported.

    Raises:
        ToolDataMissing: that environment has no such package, or there is no such python.

    """
    find = "import importlib.util as u; s = u.find_spec('bfcl_eval'); print(s.origin if s else '')"
    try:
        done = subprocess.run([python, "-P", "-c", find], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolDataMissing(f"{python} does not run: {error}") from error
    origin = done.stdout.strip()
    if not origin:
        raise ToolDataMissing(f"{python} has no bfcl_eval: {INSTALL}")
    return Path(origin).parent / "data"


def tool_calls(folder: Path, count: int | None = None, max_tokens: int | None = None) -> list[Item]:
    """Return the first `count` held-back items of `folder` (all when None), their budgets lowered to `max_tokens`.

    Held back is every tenth entry, from number 9 on; the others are free for training and tuning. An entry whose
    parameters leave a type open is left out.

    Raises:
        ToolDataMissing: `folder` has no such data.

    """
    path = folder / _FILE
    if not path.is_file():
        raise ToolDataMissing(f"{path} does not exist: {INSTALL}")
    budget = MAX_TOKENS if max_tokens is None else min(MAX_TOKENS, max_tokens)
    items = []
    for number, line in enumerate(path.read_text().splitlines()):
        if number % 10 == 9 and (item := _item(json.loads(line), budget)) is not None:
            items.append(item)
    return items[:count]


def items_of(name: str, python: Path, count: int | None = None, max_tokens: int | None = None) -> list[Item]:
    """Return `workload(name, count, max_tokens)`, or these tool calls where `name` is theirs and `python` has the data.

    Raises:
        ValueError: as `workload`.
        ToolDataMissing: as `data_folder`.

    """
    if name != NAME:
        return workload(name, count, max_tokens)
    return tool_calls(data_folder(python), count, max_tokens)


def _item(entry: dict[str, Any], max_tokens: int) -> Item | None:
    function = entry["function"][0]
    arguments = json_schema(function["parameters"])
    if arguments is None:
        return None
    schema = {
        "type": "object",
        "properties": {"name": {"enum": [function["name"]]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    source = json.dumps(schema, separators=(",", ":"))
    system = (
        f"You answer with one JSON object and nothing else: a call of the function {function['name']}. "
        f"{function['description']}\nThe object follows this JSON schema:\n{source}"
    )
    question = entry["question"][0][0]["content"]
    return Item(entry["id"], (("system", system), ("user", question)), source, max_tokens)


def json_schema(parameters: dict[str, Any]) -> dict[str, Any] | None:
    """Return the JSON Schema of a parameter as the data describes it, or None where it leaves a type open.

    Types, descriptions, enums and required properties are kept; defaults are not, because they constrain nothing.
    """
    kind = _TYPES.get(parameters["type"], parameters["type"])
    schema: dict[str, Any] = {"type": kind}
    schema |= {key: parameters[key] for key in ("description", "enum") if key in parameters}
    if kind == "object":
        properties = {name: json_schema(inner) for name, inner in parameters.get("properties", {}).items()}
        if not properties or None in properties.values():
            return None
        required = parameters.get("required", [])
        return schema | {"properties": properties, "required": required, "additionalProperties": False}
    if kind == "array":
        items = json_schema(parameters["items"]) if "items" in parameters else None
        return None if items is None else schema | {"items": items}
    return None if kind == "any" else schema
