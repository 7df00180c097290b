"""llama.cpp's server as a peer: `llama-server` as a process, driven over HTTP with one thread per running request.

Invariant: the process has ended after `close`. Times are taken in this process, when a piece of the stream arrives.
Not responsible for: building llama.cpp (see benchmarks/README.md).
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import Answer, Run
from benchmarks.harness.server import free_port
from benchmarks.harness.systems import Prompt, SystemFailed
from service_runtime.parent_death import dying_with_us

_CONTEXT = 2048
"""Tokens of prompt and answer that each request may have, as for the other peers."""


def request_body(prompt: Prompt) -> dict[str, Any]:
    """Return the body of `POST /completion`: greedy, streamed, the prompt as token ids, nothing reused of others."""
    body: dict[str, Any] = {
        "prompt": list(prompt.token_ids),
        "n_predict": prompt.item.max_tokens,
        "temperature": 0,
        "top_k": 1,
        "samplers": ["top_k"],
        "cache_prompt": False,
        "stream": True,
        "return_tokens": True,
    }
    if prompt.item.schema is not None:
        body["json_schema"] = json.loads(prompt.item.schema)
    return body


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
            raise SystemFailed(_message(event))
        yield event


def read_answer(name: str, started_s: float, pieces: Iterable[dict[str, Any]]) -> Answer:
    """Return the answer that the events of one request make.

    The server may count tokens whose ids it does not send, such as the first bytes of a character: -1 stands in for
    those. Tokens of one decode step arrive as pieces of their own, so the number of steps is the number of
    tokens less the accepted drafts.

    Raises:
        SystemFailed: the stream ended without its last event.

    """
    text: list[str] = []
    token_ids: list[int] = []
    arrivals: list[float] = []
    for event in pieces:
        now_s = time.perf_counter()
        text.append(event["content"])
        if event["stop"]:
            missing = event["tokens_predicted"] - len(token_ids)
            accepted = event.get("timings", {}).get("draft_n_accepted", 0)
            return Answer(
                name=name,
                text="".join(text),
                token_ids=(*token_ids, *[-1] * missing),
                finish={"eos": "stop", "word": "stop", "limit": "length"}.get(event["stop_type"], event["stop_type"]),
                started_s=started_s,
                first_s=arrivals[0] if arrivals else now_s,
                last_s=arrivals[-1] if arrivals else now_s,
                steps=max(event["tokens_predicted"] - accepted, 1),
            )
        if event["tokens"]:
            arrivals.append(now_s)
            token_ids += event["tokens"]
    raise SystemFailed(f"{name}: the stream ended early")


class LlamaServer:
    """`llama-server`, greedy, with its own grammar for JSON Schema; `ngram` > 0: drafts from the text so far."""

    guided = True

    def __init__(self, binary: Path, gguf: Path, *, num_threads: int, batch: int, ngram: int = 0) -> None:
        self.name = "llama.cpp server" + (f" + ngram {ngram}" if ngram else "")
        self._settings = f"{gguf.name} as it is, {num_threads} threads, {batch} slots, HTTP"
        self._port = free_port()
        # fmt: off
        argv = [
            str(binary), "--model", str(gguf), "--host", "127.0.0.1", "--port", str(self._port), "--offline",
            "--threads", str(num_threads), "--threads-batch", str(num_threads),
            "--parallel", str(batch), "--ctx-size", str(batch * _CONTEXT),
            "--no-cache-prompt", "--cache-ram", "0",
        ]
        # fmt: on
        if ngram:
            argv += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3"]
            argv += ["--spec-ngram-simple-size-m", str(ngram)]
        if shutil.which(binary) is None:
            raise SystemFailed(f"{binary} is no program")
        descriptor, path = tempfile.mkstemp(prefix="lockstep-bench-llama-", suffix=".log")
        self.log = Path(path)
        with os.fdopen(descriptor, "wb") as log:
            self._process = subprocess.Popen(
                dying_with_us(argv), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            self._await_healthy(60.0)
            self._build: str = json.loads(self._get("/props")[1])["build_info"]
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<LlamaServer {self.name} pid={self._process.pid} log={self.log}>"

    def describe(self) -> str:
        """Build and settings."""
        return f"llama.cpp {self._build}: {self._settings}"

    def run(self, prompts: Sequence[Prompt], concurrency: int, on_answer: Callable[[], None]) -> Run:
        """See `System.run`."""
        started_s = time.perf_counter()
        with ThreadPoolExecutor(concurrency, thread_name_prefix="llama-client") as pool:
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
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        try:
            connection.request(
                "POST", "/completion", json.dumps(request_body(prompt)), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise SystemFailed(f"{prompt.item.name}: {_message(json.loads(response.read()))}")
            return read_answer(prompt.item.name, started_s, events(response))
        finally:
            connection.close()

    def _get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
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
                raise SystemFailed(f"llama-server ended with {self._process.returncode}: {' | '.join(tail)}")
            try:
                if self._get("/health")[0] == http.HTTPStatus.OK:
                    return
            except OSError:
                pass  # not listening yet
            time.sleep(0.1)
        raise SystemFailed(f"llama-server was not healthy after {timeout_s:.0f} s (log: {self.log})")

    def close(self) -> None:
        """End the process: SIGTERM, ten seconds, then SIGKILL to its whole session."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _message(event: dict[str, Any]) -> str:
    error = event.get("error", event)
    words = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(words).split())[:200]
