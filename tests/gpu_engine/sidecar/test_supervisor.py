"""The supervisor with small scripts in the place of the grammar process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpu_engine.api.config import ServerConfig
from gpu_engine.sidecar.supervisor import FIRST_RETRY_S, SPIN_ALWAYS_US, Sidecar, grammar_command, private_memory_mb
from grammar_service.config import read as grammar_settings
from grammar_service.fill.worker import WAIT_S
from tests.descriptors import none_left
from tests.waiting import alive, eventually


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


MAX_FAILURES = 3
LINE = "2026-01-01 10:00:00,000 INFO grammar_service.server: ready"
SLEEPS = python(f"import time; print('{LINE}\\nup', flush=True); time.sleep(600)")


def shared_kb(pid: int) -> int:
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(lines.get("RssShmem", "0 kB").split()[0])


@asynccontextmanager
async def running(sidecar: Sidecar) -> AsyncIterator[None]:
    task = asyncio.create_task(sidecar.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def pid_of(sidecar: Sidecar, start: int = 1) -> int:
    """Return the process id of the child of so many starts."""
    await eventually(lambda: sidecar.starts == start and sidecar.pid)
    assert sidecar.pid is not None
    return sidecar.pid


async def test_output_is_forwarded_and_the_child_ends_with_run(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ignores_sigterm = python(
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    for command in (SLEEPS, ignores_sigterm):
        caplog.clear()
        sidecar = Sidecar(command, lambda reason: None)
        sidecar.term_timeout_s = 0.2
        async with running(sidecar):
            await eventually(lambda: ("grammar_service", logging.WARNING, "up") in caplog.record_tuples)
            assert (("grammar_service", logging.INFO, LINE) in caplog.record_tuples) == (command is SLEEPS)
            pid = await pid_of(sidecar)
        assert not alive(pid)


async def test_a_killed_child_is_started_again_and_was_attached_until_its_end(caplog: pytest.LogCaptureFixture) -> None:
    sidecar = Sidecar(SLEEPS, lambda reason: None)
    assert not sidecar.was_attached
    async with running(sidecar):
        for start, (number, name) in enumerate(((9, "SIGKILL"), (signal.SIGRTMIN + 1, "signal ")), start=1):
            pid = await pid_of(sidecar, start)
            assert not sidecar.was_attached
            sidecar.attached()
            assert sidecar.was_attached
            os.kill(pid, number)
            await eventually(lambda name=name: f"killed by {name}" in caplog.text)
        await pid_of(sidecar, 3)
        sidecar.kill()
        await pid_of(sidecar, 4)


async def test_without_a_descriptor_left_there_is_still_one_child_at_most(tmp_path: Path) -> None:
    # It says nothing more, which looks like its end, and lives.
    code = (
        "import os, signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]); print('up', flush=True);"
        f"open({str(tmp_path / 'ready')!r}, 'w'); signal.sigwait([signal.SIGUSR1]); os.close(1); os.close(2);"
        "signal.pause()"
    )
    sidecar = Sidecar(python(code), lambda reason: None)
    task = asyncio.create_task(sidecar.run())
    await eventually((tmp_path / "ready").exists)
    pid = sidecar.pid
    assert pid is not None
    with none_left():
        os.kill(pid, signal.SIGUSR1)
        await asyncio.sleep(0.3)
        os.kill(pid, 0)
        assert sidecar.pid == pid
        sidecar.kill()
        await eventually(lambda: sidecar.pid != pid)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    await eventually(lambda: sidecar.starts == 2 and sidecar.pid)
    second = sidecar.pid
    assert second is not None
    with none_left():
        task.cancel()
        await eventually(task.done)
    assert task.cancelled()
    assert not alive(second)


async def test_after_too_many_failures_it_is_given_up_for_a_time(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    reasons: list[str] = []
    cured = tmp_path / "cured"
    code = f"import pathlib, time; pathlib.Path({str(cured)!r}).exists() or exit(3); time.sleep(600)"
    sidecar = Sidecar(python(code), reasons.append, max_failures=MAX_FAILURES, cool_down_s=0.3)
    sidecar.longest_retry_s = 0.05
    async with running(sidecar):
        await eventually(lambda: reasons)
        assert sidecar.starts == MAX_FAILURES
        assert reasons == [sidecar.gave_up]
        assert f"failed {MAX_FAILURES} times" in reasons[0]
        assert reasons[0].endswith("see the server's log")
        assert caplog.text.count("the next one starts") == MAX_FAILURES - 1
        assert "the next start is in 0.3 s" in caplog.text
        # The first attempt after the pause decides: here it fails, then it does not.
        await eventually(lambda: len(reasons) > 1)
        assert sidecar.starts == MAX_FAILURES + 1
        cured.touch()
        await eventually(lambda: sidecar.pid and not sidecar.gave_up)
        await asyncio.sleep(0.5)
        assert len(reasons) == sidecar.starts - MAX_FAILURES


class EndsAtOnce:
    """A child that fails as soon as it is started."""

    pid, returncode = 1 << 30, 3

    def __init__(self) -> None:
        self.output = asyncio.StreamReader()
        self.output.feed_eof()

    def send(self, number: signal.Signals) -> None:
        raise AssertionError("it has ended")

    async def wait(self) -> int:
        return self.returncode


async def start_fails(command: Sequence[str], environment: Mapping[str, str]) -> EndsAtOnce:
    return EndsAtOnce()


@pytest.mark.parametrize(("seconds_apart", "too_many"), [(29.0, True), (31.0, False)])
async def test_failures_within_a_minute_are_counted(seconds_apart: float, too_many: bool) -> None:
    reasons: list[str] = []
    sidecar = Sidecar(
        [],
        reasons.append,
        max_failures=3,
        start=start_fails,
        clock=lambda: seconds_apart * sidecar.starts,
        cool_down_s=600,
    )
    sidecar.longest_retry_s = 0.0
    async with running(sidecar):
        await eventually(lambda: reasons or sidecar.starts >= 10)
    assert (sidecar.starts == 3) == too_many
    assert len(reasons) == too_many
    assert all(reason.startswith("the grammar process failed 3 times within 60 s") for reason in reasons)


async def test_ends_of_processes_that_were_of_use_and_any_without_a_limit_are_no_failures() -> None:
    reasons: list[str] = []
    sidecar = Sidecar([], reasons.append, max_failures=MAX_FAILURES, start=start_fails, cool_down_s=60)
    sidecar.longest_retry_s = 0.0
    # Every second process is of use, as one is after which a grammar crashes after some tokens.
    sidecar.progress = lambda: min(sidecar.starts, 20) // 2
    async with running(sidecar):
        await eventually(lambda: reasons)
    assert sidecar.starts == 20 + MAX_FAILURES
    reasons.clear()
    sidecar = Sidecar([], reasons.append, max_failures=0, start=start_fails)
    sidecar.longest_retry_s = 0.0
    async with running(sidecar):
        await eventually(lambda: sidecar.starts > 10)
    assert reasons == []


@pytest.mark.parametrize(("ending", "is_forgiven"), [("kill", 1), ("ordered", 0), ("crash", 0), ("kill unattached", 0)])
async def test_an_end_from_outside_is_forgiven_and_a_crash_or_own_kill_is_not(ending: str, is_forgiven: int) -> None:
    forgiven: list[int] = []
    sidecar = Sidecar(SLEEPS, lambda reason: None)
    sidecar.on_outside_end = lambda: forgiven.append(sidecar.starts)
    async with running(sidecar):
        pid = await pid_of(sidecar)
        if ending != "kill unattached":
            sidecar.attached()
        if ending == "ordered":
            sidecar.kill()
        else:
            os.kill(pid, signal.SIGSEGV if ending == "crash" else signal.SIGKILL)
        await eventually(lambda: sidecar.starts == 2)
        assert forgiven == [1] * is_forgiven


def waits(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line.rpartition("starts in ")[2] for line in caplog.messages if "the next one starts" in line]


def pauses(*factors: int) -> list[str]:
    return [f"{FIRST_RETRY_S * factor:.2f} s" for factor in factors]


async def test_after_one_that_was_of_use_the_next_is_started_at_once(caplog: pytest.LogCaptureFixture) -> None:
    sidecar = Sidecar(SLEEPS, lambda reason: None)
    sidecar.healthy_s = 0.0
    async with running(sidecar):
        for start, of_use in enumerate((False, False, True, False), start=1):
            await pid_of(sidecar, start)
            if of_use:
                sidecar.attached()
            sidecar.kill()
        await eventually(lambda: sidecar.starts == 5)
    assert waits(caplog) == pauses(1, 2, 1, 2)


async def test_one_that_served_and_was_ended_from_outside_is_followed_at_once(caplog: pytest.LogCaptureFixture) -> None:
    sidecar = Sidecar(SLEEPS, lambda reason: None)
    sidecar.healthy_s = 3600.0
    async with running(sidecar):
        for start, number in enumerate((signal.SIGSEGV, signal.SIGSEGV, signal.SIGKILL, signal.SIGKILL), start=1):
            pid = await pid_of(sidecar, start)
            sidecar.attached()
            os.kill(pid, number)
        await eventually(lambda: sidecar.starts == 5)
    assert waits(caplog) == pauses(1, 2, 1, 1)


async def test_a_child_that_takes_too_much_memory_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    code = "import time; kept = b'x' * (200 << 20); time.sleep(600)"
    sidecar = Sidecar(python(code), lambda reason: None, memory_mb=150)
    async with running(sidecar):
        await eventually(lambda: sidecar.starts == 2)
    assert "more than grammar_memory_mb = 150" in caplog.text


async def test_memory_shared_with_the_engine_does_not_count() -> None:
    code = (
        "import mmap, time; kept = mmap.mmap(-1, 200 << 20);"
        "[kept.__setitem__(i, 1) for i in range(0, 200 << 20, 4096)];"
        "time.sleep(600)"
    )
    sidecar = Sidecar(python(code), lambda reason: None)
    async with running(sidecar):
        pid = await pid_of(sidecar)
        await eventually(lambda: shared_kb(pid) >= 200 << 10)
        assert private_memory_mb(pid) < 100
    assert private_memory_mb(pid) == 0


def test_the_child_dies_with_a_parent_that_is_killed() -> None:
    code = f"""
