"""Bytes at the service of the grammar process, with its real compiler over a worker in this process.

The first byte of an input chooses the method; before every input the standard vocabulary is configured.
Invariant: every call ends, with a status that is not INTERNAL.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import cast

from google.protobuf.message import DecodeError

from grammar_service.compile.compiler import Compiler
from grammar_service.config import GrammarConfig
from grammar_service.fill.counters import WorkerCounts
from grammar_service.fill.matchers import SlotMatcher
from grammar_service.fill.worker import Worker
from grammar_service.grammar.vocabulary import Vocabulary
from grammar_service.servicer import GrammarServicer
from protos.grammar.v1 import grammar_pb2 as pb
from shared_mem.layout import Layout, RowKind
from tools.enforced.bytes_vocabulary import STOP, bytes_vocabulary
from tools.fuzz import compile_process, rpc
from tools.fuzz.target import Target, require
from tools.fuzz.targets.engine_services import mutate_call
from tools.fuzz.words import JSON_SCHEMA, NOTATIONS, TAGS

NUM_SLOTS = 4
COMPILED = "compiled"
"""In a Bind call: the id of the grammar that is compiled before it."""
CONFIG = GrammarConfig(
    dir="unused",
    compile_workers=1,
    compile_timeout_s=30.0,
    max_grammar_bytes=2000,
    max_grammar_depth=32,
    cache_bytes=1 << 20,
)


class _Worker:
    """What the servicer uses of the worker that fills rows: it keeps the matchers of the slots."""

    def __init__(self) -> None:
        self.bound: dict[int, SlotMatcher] = {}

    def bind(self, slot: int, state: SlotMatcher) -> None:
        """Keep the matcher of a slot."""
        require(0 <= slot < NUM_SLOTS, "a matcher is bound to no slot")
        self.bound[slot] = state

    def release(self, slot: int, slot_gen: int) -> None:
        """Drop the matcher of a slot."""
        if slot in self.bound and self.bound[slot].slot_gen == slot_gen:
            del self.bound[slot]

    def drop_all(self) -> None:
        """Drop all."""
        self.bound.clear()

    def counts(self) -> WorkerCounts:
        """Return figures."""
        return WorkerCounts()

    def stats(self) -> dict[str, float]:
        """Return figures."""
        return {"matchers": len(self.bound), "records": 0, "fill_p50_us": 0.0, "fill_p99_us": 0.0}

    def rows_by_kind(self) -> dict[str, int]:
        """Return figures."""
        return {kind.name: 0 for kind in RowKind}


def grammar_service() -> Target:
    """Return the target."""
    loop = asyncio.new_event_loop()
    known = rpc.methods(pb.DESCRIPTOR.services_by_name["Grammar"])
    standard = bytes_vocabulary()
    configure = pb.ConfigureRequest(
        tokenizer_json=standard.tokenizer_json, vocab_size=standard.size, stop_token_ids=[STOP]
    ).SerializeToString()
    by_name = {method.name: method for method in known}
    compiled = pb.CompileRequest(kind=pb.KIND_REGEX, source="[a-c]{1,3}").SerializeToString()

    def new_compiler(config: GrammarConfig, vocabulary: Vocabulary) -> Compiler:
        return Compiler(config, vocabulary, start=compile_process.start)

    servicer = GrammarServicer(CONFIG, new_compiler)
    worker = _Worker()
    servicer.attach(cast("Worker", worker), Layout(NUM_SLOTS, 4, standard.size, 2, generation=1))

    async def one(data: bytes) -> None:
        # Nothing but an input that configured another vocabulary makes a compiler here.
        await rpc.call(servicer, by_name["Configure"], configure)
        method = known[data[0] % len(known) if data else 0]
        body = data[1:]
        if method.name == "Bind":
            answer = await rpc.call(servicer, by_name["Compile"], compiled)
            assert answer is not None
            require(answer.responses, "a grammar that compiles was refused")
            body = _of_compiled(body, pb.CompileResponse.FromString(answer.responses[0]).grammar_id)
        await rpc.call(servicer, method, body)
        worker.drop_all()

    def close() -> None:
        loop.run_until_complete(servicer.close())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    words = (COMPILED, *NOTATIONS, *JSON_SCHEMA, *TAGS)

    def mutate(data: bytes, random: Random) -> bytes:
        return mutate_call(known, data, random, words)

    return Target(lambda data: loop.run_until_complete(one(data)), mutate, words, timeout_s=60, close=close)


def _of_compiled(body: bytes, grammar_id: str) -> bytes:
    """Return a Bind message with the id in place of COMPILED."""
    try:
        message = pb.BindRequest.FromString(body)
    except DecodeError:
        return body
    if message.grammar_id != COMPILED:
        return body
    message.grammar_id = grammar_id
    return message.SerializeToString()
