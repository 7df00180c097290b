"""llama.cpp's server as a peer: `llama-server` over a GGUF file.

Not responsible for: building llama.cpp (see benchmarks/README.md); the process and HTTP (see server_peer.py).
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
from benchmarks.peers.server_peer import CONTEXT, ServerPeer


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


class LlamaServer(ServerPeer):
    """`llama-server`, greedy, with its own grammar for JSON Schema; `ngram` > 0: draft tokens from the text so far."""

    path = "/completion"

    def __init__(self, binary: Path, gguf: Path, *, num_threads: int, batch: int, ngram: int = 0) -> None:
        port = free_port()
        # fmt: off
        argv = [
            str(binary), "--model", str(gguf.absolute()), "--host", "127.0.0.1", "--port", str(port), "--offline",
            "--threads", str(num_threads), "--threads-batch", str(num_threads),
            "--parallel", str(batch), "--ctx-size", str(batch * CONTEXT),
            "--no-cache-prompt", "--cache-ram", "0",
        ]
        # fmt: on
        if ngram:
            argv += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3"]
            argv += ["--spec-ngram-simple-size-m", str(ngram)]
        super().__init__(
            "llama.cpp server" + (f" + ngram {ngram}" if ngram else ""),
            argv,
            port,
            settings=f"{gguf.name} as it is, {num_threads} threads, {batch} slots, HTTP",
            start_s=60.0,
        )

    def build(self) -> str:
        """See `ServerPeer.build`."""
        return f"llama.cpp {json.loads(self.get('/props')[1])['build_info']}"

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """See `request_body`."""
        return request_body(prompt)

    def answer(self, prompt: Prompt, started_s: float, pieces: Iterable[dict[str, Any]]) -> Answer:
        """See `read_answer`."""
        return read_answer(prompt.item.name, started_s, pieces)
