"""The workload `tools`, from a small folder in the form of bfcl-eval's data."""

from __future__ import annotations

import json
import subprocess
import venv
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from benchmarks.harness.tool_calls import ToolDataMissing, data_folder, json_schema, tool_calls

AREA = {
    "type": "dict",
    "properties": {
        "base": {"type": "float", "description": "The base.", "default": 1.0},
        "unit": {"type": "string", "enum": ["m", "cm"]},
        "corners": {"type": "tuple", "items": {"type": "integer"}},
        "style": {"type": "dict", "properties": {"bold": {"type": "boolean"}}, "required": ["bold"]},
    },
    "required": ["base"],
}


def entry(number: int, parameters: dict[str, Any] = AREA) -> dict[str, Any]:
    return {
        "id": f"simple_{number}",
        "question": [[{"role": "user", "content": f"Area of triangle {number}?"}]],
        "function": [{"name": f"geometry.area{number}", "description": "An area.", "parameters": parameters}],
    }


def folder_of(path: Path, entries: list[dict[str, Any]]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(each) + "\n" for each in entries)
    (path / "BFCL_v4_simple_python.json").write_text(lines)
    return path


def test_every_tenth_entry_is_held_back(tmp_path: Path) -> None:
    items = tool_calls(folder_of(tmp_path, [entry(number) for number in range(35)]))
    assert [item.name for item in items] == ["simple_9", "simple_19", "simple_29"]
    assert tool_calls(tmp_path, 2, 20) == [type(item)(item.name, item.messages, item.schema, 20) for item in items[:2]]


def test_the_function_and_the_question_are_in_the_prompt(tmp_path: Path) -> None:
    item = tool_calls(folder_of(tmp_path, [entry(number) for number in range(10)]))[0]
    (system_role, system), (user_role, user) = item.messages
    assert (system_role, user_role, user) == ("system", "user", "Area of triangle 9?")
    assert item.schema is not None
    assert item.schema in system
    assert "geometry.area9. An area." in system


def test_the_schema_allows_a_call_of_that_function_and_nothing_else(tmp_path: Path) -> None:
    item = tool_calls(folder_of(tmp_path, [entry(number) for number in range(10)]))[0]
    assert item.schema is not None
    schema = json.loads(item.schema)
    Draft202012Validator.check_schema(schema)
    judge = Draft202012Validator(schema)
    good = {"name": "geometry.area9", "arguments": {"base": 2.5, "unit": "m", "corners": [1], "style": {"bold": True}}}
    assert judge.is_valid(good)
    assert not judge.is_valid(good | {"name": "geometry.area8"})
    assert not judge.is_valid(good | {"arguments": {"base": 2.5, "height": 1}})
    assert not judge.is_valid(good | {"arguments": {"unit": "m"}})
    assert not judge.is_valid(good | {"arguments": {"base": 1, "style": {"bold": True, "size": 1}}})


@pytest.mark.parametrize(
    "parameter",
    [{"type": "any"}, {"type": "dict"}, {"type": "array"}, {"type": "array", "items": {"type": "any"}}],
)
def test_an_entry_that_leaves_a_type_open_is_left_out(tmp_path: Path, parameter: dict[str, Any]) -> None:
    open_type = {"type": "dict", "properties": {"x": parameter}, "required": []}
    assert json_schema(open_type) is None
    entries = [entry(number) for number in range(20)]
    entries[9] = entry(9, open_type)
    assert [item.name for item in tool_calls(folder_of(tmp_path, entries))] == ["simple_19"]


def test_a_default_is_left_out_and_a_description_is_kept() -> None:
    schema = json_schema(AREA)
    assert schema is not None
    assert schema["properties"]["base"] == {"type": "number", "description": "The base."}


def test_missing_data_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ToolDataMissing, match="does not exist: pip install --no-deps bfcl-eval"):
        tool_calls(tmp_path)


def test_the_folder_is_found_in_another_environment_without_an_import(tmp_path: Path) -> None:
    venv.create(tmp_path / "peers", with_pip=False)
    python = tmp_path / "peers" / "bin" / "python"
    with pytest.raises(ToolDataMissing, match="has no bfcl_eval: pip install --no-deps bfcl-eval"):
        data_folder(python)
    find = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([python, "-c", find], capture_output=True, text=True, check=True).stdout.strip())
    (site / "bfcl_eval").mkdir()
    (site / "bfcl_eval" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    assert data_folder(python) == site / "bfcl_eval" / "data"


def test_a_python_that_does_not_run_is_named() -> None:
    with pytest.raises(ToolDataMissing, match="/nonexistent does not run"):
        data_folder(Path("/nonexistent"))
