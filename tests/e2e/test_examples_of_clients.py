"""The examples of clients, run against the real engine: both print the same answers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep_client import Client
from tests.e2e.conftest import RunningServer
from tests.waiting import eventually

pytestmark = pytest.mark.model


async def run(*command: str, root: Path) -> str:
    """Run a program from the root of the checkout; return what it prints."""
    path = os.pathsep.join([str(root / "client"), os.environ.get("PYTHONPATH", "")])
    process = await asyncio.create_subprocess_exec(
        *command, cwd=root, env={**os.environ, "PYTHONPATH": path}, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, output.decode()
    return output.decode()


async def python_example(root: Path, server: RunningServer) -> str:
    return await run(sys.executable, "examples/python/guided.py", server.address, root=root)


async def test_the_python_example_prints_guided_answers(root: Path, server: RunningServer) -> None:
    printed = await python_example(root, server)
    lines = dict(line.split(": ", 1) for line in re.split(r"\n(?=\w+: )", printed.strip()))
    assert list(lines) == ["cancelled", "ebnf", "json", "json_schema", "regex"]
    assert lines["cancelled"] == "CANCELLED"
    assert re.fullmatch(r"(yes|no), [a-z]+\.", lines["ebnf"])
    assert re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", lines["regex"])
    assert isinstance(json.loads(lines["json"]), dict)
    assert set(json.loads(lines["json_schema"])) == {"city", "people"}
    with Client(server.address) as client:
        await eventually(lambda: client.stats().running == 0)


def missing_for_cpp() -> str | None:
    tools = [name for name in ("cmake", "c++", "pkg-config", "protoc", "grpc_cpp_plugin") if shutil.which(name) is None]
    if tools:
        return f"needs {', '.join(tools)} on PATH (see examples/cpp/CMakeLists.txt)"
    found = subprocess.run(["pkg-config", "--exists", "grpc++", "protobuf"], check=False)
    return None if found.returncode == 0 else "needs libgrpc++-dev and libprotobuf-dev"


@pytest.mark.slow
async def test_the_cpp_example_builds_and_prints_the_same(root: Path, server: RunningServer, tmp_path: Path) -> None:
    if (missing := missing_for_cpp()) is not None:
        pytest.skip(missing)
    await run("cmake", "-S", "examples/cpp", "-B", str(tmp_path), "-DCMAKE_CXX_FLAGS=-Werror", root=root)
    await run("cmake", "--build", str(tmp_path), "--parallel", "2", root=root)
    printed = await run(str(tmp_path / "guided"), server.address, root=root)
    assert printed == await python_example(root, server)
