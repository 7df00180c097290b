"""Bytes at the services of the public port: our own and vLLM's, before an engine that answers at once.

The first byte of an input chooses the method. Invariant: every call ends, with a status that is not INTERNAL, leaves no
request and no task after, and its message can be sent.

Not responsible for: KServe's service (see inference.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from gpu_engine.front.calls import Calls
from gpu_engine.front.servicer import EngineServicer
from protos.engine.v1 import engine_pb2
from tools.fuzz import rpc
from tools.fuzz.engine import instant_calls
from tools.fuzz.mutations import mutate_message
from tools.fuzz.target import Target, require
from tools.fuzz.words import JSON_SCHEMA, REQUEST, TAGS

ENDLESS = frozenset({"WatchStats", "SubscribeKvEvents"})
VERSION = "0"


def engine_service() -> Target:
    """Return the target of our own service."""
    service = engine_pb2.DESCRIPTOR.services_by_name["Engine"]
    return service_target(service, lambda calls: EngineServicer(calls, version=VERSION), REQUEST)


def vllm_service() -> Target:
    """Return the target of vLLM's service."""
    # Its messages are their own package.
    from smg_grpc_proto import vllm_engine_pb2

    from gpu_engine.doors.vllm_wire.vllm_servicer import VllmEngineServicer

    service = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]
    return service_target(service, lambda calls: VllmEngineServicer(calls, version=VERSION, kv_events=True), REQUEST)


def service_target(service: ServiceDescriptor, serve: Callable[[Calls], Any], words: tuple[str, ...]) -> Target:
    """Return the target of a service; `serve` makes its servicer."""
    loop = asyncio.new_event_loop()
    known = rpc.methods(service)

    async def start() -> tuple[Calls, Any]:
        calls = instant_calls()
        return calls, serve(calls)

    calls, servicer = loop.run_until_complete(start())

    async def one(data: bytes) -> None:
        method = method_of(known, data)
        if await rpc.call(servicer, method, data[1:], endless=method.name in ENDLESS) is None:
            return
        require(len(calls) == 0, f"{method.name} leaves a request behind")
        # A callback after the end of a task may be due.
        await asyncio.sleep(0)
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        require(not left, f"{method.name} leaves {len(left)} tasks behind")

    def close() -> None:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    return Target(
        lambda data: loop.run_until_complete(one(data)),
        lambda data, random: mutate_call(known, data, random, words + JSON_SCHEMA + TAGS),
        words,
        close=close,
    )


def method_of(known: list[MethodDescriptor], data: bytes) -> MethodDescriptor:
    """Return the method that the first byte chooses."""
    return known[data[0] % len(known) if data else 0]


def mutate_call(known: list[MethodDescriptor], data: bytes, random: Random, words: tuple[str, ...]) -> bytes:
    """Return another call, most often of the same method."""
    head = data[:1] or b"\0"
    if random.random() < 0.05:
        head = bytes([random.randrange(len(known))])
    method = method_of(known, head)
    kind = rpc.request_type(method)
    if not method.client_streaming:
        return head + mutate_message(data[1:], random, kind, words)
    messages = rpc.split(data[1:]) or [b""]
    at = random.randrange(len(messages))
    messages[at] = mutate_message(messages[at], random, kind, words)
    if random.random() < 0.2:
        messages.insert(random.randint(0, len(messages)), random.choice(messages))
    return head + rpc.joined(messages[:8])
