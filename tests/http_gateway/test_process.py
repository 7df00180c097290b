"""A gateway process whose engines misbehave, with clients that misbehave."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import pytest_asyncio
import trustme

from benchmarks.harness.gateway import start_gateway
from http_gateway.__main__ import GRPC_EXPERIMENTS
from http_gateway.wire.errors import TABLE
from protos.engine.v1 import engine_pb2 as pb
from tests.http_gateway.fake_engine import DONE, FakeEngine, all_serve, ask, begin, chat, close, request, served
from tests.waiting import eventually

KEY, OTHER_KEY = "a-key-of-the-first-client", "a-key-of-the-second-client"
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


class House:
    """Two engines with one model, one with another, and a gateway before the three."""

    def __init__(self, engines: list[FakeEngine], address: str) -> None:
        self.engines, self.address = engines, address

    @property
    def running(self) -> int:
        return sum(engine.running for engine in self.engines)


@asynccontextmanager
async def gateway(addresses: str, *flags: str) -> AsyncIterator[str]:
    """Run a gateway process around the block; yield its address."""
    context = start_gateway(addresses, *flags)
    address = await asyncio.to_thread(context.__enter__)
    try:
        yield address
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)


def process_of(engine: FakeEngine) -> psutil.Process:
    (found,) = [process for process in psutil.Process().children() if engine.address in process.cmdline()]
    return found


@pytest_asyncio.fixture
async def house() -> AsyncIterator[House]:
    losses: list[str] = []
    engines = [FakeEngine(losses=losses), FakeEngine(losses=losses), FakeEngine(("other", "alias"))]
    async with AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(served(engine))
        address = await stack.enter_async_context(gateway(",".join(engine.address for engine in engines)))
        await all_serve(address, len(engines))
        yield House(engines, address)


async def test_engines_and_clients_that_misbehave_change_nothing_for_others(house: House) -> None:
    """One gateway for all of it: a start takes a second."""
    await _statuses_are_mapped(house)
    await _models_choose_engines(house)
    await _adapters_are_models(house)
    await _prompts_go_where_they_begin_alike(house)
    await _clients_that_go_away_are_noticed(house)
    await _large_bodies_are_refused(house)
    await _a_slow_reader_stops_its_own_call(house)
    await _idle_connections_cost_nothing(house)
    await _a_late_error_is_an_event(house)
    await _a_whole_answer_survives_its_engine(house)
    await _an_engine_that_is_gone_gets_nothing(house)
    metrics = (await request(house.address, "/metrics")).body.decode()
    assert 'lockstep_gateway_requests_total{path="/v1/chat/completions",status="499"}' in metrics
    assert "vllm:kv_cache_usage_perc" in metrics


async def _statuses_are_mapped(house: House) -> None:
    for status in (grpc.StatusCode.INTERNAL, *TABLE):
        answer = await chat(house.address, status.name)
        row = TABLE.get(status)
        assert answer.status == (row.status if row else 500), status
        assert set(answer.json["error"]) == {"message", "type", "param", "code"}
        assert ("retry-after" in answer.headers) == bool(row and row.retry)
        assert answer.json["error"]["param"] == ("top_p" if answer.status in (400, 404) else None)
        answer = await request(house.address, MESSAGES, message(status.name))
        wanted = row.status if row else 500
        assert (answer.status, answer.json["type"]) == (529 if wanted == 503 else wanted, "error")
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
        kinds |= {500: "api_error", 529: "overloaded_error", 504: "timeout_error"}
        assert answer.json["error"]["type"] == kinds.get(answer.status, "invalid_request_error")
        assert ("retry-after" in answer.headers) == bool(row and row.retry)
    wrong = {
        MESSAGES: message("x", max_tokns=1),
        f"{MESSAGES}/count_tokens": message("x"),
        f"{MESSAGES}/batches": {},
    }
    said = {path: (await request(house.address, path, body)) for path, body in wrong.items()}
    assert [(answer.status, answer.json["error"]["type"]) for answer in said.values()] == [
        *2 * [(400, "invalid_request_error")],
        (404, "not_found_error"),
    ]
    assert said[MESSAGES].json["error"]["message"] == "max_tokns: is unknown; did you mean max_tokens?"


async def _models_choose_engines(house: House) -> None:
    before = len(house.engines[2].requests)
    assert (await chat(house.address, model="alias")).json["model"] == "alias"
    assert len(house.engines[2].requests) == before + 1
    missing = await chat(house.address, model="none")
    assert (missing.status, missing.json["error"]["code"]) == (404, "model_not_found")
    listed = (await request(house.address, "/v1/models")).json["data"]
    assert [model["id"] for model in listed] == ["fake", "other", "alias"]
    assert (await request(house.address, "/v1/models/other")).json["id"] == "other"
    assert (await request(house.address, "/v1/models/none")).status == 404


async def _adapters_are_models(house: House) -> None:
    first, second, third = house.engines
    second.adapters["sql"] = pb.Adapter(name="sql", kind=pb.Adapter.KIND_LORA, path="/a/sql", size=8)
    third.adapters["who"] = pb.Adapter(name="who", kind=pb.Adapter.KIND_PROMPT, path="/a/who", size=5)
    listed = {model["id"]: model for model in (await request(house.address, "/v1/models")).json["data"]}
    assert list(listed) == ["fake", "other", "alias", "sql", "who"]
    assert [listed[name]["parent"] for name in listed] == [None, None, None, "fake", "other"]
    assert (await request(house.address, "/v1/models/who")).json == listed["who"]
    assert listed["sql"]["root"] == "/a/sql"
    for _ in range(2):
        assert (await chat(house.address, model="sql")).json["model"] == "sql"
        assert (second.requests[-1].lora, second.requests[-1].prompt_adapter) == ("sql", "")
    assert (await request(house.address, "/v1/completions", {"prompt": "x", "model": "who"})).status == 200
    assert (third.requests[-1].lora, third.requests[-1].prompt_adapter) == ("", "who")
    assert (await request(house.address, "/v1/responses", {"input": "x", "model": "sql"})).json["model"] == "sql"

    # Loaded without the gateway, moved to another engine, and unloaded.
    first.adapters["new"] = pb.Adapter(name="new", kind=pb.Adapter.KIND_LORA)
    assert (await chat(house.address, model="new")).status == 200
    second.adapters["new"] = first.adapters.pop("new")
    assert (await chat(house.address, model="new")).status == 200
    assert second.requests[-1].lora == "new"
    refused = await chat(house.address, "INVALID_ARGUMENT", model="new")
    assert (refused.status, refused.json["error"]["param"]) == (400, "top_p")
    second.refused = "new"
    kept = (await chat(house.address, model="new")).json["error"]
    assert (kept["param"], kept["message"]) == ("model", "model: is for no beam search")
    second.refused = ""
    second.adapters.clear()
    third.adapters.clear()
    for path, body in ((CHAT, ask(model="sql")), ("/v1/completions", {"prompt": "x", "model": "new"})):
        gone = await request(house.address, path, body)
        error = gone.json["error"]
        assert (gone.status, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert "these are: fake, other, alias" in error["message"]
    assert (await request(house.address, "/v1/models/sql")).status == 404
    assert (await chat(house.address, model="fake")).status == 200


async def _prompts_go_where_they_begin_alike(house: House) -> None:
    async def ask_all(topic: str) -> list[int]:
        before = [len(engine.requests) for engine in house.engines[:2]]
        for turn in range(4):
            assert (await chat(house.address, f"{topic}:{'long ' * 200}{turn}", model="fake")).status == 200
        return [len(engine.requests) - b for engine, b in zip(house.engines, before, strict=False)]

    for topic in ("cats", "dogs"):
        assert sorted(await ask_all(topic)) == [0, 4]


async def _clients_that_go_away_are_noticed(house: House) -> None:
    streamed = await begin(house.address, CHAT, ask("hang", stream=True))
    whole = asyncio.create_task(begin(house.address, CHAT, ask("hang")))
    await eventually(lambda: house.running == 2)
    await close(streamed.writer)
    await eventually(lambda: house.running == 1)
    whole.cancel()
    with suppress(asyncio.CancelledError):
        await whole
    host, _, port = house.address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    await close(writer)  # nor does one that says nothing disturb
    await eventually(lambda: house.running == 0, 40)


async def _large_bodies_are_refused(house: House) -> None:
    large = json.dumps(ask("x" * (10 << 20))).encode()
    assert (await request(house.address, CHAT, large)).status == 413
    pieces = b"".join(b"10000\r\n" + large[i : i + 65536].ljust(65536) + b"\r\n" for i in range(0, len(large), 65536))
    assert (await request(house.address, CHAT, pieces + b"0\r\n\r\n", {"Transfer-Encoding": "chunked"})).status == 413
    assert (await chat(house.address)).status == 200


async def _a_slow_reader_stops_its_own_call(house: House) -> None:
    slow = await begin(house.address, CHAT, ask("flood", stream=True, model="fake"))
    sent = -1
    async with asyncio.timeout(60):
        while sent != (sent := sum(engine.sent for engine in house.engines)):  # until the windows are full
            await asyncio.sleep(0.5)
            assert (await chat(house.address, model="fake")).status == 200
    assert sent < 5000, "50 MB are somewhere"
    await close(slow.writer)
    await eventually(lambda: house.running == 0)


async def _idle_connections_cost_nothing(house: House) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    host, _, port = house.address.rpartition(":")
    idle = await asyncio.gather(*(asyncio.open_connection(host, int(port)) for _ in range(1000)))
    for _ in range(3):
        assert (await chat(house.address)).status == 200
    for _, writer in idle:
        await close(writer)


def message(content: str, **fields: Any) -> dict[str, Any]:
    """Return a body of Anthropic's API."""
    return {"model": "fake", "max_tokens": 9, "messages": [{"role": "user", "content": content}]} | fields


