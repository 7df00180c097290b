"""The cores that each thread may use, as the operating system reports them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.ops.core_split import CoreSplit, fills_cores
from gpu_engine.sidecar.supervisor import grammar_command

needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")


@pytest.mark.parametrize(
    ("config", "cores", "usable", "rest"),
    [
        (EngineConfig(device="cpu", num_threads=1), {0, 1}, 2, {1}),
        (EngineConfig(device="cpu", num_threads=1), {4, 9}, 2, {9}),
        (EngineConfig(device="cpu", num_threads=2), {0, 1, 2, 3}, 4, {2, 3}),
        (EngineConfig(device="cpu", num_threads=1), {0, 1, 2, 3}, 4, {1, 2, 3}),
        (EngineConfig(device="cpu", num_threads=1, tensor_parallel_size=2), {0, 1, 2}, 3, {2}),
        (EngineConfig(device="cpu", num_threads=1, tensor_parallel_size=2), {0, 1}, 2, None),
        (EngineConfig(device="cuda"), {0, 1, 2}, 3, {1, 2}),
        (EngineConfig(device="cuda", sync="device_flag"), {0, 1, 2}, 3, {1, 2}),
        # A polling process would occupy the only spare core.
        (EngineConfig(device="cuda", sync="device_flag"), {0, 1}, 2, None),
        # The model uses every core, or has more threads than cores.
        (EngineConfig(device="cpu"), {0, 1}, 2, None),
        (EngineConfig(device="cpu", num_threads=2), {0, 1}, 2, None),
        (EngineConfig(device="cpu", num_threads=3), {0, 1}, 2, None),
        (EngineConfig(device="cpu", num_threads=1), {0}, 1, None),
        # Enough other cores are idle.
        (EngineConfig(device="cpu", num_threads=1), set(range(5)), 5, None),
        (EngineConfig(device="cuda"), set(range(16)), 16, None),
        (EngineConfig(device="cpu", num_threads=1), {0, 1, 2}, 2, None),
    ],
)
def test_the_split_of_cores(config: EngineConfig, cores: set[int], usable: int, rest: set[int] | None) -> None:
    split = CoreSplit.of(config, frozenset(cores), usable)
    assert split == (None if rest is None else CoreSplit(frozenset(cores), frozenset(rest)))


# The script runs in its own process, because it changes the settings of the whole process.
SCRIPT = """
import os, subprocess, sys, threading
from gpu_engine.ops.core_split import CoreSplit, fills_cores

def mine():
    return sorted(os.sched_getaffinity(0))

def seen(thread_target):
    out = []
    thread = threading.Thread(target=lambda: out.append(thread_target()))
    thread.start()
    thread.join()
    return out[0]

cores = sorted(os.sched_getaffinity(0))
split = CoreSplit(frozenset(cores), frozenset(cores[-1:]))
pinned, go, checked, released = (threading.Event() for _ in range(4))
early, own_cores = [], []

def wait():
    go.wait()
    early.append(mine())
    checked.set()
    released.wait()
    early.append(mine())

def stay():
    os.sched_setaffinity(0, cores[:1])
    pinned.set()
    released.wait()
    own_cores.append(mine())

waits = threading.Thread(target=wait, daemon=True)
stays = threading.Thread(target=stay, daemon=True)
waits.start()
stays.start()
pinned.wait()
assert split.confine()
go.set()
checked.wait()
assert mine() == cores[-1:], "the caller"
assert early[0] == cores[-1:], "a thread that started before"
assert seen(mine) == cores[-1:], "a thread that started later"
child = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
assert subprocess.check_output(child, text=True).strip() == str(cores[-1:]), "a child"
assert split.on_every_core(lambda: (mine(), seen(mine))) == (cores, cores), "the model's threads"
assert mine() == cores[-1:]
try:
    split.on_every_core(lambda: 1 / 0)
except ZeroDivisionError:
    pass
else:
    raise AssertionError
assert mine() == cores[-1:]
split.release()
released.set()
waits.join()
stays.join()
assert mine() == early[1] == cores
assert own_cores[0] == cores[:1], "a thread whose cores other code has set"
print("ok")
"""


@needs_two_cores
def test_the_cores_of_a_process_are_confined_and_released() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[3]
    )
    assert (done.stdout.strip(), done.returncode) == ("ok", 0), done.stderr


def test_a_grammar_process_on_the_cores_of_the_event_loop_compiles_at_idle_priority() -> None:
    flags = grammar_command(ServerConfig(), Path("/d"), compile_idle=True)
    assert flags[flags.index("--compile-priority") + 1] == "idle"
    assert "--compile-priority" not in grammar_command(ServerConfig(), Path("/d"))


@pytest.mark.parametrize(("threads", "usable", "fills"), [(2, 2, True), (1, 2, False), (4, 2, True), (3, 4, False)])
def test_a_model_with_a_thread_for_every_core_fills_them(threads: int, usable: int, fills: bool) -> None:
    assert fills_cores(EngineConfig(device="cpu", num_threads=threads), usable) is fills