import asyncio
from gpu_engine.sidecar.supervisor import Sidecar, private_memory_mb
async def main():
    sidecar = Sidecar({SLEEPS!r}, print)
    task = asyncio.create_task(sidecar.run())
    while sidecar.pid is None:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    print(sidecar.pid, flush=True)
    await task
asyncio.run(main())
"""
    with subprocess.Popen(python(code), stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]) as parent:
        try:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            assert alive(pid)
        finally:
            parent.kill()  # leaving the block waits for it
    asyncio.run(eventually(lambda: not alive(pid)))


CONFIG = ServerConfig(grammar_backend="xgrammar", compile_timeout_s=2.5, log_format="json")


def test_the_command_line_of_the_grammar_process() -> None:
    command = grammar_command(CONFIG, Path("/run/x"))
    assert command[1:] == [
        *("-m", "grammar_service", "--dir", "/run/x", "--backend", "xgrammar", "--compile-timeout-s", "2.5"),
        *("--compile-memory-mb", "2048", "--cache-dir", "/run/x/compiled", "--cache-dir-bytes", "67108864"),
        *("--log-format", "json"),
    ]


def test_compiled_grammars_are_kept_where_the_user_says_and_not_in_a_directory_of_others(tmp_path: Path) -> None:
    def kept(**settings: str) -> str:
        return grammar_settings(grammar_command(ServerConfig(**settings), tmp_path)[3:], {})[0].cache_dir  # type: ignore[arg-type]

    assert kept() == str(tmp_path / "compiled")
    assert kept(grammar_cache_dir="/var/kept", grammar_dir="/run/x") == "/var/kept"
    assert kept(grammar_dir="/run/x") == ""


def test_a_grammar_process_that_nothing_wakes_is_started_to_spin(tmp_path: Path) -> None:
    assert "--spin-us" not in grammar_command(ServerConfig(), tmp_path)
    command = grammar_command(ServerConfig(), tmp_path, must_spin=True)[3:]
    assert grammar_settings(command, {})[0].spin_us == SPIN_ALWAYS_US > WAIT_S * 1e6, "longer than any one wait"
