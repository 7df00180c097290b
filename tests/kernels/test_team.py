"""The team of threads that shares the native loops: a late thread, or a missing one, changes no number."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import kernels
from kernels.blocks import BlockKind, PackedBlocks, can_multiply_blocks, quantised

NATIVE = Path(kernels.__file__).parent / "native"
CHUNKS = Path(__file__).with_name("team_chunks.c")

pytestmark = pytest.mark.skipif(not can_multiply_blocks(), reason="products over blocks need AVX2")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def product() -> tuple[PackedBlocks, torch.Tensor, torch.Tensor]:
    """A product, its input, and its result on one thread."""
    generator = torch.Generator().manual_seed(0)
    packed = PackedBlocks(quantised(torch.randn(600, 320, generator=generator), BlockKind.Q4))
    x_MK = torch.randn(9, 320, generator=generator)
    torch.set_num_threads(1)
    return packed, x_MK, packed(x_MK)


def test_any_number_of_threads_gives_the_same_bits_also_after_there_were_more() -> None:
    packed, x_MK, want_MN = product()
    for threads in (2, 7, 3, 1, 2):
        torch.set_num_threads(threads)
        for _ in range(50):
            assert torch.equal(packed(x_MK), want_MN), threads


def test_two_calls_at_once_are_both_right() -> None:
    packed, x_MK, want_MN = product()
    wrong: list[int] = []

    def calls() -> None:
        torch.set_num_threads(3)  # the setting belongs to the thread
        wrong.extend(i for i in range(300) if not torch.equal(packed(x_MK), want_MN))

    threads = [threading.Thread(target=calls) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_members_that_wait_for_a_core_change_nothing() -> None:
    """Members that the kernel puts aside at any moment: more busy processes than cores, at the same priority."""
    packed, x_MK, want_MN = product()
    torch.set_num_threads(4)
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        for _ in range(200):
            assert torch.equal(packed(x_MK), want_MN)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def team_threads() -> list[int]:
    names = Path("/proc/self/task").glob("*/comm")
    return [int(name.parent.name) for name in names if name.read_text().strip() == "lockstep-team"]


def test_no_thread_of_the_team_takes_signals() -> None:
    packed, x_MK, _ = product()
    torch.set_num_threads(2)
    packed(x_MK)
    assert team_threads()
    for thread in team_threads():
        status = Path(f"/proc/self/task/{thread}/status").read_text()
        blocked = int(next(line for line in status.splitlines() if line.startswith("SigBlk:")).split()[1], 16)
        assert blocked & 1 << signal.SIGTERM - 1


def test_a_forked_child_works_without_its_parents_threads() -> None:
    packed, x_MK, want_MN = product()
    torch.set_num_threads(2)
    packed(x_MK)
    child = os.fork()
    if child == 0:
        equal = all(torch.equal(packed(x_MK), want_MN) for _ in range(20))
        os._exit(0 if equal else 1)
    deadline = threading.Timer(60, os.kill, (child, signal.SIGKILL))
    deadline.start()
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        deadline.cancel()


def test_chunks_of_a_loop_differ_by_one_item_at_most(tmp_path: Path) -> None:
    program = tmp_path / "team_chunks"
    command = ["gcc", "-std=gnu11", "-pthread", f"-I{NATIVE}", str(CHUNKS), str(NATIVE / "team.c"), "-o", str(program)]
    subprocess.run(command, check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
