"""The workload `tools` has each tenth entry of the data, with closed schemas, and says what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.tool_calls import ToolDataMissing, data_folder, items_of, tool_calls
from benchmarks.harness.workloads import workload


def entry(number: int, parameters: dict[str, Any]) -> str:
    """Return a line of the data."""
    function = {"name": f"f{number}", "description": "Does it.", "parameters": parameters}
    question = [[{"role": "user", "content": f"Question {number}?"}]]
    return json.dumps({"id": f"simple_{number}", "function": [function], "question": question})


def test_held_back_entries_become_closed_schemas(tmp_path: Path) -> None:
    typed = {
        "type": "dict",
        "properties": {"share": {"type": "float"}, "names": {"type": "array", "items": {"type": "string"}}},
        "required": ["share"],
    }
    left_open = {"type": "dict", "properties": {"value": {"type": "any"}}, "required": []}
    lines = [entry(number, left_open if number == 19 else typed) for number in range(40)]
    (tmp_path / "BFCL_v4_simple_python.json").write_text("\n".join(lines))
    items = tool_calls(tmp_path, max_tokens=50)
    assert [(item.name, item.max_tokens) for item in items] == [(f"simple_{n}", 50) for n in (9, 29, 39)]
    schema = json.loads(items[0].schema or "")
    assert schema["properties"]["name"] == {"enum": ["f9"]}
    assert schema["properties"]["arguments"] == {
        "type": "object",
        "properties": {"share": {"type": "number"}, "names": {"type": "array", "items": {"type": "string"}}},
        "required": ["share"],
        "additionalProperties": False,
    }
    assert items[0].messages[1] == ("user", "Question 9?")
    assert len(tool_calls(tmp_path, count=2)) == 2


def test_missing_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(ToolDataMissing, match=r"BFCL_v4_simple_python\.json does not exist: pip install"):
        tool_calls(tmp_path)
    with pytest.raises(ToolDataMissing, match="does not run"):
        data_folder(tmp_path / "python")
    with pytest.raises(ToolDataMissing, match="does not run"):
        items_of("tools", tmp_path / "python")


def test_other_workloads_need_no_data(tmp_path: Path) -> None:
    assert items_of("chat", tmp_path / "python", 3, 16) == workload("chat", 3, 16)
    with pytest.raises(ValueError, match="'letters' is not one of"):
        items_of("letters", tmp_path / "python")
