"""SIGKILL of one of two engines of a gateway, under load: what was sent is not repeated, and nothing else is lost.

Real engines with tiny models, a real gateway process. Not responsible for: engines that refuse or misbehave (see
test_process.py).
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.gateway import start_gateway
from gpu_engine.api.config import ServerConfig
from tests.gpu_engine import tiny
from tests.gpu_engine.extensions.transfer.processes import server_process
from tests.gpu_engine.harness import config
from tests.http_gateway.fake_engine import all_serve, request
from tests.rpc_client import Client

ROUNDS = 12
LOAD, TOKENS = 8, 440
BOUND_S = 60.0
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tiny.save(tiny.FAMILIES["llama"](), tmp_path_factory.mktemp("killed"), rounds=True)
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    return str(folder)


def address_of(folder: Path, name: str) -> str:
    return f"unix:{folder}/{name}"


@asynccontextmanager
async def engine(model: str, folder: Path, name: str) -> AsyncIterator[Any]:
    settings = config(model=model, max_model_len=512, max_batch_size=LOAD, num_draft_tokens=3)
    server = ServerConfig(listen=address_of(folder, name), grammar="none")
    with server_process(settings, server, f"{folder}/{name}.log") as process:
        yield process


def body(path: str, number: int, *, stream: bool) -> dict[str, Any]:
    """Return a request whose answer depends only on `number`, and takes some tenths of a second."""
    text = f"request {number % 4}"
    fields: dict[str, Any] = {"temperature": 0.0, "stream": stream}
    if path == "/v1/responses":
        return {"input": text, "max_output_tokens": TOKENS, "ignore_eos": True, **fields}
    prompt: dict[str, Any] = {"prompt": text}
    if path == "/v1/chat/completions":
        prompt = {"messages": [{"role": "user", "content": text}]}
    return {**prompt, "max_tokens": TOKENS, "ignore_eos": True, **fields}


@dataclass
class Outcome:
    text: str
    error: dict[str, Any] | None = None
    """Of a stream: its last event."""


def whole_text(path: str, answer: dict[str, Any]) -> str:
    if path == "/v1/responses":
        return str(answer["output"][0]["content"][0]["text"])
    (choice,) = answer["choices"]
    return str(choice["text"] if path == "/v1/completions" else choice["message"]["content"])


def streamed(path: str, data: bytes) -> Outcome:
    found = Outcome("")
    lines = [line[6:] for line in data.decode().splitlines() if line.startswith("data: ")]
    for line in lines:
        if line == "[DONE]":
            continue
        event = json.loads(line)
        assert found.error is None, "an error is the last event"
        if "error" in event or event.get("type") == "error":
            found.error = event.get("error", event)
        elif path == "/v1/responses":
            found.text += event["delta"] if event["type"] == "response.output_text.delta" else ""
        else:
            for choice in event["choices"]:
                found.text += choice["text"] if path == "/v1/completions" else choice["delta"].get("content") or ""
    return found


async def ask(gateway: str, path: str, number: int, *, stream: bool) -> Outcome:
    """Return what a client has in the end. Every status but 200 fails the test."""
    answer = await request(gateway, path, body(path, number, stream=stream))
    assert answer.status == 200, answer.body
    return streamed(path, answer.body) if stream else Outcome(whole_text(path, answer.json))


async def running_on(address: str) -> int:
    async with Client(address) as client:
        return (await client.stats()).running


async def test_what_was_not_sent_goes_to_the_other_engine(model: str, tmp_path: Path) -> None:
    chance, cut, moved = random.Random(3), 0, 0
    names = ["a", "b"]
    async with AsyncExitStack() as stack:
        started = {name: await stack.enter_async_context(engine(model, tmp_path, name)) for name in names}
        context = start_gateway(",".join(address_of(tmp_path, name) for name in names), "--log-level", "info")
        gateway = await asyncio.to_thread(context.__enter__)
        stack.push_async_callback(asyncio.to_thread, context.__exit__, None, None, None)
        await all_serve(gateway, 2)
        expected = {
            (path, number): (await ask(gateway, path, number, stream=False)).text
            for path in PATHS
            for number in range(4)
        }
        for number in range(ROUNDS):
            # Equal prompts go to one engine, so each prompt has a stream and a whole answer.
            asked = [(PATHS[at % 3], at % 4, at // 4 % 2 == 0) for at in range(number, number + LOAD)]
            answers = [asyncio.create_task(ask(gateway, path, n, stream=stream)) for path, n, stream in asked]
            await asyncio.sleep(chance.uniform(0.0, 0.4))
            killed = names[number % 2]
            moved += await running_on(address_of(tmp_path, killed))
            started[killed].kill()
            await asyncio.to_thread(started[killed].join, BOUND_S)
            async with asyncio.timeout(BOUND_S):
                found = await asyncio.gather(*answers)
            for (path, n, stream), outcome in zip(asked, found, strict=True):
                want = expected[path, n]
                if outcome.error is None:
                    assert outcome.text == want, (number, path, stream)
                    continue
                assert stream, "a whole answer was not sent, and is not lost"
                assert outcome.error["code"] == "unavailable", outcome.error
                assert want.startswith(outcome.text), (number, path)
                cut += 1
            started[killed] = await stack.enter_async_context(engine(model, tmp_path, killed))
            await all_serve(gateway, 2)
    assert cut, "no round cut a stream"
    assert moved > cut, "no round killed an engine with a whole answer"
