"""A child process for the event loop, started without a copy of this one's page tables.

uvloop's own way forks: with a model in memory that holds the loop for 50 ms, and the step meets copied pages behind it
(docs/log.md). `subprocess.Popen` uses vfork. One invariant: a child is reaped, and its pipe closed, by `wait` on the
event loop and by nothing else; its owner calls it. Until then the process id is the child's, and a signal meets nobody
else. Not here: when one is started or ended (`sidecar.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence


class ChildProcess:
    """Made by `start`. Used on the event loop."""

    def __init__(
        self, process: subprocess.Popen[bytes], output: asyncio.StreamReader, pipe: asyncio.BaseTransport
    ) -> None:
        self._process, self._pipe = process, pipe
        self.output = output
        """What it writes to stdout and stderr."""

    @staticmethod
    async def start(command: Sequence[str], environment: Mapping[str, str]) -> ChildProcess:
        """Start `command` in a session of its own, with nothing on stdin. Raises OSError."""
        process = subprocess.Popen(  # noqa: ASYNC220  # holds the loop for less than a millisecond
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
        assert process.stdout is not None
        output = asyncio.StreamReader()
        connecting = asyncio.ensure_future(
            asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(output), process.stdout)
        )
        cancelled: asyncio.CancelledError | None = None
        while not connecting.done():
            try:
                await asyncio.wait([connecting])
            except asyncio.CancelledError as error:
                # It takes a moment. Left half-way, the loop has the descriptor and both would close it.
                cancelled = error
        failed = connecting.exception()
        if cancelled or failed:
            process.kill()
            process.wait()
            if failed is None:
                connecting.result()[0].close()
            else:
                with contextlib.suppress(OSError):  # a loop that failed may have closed it
                    process.stdout.close()
            raise cancelled or failed  # type: ignore[misc]
        pipe, _ = connecting.result()
        return ChildProcess(process, output, pipe)

    @property
    def pid(self) -> int:
        """Its process id, which is nobody else's until `wait` has returned."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, or the number of the signal that ended it below 0; None before `wait` has returned."""
        return self._process.returncode

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless it has been reaped."""
        if self._process.returncode is None:
            os.kill(self.pid, number)  # not Popen's send_signal, which would reap it

    async def wait(self) -> int:
        """Wait for its end and return `returncode`. What `output` has not read by then is lost.

        Who is cancelled here has neither: the child may live, and `wait` is to be called again.
        """
        if self._process.returncode is None:
            try:
                await self._ended()
            except OSError:  # no descriptor is left: a thread needs none
                await asyncio.to_thread(os.waitid, os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        self._pipe.close()
        return self._process.wait()

    async def _ended(self) -> None:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        descriptor = os.pidfd_open(self.pid)
        try:
            loop.add_reader(descriptor, ended.set)
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)

    def __repr__(self) -> str:
        return f"<ChildProcess pid={self.pid} returncode={self.returncode}>"
