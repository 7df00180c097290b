"""Peers that are servers: a process that listens on loopback, driven over HTTP with one thread per running request.

Invariant: the process has ended after `close`. Times are taken in this process, when a piece of the stream arrives.
Not responsible for: what a request and the events of its stream look like (see llama_server.py and vllm_server.py).
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import Answer, Run
from benchmarks.harness.systems import Prompt, SystemFailed
from service_runtime.parent_death import dying_with_us

CONTEXT = 2048
"""Tokens of prompt and answer that each request may have, as for the other peers."""
_TIMEOUT_S = 600.0


class ServerPeer(ABC):
    """A server that runs as `argv` and listens on `port`.

    Raises:
        SystemFailed: the program is missing, ended, or was not healthy after `start_s` seconds.

    """

    guided = True
    path: str
    """Of the completions."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        port: int,
        *,
        settings: str,
        start_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._settings, self.port = settings, port
        self._program = Path(argv[0]).name
        if shutil.which(argv[0]) is None:
            raise SystemFailed(f"{argv[0]} is no program")
        descriptor, path = tempfile.mkstemp(prefix="lockstep-bench-server-", suffix=".log")
        self.log = Path(path)
        with os.fdopen(descriptor, "wb") as log:
            self._process = subprocess.Popen(
                dying_with_us(argv),
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(os.environ if environment is None else environment),
                cwd=tempfile.gettempdir(),
                start_new_session=True,
            )
        try:
            self._await_healthy(start_s)
            self._build = self.build()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} pid={self._process.pid} log={self.log}>"

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """The server's process has not ended."""
        return self._process.poll() is None

    @abstractmethod
    def build(self) -> str:
        """Return name and version of the server, which is healthy."""

    @abstractmethod
    def body(self, prompt: Prompt) -> dict[str, Any]:
        """Return the body of a completion: greedy, streamed, the prompt as token ids."""

    @abstractmethod
    def answer(self, prompt: Prompt, started_s: float, pieces: Iterable[dict[str, Any]]) -> Answer:
        """Return the answer that the events of one request make.

        Raises:
            SystemFailed: the stream ended without its last event.

        """

    def describe(self) -> str:
        """Build and settings."""
        return f"{self._build}: {self._settings}"

    def run(self, prompts: Sequence[Prompt], concurrency: int, on_answer: Callable[[], None]) -> Run:
        """See `System.run`."""
        started_s = time.perf_counter()
        with ThreadPoolExecutor(concurrency, thread_name_prefix="peer-client") as pool:
            tasks = [pool.submit(self._complete, prompt) for prompt in prompts]
            try:
                for task in as_completed(tasks):
                    task.result()
                    on_answer()
            except (OSError, http.client.HTTPException) as error:
                pool.shutdown(cancel_futures=True)
                raise SystemFailed(f"{type(error).__name__}: {error} (log: {self.log})") from error
            except SystemFailed:
                pool.shutdown(cancel_futures=True)
                raise
        return Run(tuple(task.result() for task in tasks), time.perf_counter() - started_s)

    def _complete(self, prompt: Prompt) -> Answer:
        started_s = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_TIMEOUT_S)
        try:
            connection.request("POST", self.path, json.dumps(self.body(prompt)), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise SystemFailed(f"{prompt.item.name}: {message(json.loads(response.read()))}")
            return self.answer(prompt, started_s, events(response))
        finally:
            connection.close()

    def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body of a GET."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _await_healthy(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                tail = self.log.read_text(errors="replace").splitlines()[-3:]
                raise SystemFailed(f"{self._program} ended with {self._process.returncode}: {' | '.join(tail)}")
            try:
                if self.get("/health")[0] == http.HTTPStatus.OK:
                    return
            except OSError:
                pass  # not listening yet
            time.sleep(0.1)
        raise SystemFailed(f"{self._program} was not healthy after {timeout_s:.0f} s (log: {self.log})")

    def close(self) -> None:
        """End the process: SIGTERM, ten seconds, then SIGKILL to its whole session."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Return the JSON objects of a stream of server-sent events.

    Raises:
        SystemFailed: an event is an error of the server.

    """
    for line in lines:
        kind, _, value = line.decode().partition(":")
        if kind not in ("data", "error") or value.strip() == "[DONE]":
            continue
        event: dict[str, Any] = json.loads(value)
        if kind == "error" or "error" in event:
            raise SystemFailed(message(event))
        yield event


def message(event: dict[str, Any]) -> str:
    """Return the words of an error that a server sent."""
    error = event.get("error", event)
    words = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(words).split())[:200]
