"""A client in another language, made from the .proto file alone: guided streaming, and a schema that is rejected.

The client is `tests/clients/node/generate.js`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import pytest

from tests.e2e.conftest import RunningServer

pytestmark = [pytest.mark.model, pytest.mark.node, pytest.mark.slow]

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 30},
        "country": {"enum": ["France", "Italy", "Japan"]},
        "inhabitants": {"type": "integer", "minimum": 0, "maximum": 99999999},
    },
    "required": ["city", "country", "inhabitants"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class NodeClient:
    """The installed client and the address of the server."""

    folder: Path
    root: Path
    address: str

    def generate(self, schema: object, prompt: str) -> subprocess.CompletedProcess[str]:
        """Run it once; its lines are in `stdout`."""
        schema_file = self.folder / "schema.json"
        schema_file.write_text(json.dumps(schema))
        return subprocess.run(
            ["node", "generate.js", self.address, str(schema_file), prompt, "160"],
            cwd=self.folder,
            env={"PATH": _node_path(), "PROTO_ROOT": str(self.root)},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )


def _node_path() -> str:
    node = shutil.which("node")
    assert node is not None
    return str(Path(node).parent)


@pytest.fixture(scope="module")
def client_folder(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client with its packages in a temporary folder; nothing is installed in the checkout."""
    folder = tmp_path_factory.mktemp("node") / "client"
    shutil.copytree(root / "tests/clients/node", folder, ignore=shutil.ignore_patterns("node_modules"))
    command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=1", "--fetch-timeout=30000"]
    installed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180, check=False)
    if installed.returncode != 0:
        pytest.skip(f"npm could not install the client's packages: {installed.stderr.strip()[-300:]}")
    return folder


@pytest.fixture
def client(root: Path, client_folder: Path, server: RunningServer) -> NodeClient:
    return NodeClient(client_folder, root, server.address)


def test_node_client_streams_an_answer_that_validates(client: NodeClient) -> None:
    done = client.generate(SCHEMA, "Describe the city of Paris as JSON.")
    assert done.returncode == 0, done.stderr
    *deltas, whole = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(deltas) > 1
    assert "".join(response["delta"] for response in deltas) == whole["text"]
    assert whole["finish_reason"] == "FINISH_REASON_STOP"
    assert whole["usage"]["completion_tokens"] == sum(len(response["token_ids"]) for response in deltas)
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(whole["text"]))


def test_node_client_sees_which_schema_is_rejected(client: NodeClient) -> None:
    done = client.generate({"type": "no-such-type"}, "Anything.")
    assert done.returncode == 1
    assert done.stderr.startswith("INVALID_ARGUMENT: ")
    assert "no-such-type" in done.stderr
