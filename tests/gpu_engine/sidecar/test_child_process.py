"""A child process: its output, its end, and that it leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable

import psutil
import pytest
import uvloop

from gpu_engine.sidecar.supervisor import ChildProcess
from tests.descriptors import none_left
from tests.waiting import eventually

LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
Loop = Callable[[], asyncio.AbstractEventLoop]


def in_loop(loop: Loop, code: str, number: signal.Signals | None = None) -> tuple[bytes, int, int]:
    """Return output, exit status and process id of a child that runs `code` and gets a signal after its first line."""

    async def run() -> tuple[bytes, int, int]:
        child = await ChildProcess.start([sys.executable, "-u", "-c", code], os.environ)
        assert child.returncode is None
        said = await child.output.readline()
        if number is not None:
            child.send(number)
        said += await child.output.read()
        assert await child.wait() == await child.wait() == child.returncode
        child.send(signal.SIGKILL)  # of one that is gone: nothing happens
        return said, await child.wait(), child.pid

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(run())


@LOOPS
def test_output_exit_status_and_that_nothing_stays(loop: Loop) -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr); print(repr(sys.stdin.read())); sys.exit(7)"
    said, status, _ = in_loop(loop, code)
    assert (said.split(), status) == ([b"out", b"err", b"''"], 7)
    said, status, pid = in_loop(loop, "import os, time; print(os.getsid(0)); time.sleep(600)", signal.SIGTERM)
    assert (int(said), status) == (pid, -signal.SIGTERM), "it leads a session of its own"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with asyncio.Runner(loop_factory=loop) as runner, pytest.raises(FileNotFoundError):
        runner.run(ChildProcess.start(["/no/such/program"], os.environ))


@LOOPS
def test_without_a_descriptor_left_it_is_waited_for_and_reaped(loop: Loop) -> None:
    async def run() -> tuple[int, int]:
        child = await ChildProcess.start([sys.executable, "-c", "import time; time.sleep(600)"], os.environ)
        with none_left():
            waiting, again = (asyncio.create_task(child.wait()) for _ in range(2))
            await asyncio.wait([waiting, again], timeout=0.05)
            waiting.cancel()
            waited = not waiting.done(), not again.done()
            child.send(signal.SIGTERM)
            await asyncio.wait([waiting, again])
        assert waited == (True, True)
        assert waiting.cancelled()
        return await again, child.pid

    with asyncio.Runner(loop_factory=loop) as runner:
        status, pid = runner.run(run())
    assert status == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def open_pipes() -> set[str]:
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return {target for link in links if os.path.lexists(link) and (target := os.readlink(link)).startswith("pipe:")}


@LOOPS
def test_a_signal_to_one_that_has_ended_does_not_reap_it(loop: Loop) -> None:
    async def run() -> None:
        before = open_pipes()
        child = await ChildProcess.start([sys.executable, "-c", "pass"], os.environ)
        assert open_pipes() - before
        await asyncio.to_thread(os.waitid, os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        child.send(signal.SIGKILL)
        assert child.returncode is None
        os.kill(child.pid, 0)  # it is there, as it says
        assert await child.wait() == 0
        await eventually(lambda: open_pipes() <= before)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())


@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("turns", range(4))
def test_a_start_that_is_cancelled_is_cancelled_and_leaves_no_child(loop: Callable[..., None], turns: int) -> None:
    async def main() -> None:
        before = {child.pid for child in psutil.Process().children()}
        task = asyncio.create_task(ChildProcess.start(["sleep", "600"], os.environ))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        try:
            child = await task
        except asyncio.CancelledError:
            assert task.cancelled()
        else:  # it was over before
            child.send(signal.SIGKILL)
            await child.wait()
        assert {child.pid for child in psutil.Process().children()} <= before

    loop(main())
