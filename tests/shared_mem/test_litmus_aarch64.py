"""The litmus tests on aarch64: the orders in the compiled code, and its outcomes under qemu's emulation of a process.

An emulator on x86-64 makes every order of loads, and of stores, as strict as x86-64's. Only a store that waits while a
later load runs is as on a machine, so only `store_buffering` can fail here for a missing order; the listing shows the
orders of the other two. Not responsible for: what weaker processors do with them (see test_interleave.py).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("litmus.c")
COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64-static")
LISTER = shutil.which("aarch64-linux-gnu-objdump")
ROUNDS, RUNS = 10_000, 50
ORDERS = {
    "passing_writer": ["stlr"],
    "passing_reader": ["ldar"],
    "seqlock_writer": ["dmb ish", "stlr"],
    "seqlock_reader": ["ldar", "dmb ishld"],
    "buffering_sleeper": ["dmb ish"],
    "buffering_waker": ["dmb ish"],
    "relaxed_sleeper": [],
    "relaxed_waker": [],
}
"""Function of litmus.c -> its instructions that order memory."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        None in (COMPILER, EMULATOR, LISTER), reason="needs gcc-aarch64-linux-gnu and qemu-user-static of Debian"
    ),
]


@pytest.fixture(scope="module")
def litmus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("litmus") / "litmus"
    flags = ["-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread", "-static", "-march=armv8-a"]
    subprocess.run([str(COMPILER), *flags, str(SOURCE), "-o", str(program)], check=True)
    return program


def outcomes(program: Path, name: str) -> int:
    """Return how many rounds had the outcome that the orders of `name` forbid."""
    command = [str(EMULATOR), "-cpu", "max", str(program), name, str(ROUNDS)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("name", ["message_passing", "seqlock", "store_buffering"])
def test_an_outcome_that_the_orders_forbid_does_not_happen(litmus: Path, name: str) -> None:
    assert sum(outcomes(litmus, name) for _ in range(10)) == 0


def test_store_buffering_happens_under_the_emulator_without_its_fence(litmus: Path) -> None:
    """Otherwise the test of `store_buffering` would show nothing."""
    for _ in range(RUNS):
        if outcomes(litmus, "store_buffering_relaxed"):
            return
    pytest.skip(f"in {RUNS * ROUNDS} rounds this machine's cores were never in the same round at once")


def test_the_compiled_code_has_the_orders(litmus: Path) -> None:
    listed = [str(LISTER), "-d", "--no-show-raw-insn", str(litmus)]
    listing = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    for name, orders in ORDERS.items():
        found = re.search(rf"<{name}>:\n(.*?)\n\n", listing, re.DOTALL)
        assert found, name
        instructions = [line.split(":", 1)[1].split() for line in found[1].splitlines()]
        ordering = [
            " ".join(words[: 2 if words[0] == "dmb" else 1])
            for words in instructions
            if words[0].startswith(("dmb", "dsb", "lda", "stl"))
        ]
        assert ordering == orders, name
