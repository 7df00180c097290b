"""Unmodified clients of the npm registry against the embedded model: openai, Anthropic's, and Vercel's `ai`.

Their programs are in tests/clients/npm. Skipped where npm cannot install the packages of the lockfile.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.model, pytest.mark.node, pytest.mark.slow]


@pytest.fixture(scope="module")
def packages(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs with their packages, in a temporary folder."""
    folder = tmp_path_factory.mktemp("npm") / "clients"
    shutil.copytree(root / "tests/clients/npm", folder, ignore=shutil.ignore_patterns("node_modules"))
    command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=1", "--fetch-timeout=30000"]
    installed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    if installed.returncode != 0:
        pytest.skip(f"npm could not install the clients: {installed.stderr.strip()[-300:]}")
    return folder


SCHEMA_FIELDS = {
    "openai": "response_format.json_schema.schema",
    "anthropic": "tools[0].input_schema",
    "ai compatible": "response_format.json_schema.schema",
    "ai chat": "response_format.json_schema.schema",
    "ai responses": "text.format.schema",
}


@pytest.mark.parametrize("program", list(SCHEMA_FIELDS))
def test_a_client_of_npm_works_unmodified(program: str, packages: Path, gateway: str, model: str) -> None:
    name, *provider = program.split()
    done = subprocess.run(
        ["node", f"{name}.mjs", gateway, model, *provider],
        cwd=packages,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    made: dict[str, Any] = json.loads(done.stdout)
    assert made["text"]
    assert made["streamed"] == made["text"]
    assert made["usage"] > 0
    assert made["call"]["name"] == "weather"
    arguments = made["call"].get("input") or json.loads(made["call"]["arguments"])
    assert set(arguments) == {"city"}
    for parsed in (made["parsed"], made.get("response", made["parsed"])):
        assert (type(parsed["city"]), type(parsed["big"])) == (str, bool)
    error = made["error"]
    assert error["status"] == 400
    assert error.get("param", error.get("message", "")).startswith(SCHEMA_FIELDS[program])
