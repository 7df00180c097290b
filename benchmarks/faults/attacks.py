"""Attacks on a server while its steady streams are measured: floods of schemas, hostile grammars, kills.

Invariant: an attack is an async context and ends with it; it counts its requests and the server's answers, and never
fails a run by itself.
Not responsible for: the streams and their evaluation (see isolation.py).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc
from service_runtime.parent_death import dying_with_us

Outcomes = collections.Counter[str]
"""gRPC status name, or what was done -> how often."""

Attack = Callable[["Target", Outcomes], Coroutine[None, None, None]]
"""Runs until cancelled."""

_BURN = "from grammar_service.compile.worker import lower_priority\nlower_priority({nice})\nwhile True: pass"
"""Code of a process that computes and touches no memory."""


class Target:
    """The server under attack: its address and the process id of the engine, when it is a child of ours."""

    def __init__(self, address: str, pid: int | None) -> None:
        self.address, self.pid = address, pid

    def __repr__(self) -> str:
        return f"<Target {self.address} pid={self.pid}>"

    def sidecar_pid(self) -> int | None:
        """Return the grammar process that the engine has spawned; None while there is none."""
        return next(iter(_children(self.pid)), None) if self.pid else None


def _children(parent: int) -> Iterator[int]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):  # a process may end while it is looked at
            fields = stat.read_text().rpartition(")")[2].split()
            pid = int(stat.parent.name)
            if int(fields[1]) == parent and b"grammar_service" in (stat.parent / "cmdline").read_bytes():
                yield pid


@asynccontextmanager
async def under(attack: Attack | None, target: Target) -> AsyncIterator[Outcomes]:
    """Run `attack` for as long as the context lasts; yield its counts."""
    outcomes: Outcomes = collections.Counter()
    task = asyncio.create_task(attack(target, outcomes), name="attack") if attack else None
    try:
        yield outcomes
    finally:
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def flood(per_second: float) -> Attack:
    """Return an attack of distinct schemas, each to be compiled, at a fixed rate whatever the answers are."""

    async def attack(target: Target, outcomes: Outcomes) -> None:
        async with _open_loop(target, outcomes, per_second) as (stub, launch):
            number = 0
            while True:
                request = pb.CompileRequest(grammar=pb.Grammar(json_schema=distinct_schema(number)))
                await launch(_compile(stub, request, outcomes))
                number += 1

    return attack


def hostile(per_second: float, *, guided: bool = True) -> Attack:
    """Return an attack of short requests whose grammars are hostile in turn; the control has the same without them."""
    grammars = list(hostile_grammars().values())

    async def attack(target: Target, outcomes: Outcomes) -> None:
        async with _open_loop(target, outcomes, per_second) as (stub, launch):
            number = 0
            while True:
                request = pb.GenerateRequest(
                    text="Answer:", sampling=pb.SamplingParams(max_tokens=4, temperature=0.0, seed=number)
                )
                if guided:
                    request.grammar.CopyFrom(salted(grammars[number % len(grammars)], number))
                await launch(_generate(stub, request, outcomes))
                number += 1

    return attack


FLOODER, BYSTANDER = "a-token-of-the-flooding-tenant", "a-token-of-the-steady-tenant"
TENANTS = f"""
[tenants.steady]
tokens = ["{BYSTANDER}"]
operator = true
[tenants.flood]
tokens = ["{FLOODER}"]
max_running = 1
max_waiting = 4
tokens_per_minute = 600
max_compilations = 1
max_waiting_compilations = 2
"""
"""The tenants of a server whose one tenant floods: the steady one has the default limits, and reads the statistics."""


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a tenant's calls."""
    return (("authorization", f"Bearer {token}"),)


def tenant(per_second: float) -> Attack:
    """Return an attack of one tenant: guided requests with a schema each, and schemas to be compiled, in turn."""

    async def attack(target: Target, outcomes: Outcomes) -> None:
        mine = bearer(FLOODER)
        async with _open_loop(target, outcomes, per_second) as (stub, launch):
            number = 0
            while True:
                grammar = pb.Grammar(json_schema=distinct_schema(number))
                if number % 2:
                    await launch(_compile(stub, pb.CompileRequest(grammar=grammar), outcomes, mine))
                else:
                    sampling = pb.SamplingParams(max_tokens=64, temperature=0.0, seed=number)
                    request = pb.GenerateRequest(text="Answer:", sampling=sampling, grammar=grammar, priority=1000)
                    await launch(_generate(stub, request, outcomes, mine))
                number += 1

    return attack


def kills(every_s: float) -> Attack:
    """Return an attack that sends SIGKILL to the grammar process."""

    async def attack(target: Target, outcomes: Outcomes) -> None:
        while True:
            await asyncio.sleep(every_s)
            pid = target.sidecar_pid()
            if pid is None:
                outcomes["no process to kill"] += 1
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                outcomes["killed"] += 1

    return attack


def burners(count: int, nice: int) -> Attack:
    """Return a control: `count` processes that compute at `nice` and have nothing to do with the server."""
    return _beside(count, sys.executable, "-c", _BURN.format(nice=nice))


