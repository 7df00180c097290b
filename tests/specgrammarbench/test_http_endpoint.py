"""The HTTP endpoint of SpecGrammarBench over a scripted transport: its fields by dialect, and how answers end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from lockstep_bench.cases import Grammar
from lockstep_bench.endpoint import Ask, Outcome
from lockstep_bench.http_endpoint import HttpEndpoint

SCHEMA = {"type": "integer"}
GRAMMARS = {
    "json": Grammar("json", SCHEMA),
    "regex": Grammar("regex", "a+"),
    "choice": Grammar("choice", ["a", "b"]),
    "ebnf": Grammar("ebnf", 'root ::= "a"', "a"),
}


def event(content: str | None = None, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": content} if content is not None else {}, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice], **more})}\n\n".encode()


class Server:
    """Answers each POST with one status and body, and keeps what was sent."""

    def __init__(self, *pieces: bytes, status: int = 200, owner: str = "somebody") -> None:
        self.pieces, self.status, self.owner = pieces, status, owner
        self.sent: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.keys.append(request.headers.get("authorization"))
        if request.method == "GET":
            if request.url.path == "/version":
                return httpx.Response(200, json={"version": "7.1"})
            return httpx.Response(200, json={"data": [{"id": "small", "owned_by": self.owner}]})
        assert request.url.path == "/v1/chat/completions"
        self.sent.append(json.loads(request.content))
        return httpx.Response(self.status, content=b"".join(self.pieces))

    def endpoint(self, **options: Any) -> HttpEndpoint:
        return HttpEndpoint("http://server/v1/", transport=httpx.MockTransport(self), **options)


@pytest.mark.parametrize(
    ("owner", "server"),
    [("vllm", "vllm 7.1"), ("lockstep", "lockstep 7.1"), ("me", "llama.cpp 7.1"), ("nobody", "openai 7.1")],
)
async def test_the_list_of_models_says_which_dialect_a_server_has(owner: str, server: str) -> None:
    about = await Server(owner=owner).endpoint().about()
    assert (about.server, about.model) == (server, "small")


def fields() -> Iterator[tuple[str, str, dict[str, Any] | None]]:
    named = {"json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}, "type": "json_schema"}
    yield "openai", "json", {"response_format": named}
    for kind in ("regex", "choice", "ebnf"):
        yield "openai", kind, None
    for name in ("vllm", "lockstep"):
        for kind, grammar in GRAMMARS.items():
            yield name, kind, {"structured_outputs": {"grammar" if kind == "ebnf" else kind: grammar.source}}
    yield "llama.cpp", "json", {"response_format": {"type": "json_object", "schema": SCHEMA}}
    yield "llama.cpp", "ebnf", {"grammar": 'root ::= "a"'}
    yield "llama.cpp", "regex", None


@pytest.mark.parametrize(("dialect", "kind", "wanted"), list(fields()))
async def test_each_dialect_has_its_fields_for_a_grammar(
    dialect: str, kind: str, wanted: dict[str, Any] | None
) -> None:
    server = Server(event("a"), event(finish="stop"))
    reply = await server.endpoint(dialect=dialect, model="small").ask(Ask("p", 5, GRAMMARS[kind]))
    if wanted is None:
        assert (reply.outcome, server.sent) == (Outcome.NOT_OFFERED, [])
    else:
        assert reply.done
        assert {name: server.sent[0][name] for name in wanted} == wanted


async def test_a_request_has_what_was_asked() -> None:
    server = Server(event("a"), event(finish="stop"), owner="lockstep")
    endpoint = server.endpoint(api_key="secret")
    await endpoint.about()
    assert endpoint.drafts_by_request
    await endpoint.ask(Ask("p", 5, temperature=0.5, seed=3, drafts=False))
    (body,) = server.sent
    assert body == {
        "model": "small",
        "messages": [{"role": "user", "content": "p"}],
        "max_tokens": 5,
        "temperature": 0.5,
        "seed": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "speculation": {"num_draft_tokens": 0},
    }
    assert set(server.keys) == {"Bearer secret"}


async def test_only_lockstep_is_told_about_drafts() -> None:
    server = Server(event("a"), event(finish="stop"))
    endpoint = server.endpoint(dialect="vllm", model="m")
    await endpoint.ask(Ask("p", 5, drafts=False))
    assert not endpoint.drafts_by_request
    assert "speculation" not in server.sent[0]


USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 9}}\n\n'
ERROR = b'data: {"error": {"message": "no legal token"}}\n\n'
REFUSAL = b'data: {"error": {"message": "no uniqueItems", "code": 400}}\n\n'


@pytest.mark.parametrize(
    ("pieces", "status", "outcome", "text", "finish", "tokens"),
    [
        ((event("a"), event("b"), event(finish="stop"), USAGE, b"data: [DONE]\n\n"), 200, "done", "ab", "stop", 9),
        ((event("a"), event("b", "length"), b": comment\n\n"), 200, "done", "ab", "length", 2),
        ((event("a"),), 200, "failed", "a", "", 0),
        ((event("a"), ERROR), 200, "failed", "a", "", 0),
        ((event(""), REFUSAL), 200, "refused", "", "", 0),
        ((event("a"), REFUSAL), 200, "failed", "a", "", 0),
        ((REFUSAL.replace(b"400", b"500"),), 200, "failed", "", "", 0),
        ((b"data: {no json\n\n",), 200, "failed", "", "", 0),
        ((b'{"error": "maximum"}',), 400, "refused", "", "", 0),
        ((b"",), 422, "refused", "", "", 0),
        ((b"busy",), 429, "failed", "", "", 0),
        ((b"",), 500, "failed", "", "", 0),
    ],
)
async def test_how_an_answer_ends(
    pieces: tuple[bytes, ...], status: int, outcome: str, text: str, finish: str, tokens: int
) -> None:
    reply = await Server(*pieces, status=status).endpoint(model="m", dialect="openai").ask(Ask("p", 5))
    assert (reply.outcome.value, reply.text, reply.finish, reply.tokens) == (outcome, text, finish, tokens)
    assert bool(reply.detail) == (outcome != "done")
    assert len(reply.arrivals) == len(text)


async def test_no_connection_is_used_twice() -> None:
    body = event("a") + event(finish="stop")
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        await reader.read()  # until the client closes; a second request would get no answer
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        endpoint = HttpEndpoint(f"http://127.0.0.1:{port}", dialect="openai", model="m", timeout_s=5.0)
        replies = [await endpoint.ask(Ask("p", 5)) for _ in range(3)]
        await endpoint.aclose()
        for writer in writers:
            await writer.wait_closed()
    assert [reply.done for reply in replies] == [True] * 3
    assert len(writers) == 3


async def test_a_server_that_is_not_there_is_a_failure_and_no_exception() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    endpoint = HttpEndpoint("http://server", dialect="openai", model="m", transport=httpx.MockTransport(refuse))
    reply = await endpoint.ask(Ask("p", 5))
    assert (reply.outcome, reply.detail) == (Outcome.FAILED, "ConnectError: refused")
    with pytest.raises(ConnectionError, match="http://server/v1/models: refused"):
        await endpoint.about()
