"""Random requests of every kind for a soak, and the outcomes that each kind may have.

Invariant: a seed gives the same requests in the same order; every kind names the gRPC statuses that its calls may end
with, and every other one is a finding.
Not responsible for: how many run at a time, and faults (see soak.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import random
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc

from benchmarks.faults.attacks import distinct_schema, hostile_grammars
from benchmarks.harness.client import make_call
from benchmarks.harness.workloads import Item, workload
from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc

OK = frozenset({"OK"})
BUSY = frozenset({"RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"})
ADAPTER = "child"
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request: how likely it is, and the statuses with which it may end."""

    weight: int
    allowed: frozenset[str]


KINDS = {
    "schema": Kind(6, OK),
    "free": Kind(4, OK),
    "regex": Kind(2, OK),
    "choice": Kind(2, OK),
    "lark": Kind(2, OK),
    "ebnf": Kind(1, OK),
    "several": Kind(2, OK),
    "beams": Kind(1, OK),
    "logprobs": Kind(1, OK),
    "penalties": Kind(1, OK),
    "stop": Kind(1, OK),
    "long": Kind(1, OK),
    "adapter": Kind(2, OK),
    "compile": Kind(2, OK | BUSY),
    "hostile": Kind(1, OK | BUSY | {"INVALID_ARGUMENT", "UNAVAILABLE"}),
    "invalid": Kind(1, frozenset({"INVALID_ARGUMENT"})),
    "late": Kind(1, OK | {"DEADLINE_EXCEEDED"}),
    "left": Kind(3, frozenset({"OK", "CANCELLED"})),
    "aborted": Kind(2, OK),
    "http": Kind(2, OK),
    "http left": Kind(1, OK),
}
"""A hostile grammar that ends several grammar processes is refused with UNAVAILABLE, by name."""

LEAST_GUIDED = 24
"""The fewest max_tokens of a request with a grammar: the server refuses fewer than the shortest answer has."""
GRAMMARS = {
    "regex": pb.Grammar(regex="[A-Z][a-z]{2,9}( [a-z]{1,8}){1,6}\\."),
    "choice": pb.Grammar(choice=pb.Choice(choices=["red", "green", "blue", "a colour that is none of these"])),
    "lark": pb.Grammar(lark='start: "The answer is " /[a-z]{2,12}/ "."'),
    "ebnf": pb.Grammar(ebnf='root ::= "yes" | "no" | "maybe " [0-9]+'),
}
"""Of these kinds, next to the workload's schemas."""
_INVALID = (
    lambda: pb.GenerateRequest(text=""),
    lambda: pb.GenerateRequest(text="a", sampling=pb.SamplingParams(temperature=-1.0)),
    lambda: pb.GenerateRequest(text="a", sampling=pb.SamplingParams(top_p=7.0)),
    lambda: pb.GenerateRequest(text="a", grammar=pb.Grammar(regex="(")),
    lambda: pb.GenerateRequest(text="a", grammar=pb.Grammar(json_schema="{")),
    lambda: pb.GenerateRequest(text="a", lora="no such adapter"),
    lambda: pb.GenerateRequest(token_ids=pb.TokenIds(ids=[4_000_000_000])),
)