def compilers(count: int, nice: int, tokenizer: Path, backend: str) -> Attack:
    """Return a control: `count` processes that compile the flood's schemas and discard the results."""
    command = (
        sys.executable,
        "-m",
        "benchmarks.faults.compile_alone",
        "--tokenizer",
        str(tokenizer),
        "--backend",
        backend,
    )
    return _beside(count, *command, "--nice", str(nice))


def _beside(count: int, *command: str) -> Attack:
    async def attack(_target: Target, outcomes: Outcomes) -> None:
        processes = [await asyncio.create_subprocess_exec(*dying_with_us(command)) for _ in range(count)]
        outcomes["processes"] = count
        try:
            await asyncio.Event().wait()
        finally:
            for process in processes:
                process.kill()
                await process.wait()

    return attack


def distinct_schema(number: int) -> str:
    """Return a schema of the size of a tool's arguments, different for every number."""
    properties = {
        f"field_{number}_{i}": [
            {"type": "string", "maxLength": 20 + i},
            {"type": "integer", "minimum": number % 97},
            {"type": "array", "items": {"type": "string"}, "maxItems": 4},
            {"enum": [f"a{number}", f"b{number}", "c"]},
        ][i % 4]
        for i in range(8)
    }
    return json.dumps({
        "type": "object", "properties": properties, "required": list(properties)[:4], "additionalProperties": False
    })  # fmt: skip


def hostile_grammars() -> dict[str, pb.Grammar]:
    """Return grammars that cost a matcher library much: time, memory, states, bytes."""
    nested: dict[str, object] = {"type": "integer"}
    for depth in range(16):
        nested = {"oneOf": [
            {"type": "object", "properties": {"a": nested, f"k{depth}": {"const": side}}, "required": [f"k{depth}"]}
            for side in (0, 1)
        ]}  # fmt: skip
    large = {"type": "object", "properties": {f"property_{i:06d}": {"type": "string"} for i in range(45_000)}}
    names = [f"choice number {i} of many" for i in range(1000)]
    enums = {"type": "object", "properties": {f"e{i}": {"enum": names} for i in range(8)}, "required": ["e0", "e7"]}
    return {
        "oneOf nested 16 deep": pb.Grammar(json_schema=json.dumps(nested)),
        "a schema of 2 MB": pb.Grammar(json_schema=json.dumps(large)),
        "a regex of many states": pb.Grammar(regex="(a|b)*a(a|b){40}(x+x+)+y"),
        "enums of 1000": pb.Grammar(json_schema=json.dumps(enums)),
    }


def salted(grammar: pb.Grammar, number: int) -> pb.Grammar:
    """Return a grammar with the same cost and another text."""
    # Unequal to every other, so that no cache and no joined compilation helps.
    salted = pb.Grammar()
    salted.CopyFrom(grammar)
    if grammar.HasField("regex"):
        salted.regex = f"({grammar.regex})|never{number}"
    else:
        # As text: parsing two megabytes would be felt on the cores that are watched.
        salted.json_schema = f'{grammar.json_schema[:-1]}, "description": "number {number}"}}'
    return salted


Launch = Callable[[Awaitable[None]], Awaitable[None]]


@asynccontextmanager
async def _open_loop(
    target: Target, outcomes: Outcomes, per_second: float
) -> AsyncIterator[tuple[engine_pb2_grpc.EngineAsyncStub, Launch]]:
    """Yield a stub and a launcher that starts one call per tick of the clock and waits for none of them."""
    channel = grpc.aio.insecure_channel(
        target.address, options=[("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    )
    loop = asyncio.get_running_loop()
    running: set[asyncio.Future[None]] = set()
    due_s = loop.time()

    async def launch(call: Awaitable[None]) -> None:
        nonlocal due_s
        outcomes["sent"] += 1
        task = asyncio.ensure_future(call)
        running.add(task)
        task.add_done_callback(running.discard)
        due_s += 1 / per_second
        await asyncio.sleep(max(0.0, due_s - loop.time()))

    try:
        yield engine_pb2_grpc.EngineStub(channel), launch
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await channel.close(None)


Metadata = tuple[tuple[str, str], ...]


async def _compile(
    stub: engine_pb2_grpc.EngineAsyncStub, request: pb.CompileRequest, outcomes: Outcomes, metadata: Metadata = ()
) -> None:
    try:
        await stub.Compile(request, timeout=60, metadata=metadata)
        outcomes["OK"] += 1
    except grpc.aio.AioRpcError as error:
        outcomes[error.code().name] += 1


async def _generate(
    stub: engine_pb2_grpc.EngineAsyncStub, request: pb.GenerateRequest, outcomes: Outcomes, metadata: Metadata = ()
) -> None:
    try:
        async for _ in stub.Generate(request, timeout=60, metadata=metadata):
            pass
        outcomes["OK"] += 1
    except grpc.aio.AioRpcError as error:
        outcomes[error.code().name] += 1
