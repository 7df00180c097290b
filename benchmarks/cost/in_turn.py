"""Requests of several kinds in turn, one at a time and several at once, with the same requests without anything.

Invariant: every kind gets the same prompts, greedy and of a fixed length. Rounds alternate between the kinds, and the
best round of each counts. Not responsible for: the kinds and the tables (see processors.py, tensors.py).
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from benchmarks.harness.flags import engine_options, whole
from benchmarks.harness.server import EngineServer
from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc

PLAIN = "none"
PROMPT_TOKENS = 64

Kinds = Mapping[str, Mapping[str, Any]]
"""By the name of a kind: the fields of its requests."""


def _best() -> defaultdict[Any, float]:
    return defaultdict(lambda: float("inf"))


@dataclass(slots=True)
class Findings:
    """Best times in seconds, by kind and concurrency."""

    seconds: dict[tuple[str, int], float] = field(default_factory=_best)
    first_s: dict[tuple[str, int], float] = field(default_factory=_best)
    beside_s: dict[str, float] = field(default_factory=_best)
    """Of plain requests next to one of the kind."""
    num_bytes: dict[str, int] = field(default_factory=dict)
    """Of the tensors of an answer."""
    differ: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Answers whose tokens are not those of plain requests."""

    def speeds(self, kind: str, concurrency: int) -> list[float]:
        """Return the speeds over those of plain requests: of one at a time, of several, of others next to one."""
        together = [self.seconds[PLAIN, many] / self.seconds[kind, many] for many in (1, concurrency)]
        return [*together, self.beside_s[PLAIN] / self.beside_s[kind]]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the measurement."""
    add = parser.add_argument
    add("--num-draft-tokens", type=whole(0), default=0, help="drafts per step (default 0)")
    add("--concurrency", type=whole(1), default=8, help="requests at once (default 8)")
    add("--max-tokens", type=whole(1), default=96, help="tokens of an answer (default 96)")
    add("--rounds", type=whole(1), default=3, help="rounds, the best of which counts (default 3)")


async def _ask(
    stub: engine_pb2_grpc.EngineAsyncStub, seed: int, max_tokens: int, fields: Mapping[str, Any]
) -> tuple[float, float, list[int], int]:
    """Return the time to the first token, the time in all, the tokens, and the bytes of tensors."""
    ids = [(seed * 7919 + at * at * 31) % 250 + 1 for at in range(PROMPT_TOKENS)]  # no other seed has them
    sampling = pb.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=sampling, **fields)
    begun_s, first_s, tokens, size = time.perf_counter(), 0.0, list[int](), 0
    async for response in stub.Generate(message):
        if response.token_ids and not first_s:
            first_s = time.perf_counter() - begun_s
        tokens += response.token_ids
        size += sum(len(output.data) for output in response.outputs)
    return first_s, time.perf_counter() - begun_s, tokens, size


async def _measure(
    address: str, args: argparse.Namespace, kinds_of: Callable[[pb.GetModelInfoResponse], Kinds]
) -> Findings:
    findings, expected = Findings(), dict[int, list[int]]()
    async with grpc.aio.insecure_channel(address, [("grpc.max_receive_message_length", -1)]) as channel:
        stub: engine_pb2_grpc.EngineAsyncStub = engine_pb2_grpc.EngineStub(channel)
        kinds = {PLAIN: dict[str, Any](), **kinds_of(await stub.GetModelInfo(pb.GetModelInfoRequest()))}
        await _ask(stub, 0, 4, {})
        for _ in range(args.rounds):
            for kind, fields in kinds.items():
                for at_once in (1, args.concurrency):
                    begun_s = time.perf_counter()
                    asked = [_ask(stub, seed, args.max_tokens, fields) for seed in range(at_once)]
                    answers = await asyncio.gather(*asked)
                    key = kind, at_once
                    findings.seconds[key] = min(findings.seconds[key], time.perf_counter() - begun_s)
                    findings.first_s[key] = min(findings.first_s[key], *(first_s for first_s, *_ in answers))
                    findings.num_bytes[kind] = answers[0][3]
                    for seed, (_, _, tokens, _) in enumerate(answers):
                        findings.differ[kind] += expected.setdefault(seed, tokens) != tokens
                one = (_ask(stub, seed, args.max_tokens, {} if seed else fields) for seed in range(args.concurrency))
                beside = (await asyncio.gather(*one))[1:]
                findings.beside_s[kind] = min(findings.beside_s[kind], max(total_s for _, total_s, _, _ in beside))
    return findings


def measured(
    args: argparse.Namespace, flags: tuple[str, ...], kinds_of: Callable[[pb.GetModelInfoResponse], Kinds]
) -> Findings:
    """Start an engine with further flags, and ask for everything."""
    options = engine_options(args, prefix_cache=False, extra=("--stream-pace-ms", "0", *flags))
    with EngineServer(options) as server:
        return asyncio.run(_measure(server.address, args, kinds_of))
