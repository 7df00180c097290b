"""vLLM's OpenAI-compatible server as a peer, in its own Python: what its users run.

The peer of foreign.py drives the same engine without a server. On a machine with few cores the server's share shows.
Not responsible for: installing vLLM (see benchmarks/README.md); the process and HTTP (see server_peer.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import Answer
from benchmarks.harness.server import free_port
from benchmarks.harness.systems import Prompt, SystemFailed
from benchmarks.peers.foreign import vllm_environment
from benchmarks.peers.server_peer import CONTEXT, ServerPeer

_MODEL = "model"
"""The name that requests give."""


class VllmServer(ServerPeer):
    """vLLM's API server on `directory`, greedy, with its structured outputs and without a prefix cache."""

    path = "/v1/completions"

    def __init__(self, python: Path, directory: Path, *, dtype: str, num_threads: int, batch: int) -> None:
        port = free_port()
        # fmt: off
        argv = [
            str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory.absolute()),
            "--served-model-name", _MODEL, "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype,
            "--max-model-len", str(CONTEXT), "--max-num-seqs", str(batch), "--no-enable-prefix-caching",
            "--disable-log-stats", "--disable-uvicorn-access-log", *self.arguments(),
        ]
        # fmt: on
        super().__init__(
            "vllm server",
            argv,
            port,
            settings=f"{dtype}, {num_threads} threads, structured outputs as installed, without prefix cache, HTTP",
            start_s=300.0,
            environment=vllm_environment(python, num_threads) | self.variables(),
        )

    def arguments(self) -> list[str]:
        """Return further arguments of the server."""
        return []

    def variables(self) -> dict[str, str]:
        """Return further environment variables of the server."""
        return {}

    def build(self) -> str:
        """See `ServerPeer.build`."""
        return f"vllm {json.loads(self.get('/version')[1])['version']}"

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """See `request_body`."""
        return request_body(prompt)

    def answer(self, prompt: Prompt, started_s: float, pieces: Iterable[dict[str, Any]]) -> Answer:
        """See `read_answer`."""
        return read_answer(prompt.item.name, started_s, pieces)


def request_body(prompt: Prompt) -> dict[str, Any]:
    """Return the body of `POST /v1/completions`: greedy, streamed with token ids, the prompt as token ids."""
    body: dict[str, Any] = {
        "model": _MODEL,
        "prompt": list(prompt.token_ids),
        "max_tokens": prompt.item.max_tokens,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }
    if prompt.item.schema is not None:
        body["structured_outputs"] = {"json": json.loads(prompt.item.schema)}
    return body


def read_answer(name: str, started_s: float, pieces: Iterable[dict[str, Any]]) -> Answer:
    """Return the answer that the events of one request make; a piece with tokens counts as a step.

    Raises:
        SystemFailed: the stream ended without a finish reason.

    """
    text: list[str] = []
    token_ids: list[int] = []
    arrivals: list[float] = []
    finish: str | None = None
    for event in pieces:
        for choice in event["choices"]:
            text.append(choice["text"])
            if choice.get("token_ids"):
                arrivals.append(time.perf_counter())
                token_ids += choice["token_ids"]
            finish = choice["finish_reason"] or finish
    if finish is None:
        raise SystemFailed(f"{name}: the stream ended early")
    now_s = time.perf_counter()
    return Answer(
        name=name,
        text="".join(text),
        token_ids=tuple(token_ids),
        finish=finish,
        started_s=started_s,
        first_s=arrivals[0] if arrivals else now_s,
        last_s=arrivals[-1] if arrivals else now_s,
        steps=max(len(arrivals), 1),
    )
