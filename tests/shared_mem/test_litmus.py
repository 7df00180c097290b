"""The orders that flags.c asks for, on the cores of this machine: outcomes that they forbid do not happen.

Not responsible for: the protocol that is made of them (see test_model.py).
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("litmus.c")
ROUNDS = 10_000


@pytest.fixture(scope="module")
def litmus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("litmus") / "litmus"
    flags = ["-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread"]
    subprocess.run(["gcc", *flags, str(SOURCE), "-o", str(program)], check=True)
    return program


def forbidden(program: Path, name: str, rounds: int) -> int:
    run = subprocess.run([str(program), name, str(rounds)], capture_output=True, text=True, check=True)
    return int(run.stdout)


@pytest.mark.parametrize("name", ["message_passing", "seqlock", "store_buffering"])
def test_an_outcome_that_the_orders_forbid_does_not_happen(litmus: Path, name: str) -> None:
    assert forbidden(litmus, name, ROUNDS) == 0
