"""What a type checker sees of the client."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
from dataclasses import dataclass
from typing import Any, TypedDict, assert_type

from lockstep_client import Answer, AsyncClient, Client, Delta


@dataclass
class City:
    name: str


class Point(TypedDict):
    x: int


def asks(client: Client) -> None:
    assert_type(client.chat("x", schema=City).parsed, City)
    assert_type(client.generate("x", schema=list[City]).parsed, list[City])
    assert_type(client.chat("x", schema=Point, tools=[asks]).parsed, Point)
    assert_type(client.chat("x", schema={"type": "object"}).parsed, Any)
    with client.stream_chat("x", schema=City) as stream:
        for delta in stream:
            assert_type(delta, Delta)
        assert_type(stream.answer(), Answer[City])


async def asks_too(client: AsyncClient) -> None:
    assert_type((await client.generate("x", schema=City)).parsed, City)
    async with client.stream_generate("x", schema=City) as stream:
        assert_type(await stream.answer(), Answer[City])
"""
WRONG = """
from lockstep_client import Client


def asks(client: Client) -> None:
    client.chat("x", temprature=1)
    client.generate("x", tools=[])
"""


@pytest.mark.slow
def test_a_type_checker_knows_what_comes_back(root: Path, tmp_path: Path) -> None:
    (tmp_path / "right.py").write_text(PROGRAM)
    (tmp_path / "wrong.py").write_text(WRONG)
    # Next to the installed packages, the generated messages are not checked.
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = true\n[mypy-lockstep_client.wire.*]\nignore_errors = true\n")
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), "right.py", "wrong.py"]
    environment = {"MYPYPATH": str(root / "client")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert errors, done.stderr
    assert all(line.startswith("wrong.py") for line in errors), done.stdout
    assert any("temprature" in line for line in errors)
    assert any("tools" in line for line in errors)
