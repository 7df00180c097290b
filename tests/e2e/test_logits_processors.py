"""The example of logits processors, on the embedded model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.model


@pytest.mark.slow
def test_the_example_runs(root: Path) -> None:
    path = os.pathsep.join([str(root), str(root / "client")])
    example = [sys.executable, str(root / "examples/executor/logits_processor.py")]
    ran = subprocess.run(example, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0] == "the server has ngrams, end, clients"
    answers = dict(line.split(": ", 1) for line in lines[1:])
    assert len(set(answers.values())) == len(answers) == 4
    assert "sat" in answers["as the model likes"]
    assert " sat" not in answers["for a guest"]
