"""Waiting until the systems of a benchmark are at rest."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from benchmarks.harness.rest import await_rest, cpu_seconds


class Machine:
    """A clock that moves by sleeping alone, and children that compute until `busy_until_s`."""

    def __init__(self, busy_until_s: float, share: float = 1.0) -> None:
        self.now_s = 0.0
        self._busy_until_s = busy_until_s
        self._share = share

    def used_s(self) -> float:
        return self._share * min(self.now_s, self._busy_until_s)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def wait(machine: Machine, limit_s: float = 10.0) -> bool:
    return await_rest(limit_s, machine.used_s, lambda: machine.now_s, machine.sleep)


def test_the_wait_ends_when_the_others_have_stopped_polling() -> None:
    machine = Machine(busy_until_s=1.6)
    assert wait(machine)
    assert 1.6 < machine.now_s < 2.5


def test_an_idle_engines_heartbeat_is_rest() -> None:
    machine = Machine(busy_until_s=100.0, share=0.03)
    assert wait(machine)
    assert machine.now_s < 0.5


def test_a_wait_that_runs_out_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(busy_until_s=100.0)
    assert not wait(machine, limit_s=3.0)
    assert "not at rest after 3 s" in capsys.readouterr().err
    assert machine.now_s == pytest.approx(3.0)


def test_the_time_of_a_busy_child_is_counted() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            before = cpu_seconds()
            give_up = time.monotonic() + 20
            while cpu_seconds() < before + 0.05:
                assert time.monotonic() < give_up
                time.sleep(0.02)
        finally:
            child.kill()
