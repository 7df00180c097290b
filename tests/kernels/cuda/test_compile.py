"""Every kernel compiles for a Hopper GPU on a machine without one: the interpreter accepts more than the compiler."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.cuda.ahead_of_time import NAMES


@pytest.mark.slow
def test_every_kernel_compiles_ahead_of_time(root: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kernels.cuda.ahead_of_time"],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == NAMES


def test_the_list_of_kernels_is_complete(root: Path) -> None:
    defined = set()
    for path in (root / "kernels/cuda").rglob("*.py"):
        lines = path.read_text().splitlines()
        heads = [line for before, line in itertools.pairwise(lines) if before == "@triton.jit"]
        defined |= {name for line in heads if (name := line[4:].split("(")[0]).endswith("_kernel")}
    assert defined == NAMES
