"""The gateway smg before a running server, as a process.

Not responsible for: what works through it (see test_smg.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.server import free_ports

START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Smg:
    """A gateway that has found its workers."""

    url: str
    process: subprocess.Popen[bytes]

    def get(self, path: str) -> Any:
        """Return the JSON at a path."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=20) as response:
            return json.load(response)

    def post(self, path: str, body: object) -> Any:
        """Send JSON to a path and return the JSON of the answer."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)


@contextmanager
def smg(workers: list[str], log: Path, *options: str) -> Iterator[Smg]:
    """Run smg in front of `workers` ("host:port"), until it serves their model. Its log goes to `log`."""
    port, metrics_port = free_ports(2)
    command = [
        sys.executable, "-m", "smg", "launch",
        "--host", "127.0.0.1", "--port", str(port),
        "--worker-urls", *(f"grpc://{worker}" for worker in workers),
        # Unless it is told, smg serves its metrics to every machine.
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port),
        "--shutdown-grace-period-secs", "0",
        *options,
    ]  # fmt: skip
    # It asks the hub for the tokenizer before it asks the engine: here is none.
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=log.parent, env=environment)
    try:
        gateway = Smg(f"http://127.0.0.1:{port}", process)
        _wait(gateway, len(workers), log)
        yield gateway
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)


def _wait(gateway: Smg, num_workers: int, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        assert gateway.process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        try:
            workers = gateway.get("/workers")["workers"]
            # A worker is ready before its tokenizer is there.
            if (
                sum(worker["is_healthy"] for worker in workers) == num_workers
                and gateway.get("/v1/tokenizers")["tokenizers"]
            ):
                return
        except (OSError, urllib.error.HTTPError):
            pass
        time.sleep(0.1)
