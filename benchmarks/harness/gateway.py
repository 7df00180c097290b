"""The HTTP gateway as a subprocess: start it with flags, wait until it is ready, stop it.

Invariant: the process has ended, with exit status 0, when the context ends.
Not responsible for: the engines after it (see server.py).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.harness.server import ServerFailed, free_port
from service_runtime.parent_death import dying_with_us

STOP_S = 60.0


@contextmanager
def start_gateway(engine: str, *flags: str) -> Iterator[str]:
    """Run a gateway until the context ends; yield its address, "host:port".

    Args:
        engine: addresses of its engines, with a comma between two.
        flags: further flags of `python -m http_gateway`.

    Raises:
        ServerFailed: it did not become ready, or did not end in order.

    """
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "http_gateway", "--listen", address, "--engine", engine, *flags]
    with (
        tempfile.TemporaryFile("w+b") as log,
        subprocess.Popen(dying_with_us(command), stdout=subprocess.PIPE, stderr=log) as process,
    ):
        assert process.stdout is not None
        ready = process.stdout.readline().startswith(b"ready: ")  # the end of the process ends the line, too
        try:
            if ready:
                yield address
        finally:
            process.terminate()
            status = process.wait(STOP_S)
        if not ready or status != 0:
            log.seek(0)
            raise ServerFailed(f"the gateway ended with {status}\n{log.read().decode(errors='replace')}")