async def _a_late_error_is_an_event(house: House) -> None:
    answer = await request(house.address, MESSAGES, message("late error", stream=True))
    named = [event.split("\n") for event in answer.body.decode().split("\n\n")[:-1]]
    events = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in named]
    assert [name for name, _ in events] == [data["type"] for _, data in events]
    kinds = ["message_start", "ping", "content_block_start", "content_block_delta", "error"]
    assert [name for name, _ in events] == kinds
    assert events[0][1]["message"]["usage"]["input_tokens"] == 1
    assert events[-1][1]["error"] == {"type": "api_error", "message": "a defect"}
    answer = await chat(house.address, "late error", stream=True)
    assert answer.status == 200
    events = [json.loads(line[6:]) for line in answer.body.decode().split("\n\n")[:-2]]
    assert events[-1]["error"]["message"] == "a defect"
    assert answer.body.endswith(b"data: [DONE]\n\n")


async def _a_whole_answer_survives_its_engine(house: House) -> None:
    first, second, _ = house.engines
    bodies = {CHAT: ask("lost", model="fake"), "/v1/responses": {"input": "lost", "model": "fake"}}
    bodies[MESSAGES] = message("lost")
    for path, body in bodies.items():
        before = [len(engine.requests) for engine in (first, second)]
        first.losses.append("the engine that is asked first")
        assert (await request(house.address, path, body)).status == 200
        assert [len(engine.requests) for engine in (first, second)] == [count + 1 for count in before]
    first.losses.append("the engine that streams")
    streamed = await chat(house.address, "lost", model="fake", stream=True)
    events = [json.loads(line[6:]) for line in streamed.body.decode().split("\n\n")[:-2]]
    assert [events[-1]["error"][name] for name in ("code", "message")] == ["unavailable", "Socket closed"]
    first.losses += ["one", "and the other"]
    lost = await chat(house.address, "lost", model="fake")
    assert (lost.status, lost.json["error"]["code"]) == (503, "unavailable")
    assert not first.losses


