"""`function_calls` makes OpenAI's functions of the data, judges every call, and fails exactly when one is wrong."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quality import function_calls
from benchmarks.quality.function_prompts import CATEGORIES, read_prompts

COUNT = {
    "type": "dict",
    "properties": {"n": {"type": "integer", "description": "How many.", "default": 1}},
    "required": ["n"],
}


def entry(category: str, number: int) -> dict[str, Any]:
    functions = [{"name": f"{category}.f{i}", "description": "Counts.", "parameters": COUNT} for i in range(2)]
    question = [[{"role": "user", "content": f"Count {number}."}]]
    return {"id": f"{category}_{number}", "question": question, "function": functions}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a Python next to data of five entries for each category, but one for the last one."""
    folder = tmp_path / "bfcl_eval" / "data"
    folder.mkdir(parents=True)
    for category in CATEGORIES:
        entries = [entry(category, number) for number in range(1 if category == CATEGORIES[-1] else 5)]
        (folder / f"BFCL_v4_{category}.json").write_text("".join(json.dumps(each) + "\n" for each in entries))
    return folder


def test_functions_are_openai_s(data: Path) -> None:
    tool = read_prompts(data, 1)[0].tools[0]
    assert tool["function"]["name"] == "simple_python_f0"
    assert tool["function"]["parameters"] == COUNT | {
        "type": "object", "properties": {"n": {"type": "integer", "description": "How many.", "default": 1}}
    }  # fmt: skip


Reply = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]


@pytest.fixture
def serve() -> Iterator[Callable[[Reply], str]]:
    """Serve chat answers that a function makes from the request; return the address."""
    servers: list[tuple[ThreadingHTTPServer, threading.Thread]] = []

    def start(reply: Reply) -> str:
        class Handler(BaseHTTPRequestHandler):
            def send(self, status: int, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                self.send(200, {"object": "list", "data": [{"id": "m", "object": "model", "created": 1}]})

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.send(*reply(asked))

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        servers.append((server, thread))
        return f"127.0.0.1:{server.server_address[1]}"

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join(10)
        server.server_close()


def answer(
    asked: dict[str, Any], arguments: str, *, finish: str = "tool_calls", tokens: tuple[int, ...] = (1, 2)
) -> Any:
    chosen = asked["tool_choice"]
    name = chosen["function"]["name"] if isinstance(chosen, dict) else asked["tools"][0]["function"]["name"]
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
    if chosen == "auto":
        message, finish = {"role": "assistant", "content": "No."}, "stop"
    accepted = 3 if asked["speculation"]["num_draft_tokens"] else 0
    choice = {"index": 0, "message": message, "finish_reason": finish, "token_ids": list(tokens)}
    choice["telemetry"] = {"accepted_draft_tokens": accepted}
    return {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}


@pytest.fixture
def run(data: Path, tmp_path: Path) -> Callable[..., int]:
    """Run the harness over the data: a Python that finds the package in `tmp_path`."""
    python = tmp_path / "python"
    (data.parent / "__init__.py").touch()
    python.write_text(f"#!/bin/sh\necho {data.parent / '__init__.py'}\n")
    python.chmod(0o755)

    def call(address: str, *flags: str) -> int:
        return function_calls.main(["--bfcl-python", str(python), "--address", address, "--count", "6", *flags])

    return call


def test_calls_that_fit_pass(run: Any, serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[dict[str, Any]] = []

    def reply(body: dict[str, Any]) -> tuple[int, Any]:
        asked.append(body)
        return 200, answer(body, '{"n": 1}')

    assert run(serve(reply), "--choices", "required,named,auto") == 0
    printed = capsys.readouterr().out
    assert "| 6 of 6" in printed
    assert {(body["temperature"], body["speculation"]["num_draft_tokens"]) for body in asked} == set(
        itertools.product((0.0, 0.8), (0, 7))
    )
    assert len({body["seed"] for body in asked}) == 6
    named = [body["tool_choice"] for body in asked if isinstance(body["tool_choice"], dict)]
    assert len(named) == 8
    assert all(choice["function"]["name"].endswith("_f1") for choice in named)


def drafted(body: dict[str, Any]) -> bool:
    return bool(body["speculation"]["num_draft_tokens"])


@pytest.mark.parametrize(
    ("reply", "printed"),
    [
        (lambda body: (200, answer(body, '{"n": "one"}')), "WRONG"),
        (lambda body: (200, answer(body, '{"n": ')), "not JSON"),
        (lambda body: (200, answer(body, '{"n": 1', finish="length")), "CUT"),
        (lambda body: (200, answer(body, '{"n": 1}', tokens=(1, 3 if drafted(body) else 2))), "at token 1 2 became 3"),
        (lambda body: (200, answer(body, '{"n": 2}' if drafted(body) else '{"n": 1}')), "DIFFERS"),
        (lambda body: (200, answer(body | {"tool_choice": "auto"}, "")), "no call, but tool_choice is required"),
        (
            lambda body: (400, {"error": {"message": "tools[0]: too odd"}}),
            "refused 24x the engine's: 400: tools[0]: too",
        ),
        (lambda body: (500, {"error": {"message": "broken"}}), "FAULT"),
    ],
)
def test_a_wrong_answer_fails_and_is_named(
    run: Any, serve: Any, capsys: pytest.CaptureFixture[str], reply: Reply, printed: str
) -> None:
    assert run(serve(reply)) == 1
    assert printed in capsys.readouterr().out


def test_a_function_that_was_not_offered_fails(run: Any, serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def reply(body: dict[str, Any]) -> tuple[int, Any]:
        return 200, answer(body | {"tool_choice": {"function": {"name": "other"}}}, '{"n": 1}')

    assert run(serve(reply)) == 1
    assert "call 0 of 'other': this function was not offered" in capsys.readouterr().out
