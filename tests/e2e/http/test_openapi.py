"""schemathesis, unmodified, over `/openapi.json`: whatever it sends, the gateway answers with what the document says.

Needs the extra `clients`; skipped, with the reason, where it is missing.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.model, pytest.mark.slow]

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def test_no_request_is_a_server_error(gateway: str, tmp_path: Path) -> None:
    program = Path(sys.executable).parent / "schemathesis"
    if not program.exists():
        pytest.skip("needs the extra `clients`")
    command = [str(program), "run", f"http://{gateway}/openapi.json", "--checks", CHECKS, "--max-examples", "10"]
    done = subprocess.run(
        [*command, "--phases", "fuzzing", "--request-timeout", "120", "--seed", "1", "--no-color"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=570,  # below the time after which a hanging test ends the whole run
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