async def _an_engine_that_is_gone_gets_nothing(house: House) -> None:
    await house.engines[0].set_serving(False)
    before = len(house.engines[0].requests)
    async with asyncio.timeout(60):
        while True:
            answers = [await chat(house.address, f"{i}", model="fake") for i in range(4)]
            assert {answer.status for answer in answers} == {200}
            if len(house.engines[0].requests) == before:
                break
            before = len(house.engines[0].requests)
    await house.engines[1].set_serving(False)
    async with asyncio.timeout(60):
        while (none := await chat(house.address, model="fake")).status != 503:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert "it is starting or closing" in none.json["error"]["message"]
    assert (await request(house.address, "/health")).status == 200  # the third one serves


async def test_a_gateway_that_is_killed_or_stopped_frees_its_calls() -> None:
    async with served(FakeEngine()) as engine:
        async with gateway(engine.address) as address:
            process = process_of(engine)
            await all_serve(address, 1)
            slow = asyncio.create_task(chat(address, "slow"))
            await eventually(lambda: engine.running == 1)
        # SIGTERM: the answer ended, then the process.
        assert (await slow).json["choices"][0]["message"]["content"] == "yes"
        assert not process.is_running()

        async def killed() -> None:
            async with gateway(engine.address) as address:
                await all_serve(address, 1)
                hanging = await begin(address, CHAT, ask("hang", stream=True))
                process_of(engine).kill()
                await eventually(lambda: engine.running == 0)
                await close(hanging.writer)

        with pytest.raises(Exception, match="the gateway ended with -9"):
            await killed()


