"""`python -m benchmarks prefixes`: the time to the first token with the prefix cache and without.

Invariant: two servers run at once and get the same requests alternately, greedy; both must give the same answers.
Not responsible for: throughput (the other benchmarks measure it with the cache off).
"""

from __future__ import annotations

import argparse
import asyncio
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import grpc

from benchmarks.harness.client import Call, EngineClient, make_call
from benchmarks.harness.flags import add_engine_flags, engine_options, harness_parser, whole
from benchmarks.harness.measure import percentile
from benchmarks.harness.server import EngineServer
from benchmarks.harness.tables import Progress, number, table
from benchmarks.harness.workloads import Item, workload
from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc

FIRST, SEEN, NEXT = "first of its schema", "its schema was seen", "next turn of a conversation"

EXAMPLES = """
what it does:
  Extraction prompts, whose system message holds a schema that several share, and conversations of three turns. One
  request at a time, to both servers one after the other.

examples:
  python -m benchmarks prefixes
  python -m benchmarks prefixes --model DIR --threads 8 --count 32

exit code: 0, 1 an answer differed, 2 a server failed
"""


@dataclass(slots=True)
class Findings:
    """What was seen; [without, with] the cache."""

    ttft_ms: dict[str, tuple[list[float], list[float]]] = field(default_factory=lambda: defaultdict(lambda: ([], [])))
    """By kind of request."""
    answers: int = 0
    differ: int = 0
    prefilled: tuple[int, int] = (0, 0)
    cached: int = 0


def extractions(count: int, max_tokens: int) -> Iterator[tuple[str, Call]]:
    """Yield (kind, call) for `count` prompts."""
    sampling = pb.SamplingParams(max_tokens=max_tokens, temperature=0.0)
    seen: set[str | None] = set()
    for item in workload("extraction", max_tokens=max_tokens)[:count]:
        yield (
            (SEEN if item.schema in seen else FIRST),
            make_call(item.name, item.messages, schema=item.schema, sampling=sampling),
        )
        seen.add(item.schema)


async def ask(clients: tuple[EngineClient, EngineClient], kind: str, call: Call, findings: Findings) -> str:
    """Ask both; return the answer."""
    texts = ["", ""]
    # Each is the first of the two every other time: the one before may still be busy with its end.
    for at in (0, 1) if findings.answers % 2 else (1, 0):
        answer = await clients[at].generate(call)
        findings.ttft_ms[kind][at].append((answer.first_s - answer.started_s) * 1e3)
        texts[at] = answer.text
    findings.answers += 1
    findings.differ += texts[0] != texts[1]
    return texts[0]


async def converse(clients: tuple[EngineClient, EngineClient], item: Item, max_tokens: int, findings: Findings) -> None:
    """Three turns, each with the text of the turns before."""
    sampling = pb.SamplingParams(max_tokens=max_tokens, temperature=0.0)
    for turn in range(3):
        call = make_call(f"{item.name} {turn}", item.messages, schema=None, sampling=sampling)
        said = await ask(clients, NEXT if turn else "first turn", call, findings)
        item = replace(item, messages=(*item.messages, ("assistant", said), ("user", "Say more about that.")))


async def measure(addresses: tuple[str, str], args: argparse.Namespace) -> Findings:
    """Ask everything."""
    findings = Findings()
    clients = EngineClient(addresses[0]), EngineClient(addresses[1])
    calls = list(extractions(args.count, args.max_tokens))
    talks = workload("chat", max_tokens=args.max_tokens)[: args.conversations]
    progress = Progress(len(calls) + len(talks))
    try:
        for client in clients:  # each has answered before it is measured
            await client.generate(
                Call("warm", pb.GenerateRequest(text="warm", sampling=pb.SamplingParams(max_tokens=4)))
            )
        for kind, call in calls:
            await ask(clients, kind, call, findings)
            progress.step(kind)
        for item in talks:
            await converse(clients, item, args.max_tokens, findings)
            progress.step("conversation")
        without, with_cache = [await stats(address) for address in addresses]
        findings.prefilled = without.prefill_tokens, with_cache.prefill_tokens
        findings.cached = with_cache.cached_tokens
    finally:
        progress.close()
        for client in clients:
            await client.close()
    return findings


async def stats(address: str) -> pb.GetStatsResponse:
    """Return a server's counters."""
    async with grpc.aio.insecure_channel(address) as channel:
        response: pb.GetStatsResponse = await engine_pb2_grpc.EngineStub(channel).GetStats(pb.GetStatsRequest())
        return response


def report(findings: Findings) -> str:
    """Return the table and what goes with it."""
    rows = []
    for kind, (without, with_cache) in findings.ttft_ms.items():
        off, on = percentile(without, 50), percentile(with_cache, 50)
        rows.append([kind, str(len(without)), number(off, 1, " ms"), number(on, 1, " ms"), number(on / off, 2, "x")])
    return "\n".join([
        table(("request", "number", "TTFT, p50", "with the cache", "ratio"), rows),
        f"tokens prefilled: {findings.prefilled[0]} without, {findings.prefilled[1]} with the cache, which had "
        f"{findings.cached}; answers that differ: {findings.differ} of {findings.answers}",
    ])  # fmt: skip


def main() -> int:
    """Measure and print."""
    parser = harness_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add_engine_flags(parser, "model", "dtype", "device", "threads")
    add("--count", type=whole(1), default=16, help="extraction prompts (default 16)")
    add("--conversations", type=whole(1), default=4, help="conversations of three turns (default 4)")
    add("--max-tokens", type=whole(1), default=48, help="tokens of an answer (default 48)")
    args = parser.parse_args()
    options = engine_options(args)
    with EngineServer(replace(options, prefix_cache=False)) as without, EngineServer(options) as with_cache:
        findings = asyncio.run(measure((without.address, with_cache.address), args))
    print(f"{args.model} {args.dtype}, {args.threads} threads, one request at a time\n\n{report(findings)}")
    return int(findings.differ > 0)