class Traffic:
    """One client of every kind of request.

    Args:
        stub: of the engine.
        http_address: "host:port" of OpenAI's HTTP API.
        model: a name that it serves.
        seed: of all choices.
    """

    def __init__(self, stub: engine_pb2_grpc.EngineAsyncStub, http_address: str, model: str, seed: int) -> None:
        self._stub, self._http, self._model = stub, http_address, model
        self._random = random.Random(seed)
        self._guided: list[Item] = workload("schema", max_tokens=64)
        self._chat: list[Item] = workload("chat", max_tokens=48)
        self._hostile = list(hostile_grammars().values())
        self._numbers = iter(range(1 << 30))

    async def one(self) -> tuple[str, str]:
        """Send one random request to its end; return its kind and status."""
        kind = self._random.choices(list(KINDS), [each.weight for each in KINDS.values()])[0]
        return kind, await self.send(kind)

    async def send(self, kind: str) -> str:
        """Send one request of `kind` to its end; return its status of gRPC, or what went wrong over HTTP."""
        special: dict[str, Callable[[], Awaitable[None]]] = {
            "compile": self._compile,
            "left": self._leave,
            "aborted": self._abort,
            "http": lambda: self._ask_http(leave=False),
            "http left": lambda: self._ask_http(leave=True),
        }
        try:
            if kind in special:
                await special[kind]()
            else:
                await self._drain(self.request(kind), 0.05 if kind == "late" else TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
        except OSError as error:
            return f"HTTP: {type(error).__name__}"
        return "OK"

    def request(self, kind: str) -> pb.GenerateRequest:
        """Return a request of `kind` with random prompt, seed, K and temperature."""
        draw = self._random
        if kind == "invalid":
            return draw.choice(_INVALID)()
        guided = kind in ("schema", "beams", "left", "late", "adapter") and draw.random() < 0.7
        has_grammar = guided or kind in GRAMMARS or kind == "hostile"
        sampling = pb.SamplingParams(
            max_tokens=draw.randrange(LEAST_GUIDED if has_grammar else 4, 64),
            temperature=draw.choice((0.0, 0.8)),
            seed=draw.randrange(1 << 32),
        )
        item = draw.choice(self._guided if guided else self._chat)
        request = make_call(
            "", item.messages, schema=item.schema, sampling=sampling, num_draft_tokens=draw.choice((0, 3, 7))
        ).request
        if kind in GRAMMARS:
            request.grammar.CopyFrom(GRAMMARS[kind])
        elif kind == "hostile":
            request.grammar.CopyFrom(draw.choice(self._hostile))
        elif kind == "several":
            sampling.n, sampling.temperature = draw.randrange(2, 5), 0.8
        elif kind == "beams":
            request.beam_search.beam_width = draw.randrange(2, 5)
            request.ClearField("speculation")
            sampling = pb.SamplingParams(max_tokens=sampling.max_tokens)
        elif kind == "logprobs":
            sampling.logprobs = draw.randrange(1, 6)
        elif kind == "penalties":
            sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty = 1.2, 0.5, 0.3
        elif kind == "stop":
            sampling.stop.extend((".", "\n"))
        elif kind == "long":
            words = " ".join(
                draw.choice(("river", "mountain", "city", "1848", "the", "of")) for _ in range(draw.randrange(200, 900))
            )
            request.text = words
        elif kind == "adapter":
            request.lora = ADAPTER
        request.sampling.CopyFrom(sampling)
        return request

    async def _drain(self, request: pb.GenerateRequest, timeout_s: float) -> None:
        async for _ in self._stub.Generate(request, timeout=timeout_s):
            pass

    async def _compile(self) -> None:
        schema = distinct_schema(next(self._numbers))
        await self._stub.Compile(pb.CompileRequest(grammar=pb.Grammar(json_schema=schema)), timeout=TIMEOUT_S)

    async def _leave(self) -> None:
        call = self._stub.Generate(self.request("left"), timeout=TIMEOUT_S)
        after = self._random.randrange(4)
        with contextlib.suppress(asyncio.CancelledError):
            async for _ in call:
                after -= 1
                if after < 0:
                    call.cancel()

    async def _abort(self) -> None:
        request = self.request("free")
        request.request_id = uuid.UUID(int=self._random.getrandbits(128)).hex
        call = self._stub.Generate(request, timeout=TIMEOUT_S)
        async for _ in call:
            await self._stub.Abort(pb.AbortRequest(request_id=request.request_id), timeout=TIMEOUT_S)

    async def _ask_http(self, leave: bool) -> None:
        item = self._random.choice(self._guided)
        assert item.schema is not None
        body = {
            "model": self._model,
            "messages": [{"role": role, "content": content} for role, content in item.messages],
            "max_tokens": 48,
            "stream": leave or self._random.random() < 0.5,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": json.loads(item.schema)},
            },
        }
        await asyncio.to_thread(_post, self._http, json.dumps(body), 200 if leave else 0)


def _post(address: str, body: str, leave_after: int) -> None:
    # Raises OSError for a connection that broke, and for an answer that is not 200.
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    try:
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read(leave_after or None)
        if answer.status != http.client.OK:
            raise ConnectionError(f"{answer.status}: {text[:200]!r}")
    finally:
        connection.close()