async def test_keys_and_certificates_are_asked_for(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate, mine = authority.issue_cert("127.0.0.1"), authority.issue_cert("client")
    files = {name: tmp_path / name for name in ("cert", "key", "ca", "keys")}
    certificate.cert_chain_pems[0].write_to_path(files["cert"])
    certificate.private_key_pem.write_to_path(files["key"])
    authority.cert_pem.write_to_path(files["ca"])
    files["keys"].write_text(f"{KEY}\n")
    flags: list[str] = ["--forward-keys", "true", "--engine-token-file", str(files["keys"])]
    names = (("--tls-cert", "cert"), ("--tls-key", "key"), ("--tls-client-ca", "ca"), ("--api-key-file", "keys"))
    flags += [word for flag, name in names for word in (flag, str(files[name]))]
    with_certificate = ssl.create_default_context()
    authority.configure_trust(with_certificate)
    mine.configure_cert(with_certificate)
    without = ssl.create_default_context()
    authority.configure_trust(without)

    async with served(FakeEngine()) as engine, gateway(engine.address, *flags) as address:

        async def status(key: str | None, tls: Any = with_certificate, path: str = CHAT) -> int:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            body = ask() if path == CHAT else None
            return (await request(address, path, body, headers, tls)).status

        async def status_of_message(*keys: str, header: str = "x-api-key") -> tuple[int, Any]:
            headers = {header: "\r\nx-api-key: ".join(keys)} if keys else {}
            answer = await request(address, MESSAGES, message("x"), headers, with_certificate)
            return answer.status, answer.json.get("error", {}).get("type")

        async def until_served(key: str) -> None:
            async with asyncio.timeout(60):
                while await status(key) != 200:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.05)

        await until_served(KEY)
        assert [await status(None), await status("wrong"), await status(KEY)] == [401, 401, 200]
        assert engine.metadata[-1]["authorization"] == f"Bearer {KEY}"
        unknown = (401, "authentication_error")
        assert [await status_of_message(), await status_of_message("wrong")] == [unknown] * 2
        assert await status_of_message(KEY, KEY) == unknown
        assert await status_of_message(f"Bearer {KEY}", header="Authorization") == (200, None)
        assert await status_of_message(KEY) == (200, None)
        assert engine.metadata[-1]["authorization"] == f"Bearer {KEY}"
        assert [await status(None, path=path) for path in ("/health", "/", "/metrics")] == [200, 200, 401]
        with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
            await status(KEY, without)
        files["keys"].write_text(f"{OTHER_KEY}\n")
        await until_served(OTHER_KEY)
        assert await status(KEY) == 401


def test_grpc_knows_the_poller_that_the_gateway_chooses() -> None:
    """An experiment that a release of gRPC has dropped would be ignored, with a line in every gateway's log."""

    def told(experiments: str) -> str:
        program = "import grpc; grpc.insecure_channel('unix:/nowhere').close()"
        environment = {**os.environ, "GRPC_EXPERIMENTS": experiments}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        return done.stderr

    assert "Unknown experiment: no_such" in told("-no_such")
    assert "Unknown experiment" not in told(GRPC_EXPERIMENTS)


class PacedEngine(FakeEngine):
    """Streams `MESSAGES` responses to every prompt, with a pause after each."""

    MESSAGES = 200

    async def _answer(self, prompt: str, context: Any) -> None:
        for _ in range(self.MESSAGES):
            await context.write(pb.GenerateResponse(text="y"))
            await asyncio.sleep(0.003)
        await context.write(DONE)


def poller_switches(pid: int) -> int:
    """Return how often the threads of gRPC's newer poller have gone to sleep; they are called event_engine."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        fields = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
        if fields["Name"].strip() == "event_engine":
            total += int(fields["voluntary_ctxt_switches"])
    return total


async def switches_of_a_stream() -> float:
    """Return `poller_switches` of a gateway for each message of a stream."""
    async with served(PacedEngine()) as engine, gateway(engine.address) as address:
        pid = process_of(engine).pid
        assert (await chat(address, stream=True)).status == 200
        before = poller_switches(pid)
        assert (await chat(address, stream=True)).status == 200
        return (poller_switches(pid) - before) / PacedEngine.MESSAGES


@pytest.mark.slow
async def test_a_message_of_a_stream_wakes_no_thread_of_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """With gRPC's newer poller it wakes three. The gateway chooses the older one, unless the variable is set."""
    monkeypatch.delenv("GRPC_EXPERIMENTS", raising=False)
    chosen = await switches_of_a_stream()
    monkeypatch.setenv("GRPC_EXPERIMENTS", "event_engine_client")
    newer = await switches_of_a_stream()
    assert newer > 1.5, "gRPC's newer poller costs less now: the choice may be needless"
    assert chosen < newer / 3, "the choice has no effect"
