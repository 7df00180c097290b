"""`python -m benchmarks gateway`: tokens per second over HTTP and over gRPC, in turn in one run.

Invariant: one engine, and one gateway in front of it, answer the same prompts, streamed, over both ways in turn; the
way that comes first alternates, and only figures of one round are divided. Events are parsed when a round is over.

Not responsible for: what the gateway answers (tests/e2e/http).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.harness.client import CallRefused, EngineClient
from benchmarks.harness.flags import add_engine_flags, engine_options, harness_parser, list_of, one_of, real, whole
from benchmarks.harness.gateway import start_gateway
from benchmarks.harness.server import start_engine
from benchmarks.harness.tables import Progress, number, table
from benchmarks.harness.workloads import ALL_WORKLOADS, Item, workload
from benchmarks.speed.builds import greedy_calls, tokens_per_s

EXAMPLES = """
examples:
  python -m benchmarks gateway                                     chat and schema at 1 and 16
  python -m benchmarks gateway --count 8 --rounds 7 --at-least 0.95

reading the table:
  gRPC, HTTP      generated tokens / wall time, the best of the rounds
  ratio           HTTP / gRPC: of these two, and the median of the rounds
  equal           answers with the same text
"""


@dataclass(slots=True)
class Pair:
    """One cell of the table: tokens per second by round."""

    grpc: list[float] = field(default_factory=list)
    http: list[float] = field(default_factory=list)
    equal: int = 0
    total: int = 0

    def ratios(self) -> tuple[float, float]:
        """Return HTTP / gRPC of the best rounds, and the median of the rounds."""
        return max(self.http) / max(self.grpc), statistics.median(
            http / grpc for grpc, http in zip(self.grpc, self.http, strict=True)
        )


class HttpClient:
    """Streams chat answers over one connection for each answer that runs; reads bytes, and parses nothing."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)

    async def run(self, items: Sequence[Item], concurrency: int) -> tuple[list[bytes], float]:
        """Return the body of each answer, and the wall time in seconds. Raises CallRefused."""
        bodies: list[bytes] = [b""] * len(items)
        waiting = iter(enumerate(items))

        async def lane() -> None:
            reader, writer = await asyncio.open_connection(self._host, self._port)
            for number_, item in waiting:
                bodies[number_] = await self._answer(item, reader, writer)
            writer.close()

        started_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(lane())
        return bodies, time.perf_counter() - started_s

    async def _answer(self, item: Item, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        body = json.dumps(_chat(item)).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answered = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1]
        if answered != b"200":
            raise CallRefused(item.name, answered.decode(), "")
        data = b""
        while not data.endswith(b"\r\n0\r\n\r\n"):
            data += await reader.read(1 << 16)
        return data


def _chat(item: Item) -> dict[str, Any]:
    body: dict[str, Any] = {
        "messages": [{"role": role, "content": content} for role, content in item.messages],
        "max_tokens": item.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if item.schema is not None:
        body["structured_outputs"] = {"json": item.schema}
    return body


def read_answer(body: bytes) -> tuple[str, int]:
    """Return the text and the number of tokens of a streamed answer."""
    text, tokens = [], 0
    for line in body.decode().splitlines():
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line.removeprefix("data: "))
        text += [choice["delta"].get("content") or "" for choice in chunk["choices"]]
        if chunk.get("usage"):
            tokens = chunk["usage"]["completion_tokens"]
    return "".join(text), tokens


async def measure(
    addresses: tuple[str, str], items: dict[str, list[Item]], levels: Sequence[int], rounds: int
) -> dict[tuple[str, int], Pair]:
    """Run every workload at every concurrency, `rounds` times over both: (gRPC, HTTP)."""
    engine, http = EngineClient(addresses[0]), HttpClient(addresses[1])
    progress = Progress(2 * rounds * len(levels) * len(items))
    cells: dict[tuple[str, int], Pair] = {}
    try:
        for name, these in items.items():
            short = [replace(item, max_tokens=16) for item in these]
            await engine.run(greedy_calls(short), max(levels))
            await http.run(short, max(levels))
            for level in levels:
                pair = cells[name, level] = Pair()
                batch = [these[i % len(these)] for i in range(max(len(these), 2 * level))]
                for turn in range(rounds):
                    await _round(engine, http, batch, level, pair, grpc_first=turn % 2 == 0)
                    progress.step(f"{name} at {level}", by=2)
    finally:
        await engine.close()
        progress.close()
    return cells


async def _round(
    engine: EngineClient, http: HttpClient, items: Sequence[Item], level: int, pair: Pair, *, grpc_first: bool
) -> None:
    async def over_grpc() -> list[str]:
        run = await engine.run(greedy_calls(items), level)
        pair.grpc.append(tokens_per_s(run))
        return [answer.text for answer in run.answers]

    async def over_http() -> list[str]:
        bodies, wall_s = await http.run(items, level)
        answers = [read_answer(body) for body in bodies]
        pair.http.append(sum(tokens for _, tokens in answers) / wall_s)
        return [text for text, _ in answers]

    if grpc_first:
        one, other = await over_grpc(), await over_http()
    else:
        other, one = await over_http(), await over_grpc()
    pair.equal += sum(a == b for a, b in zip(one, other, strict=True))
    pair.total += len(one)


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = harness_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add("--rounds", type=whole(1), default=3, help="passes over each way and cell (default 3)")
    add("--concurrency", type=list_of(whole(1)), default="1,16", help="comma-separated (default 1,16)")
    add(
        "--workloads",
        type=list_of(one_of(ALL_WORKLOADS)),
        default="chat,schema",
        help="comma-separated (default chat,schema)",
    )
    add("--count", type=whole(1), help="only the first COUNT prompts of every workload")
    add("--max-tokens", type=whole(1), help="lower the token budget of every prompt")
    add_engine_flags(parser, "model", "device", "threads")
    add("--flags", default="", metavar="FLAGS", help="further flags for the engine, as one string")
    add("--at-least", type=real(0), metavar="RATIO", help="exit 1 where the ratio of the best rounds is lower")
    return parser


def main() -> int:
    """Run the comparison; returns the exit code."""
    args = build_parser().parse_args()
    items = {name: workload(name, args.count, args.max_tokens) for name in args.workloads}
    options = engine_options(
        args, max_batch_size=max(16, *args.concurrency), extra=("--draft-index-bytes=0", *shlex.split(args.flags))
    )
    with ExitStack() as stack:
        engine = stack.enter_context(start_engine(options))
        gateway = stack.enter_context(start_gateway(engine))
        cells = asyncio.run(measure((engine, gateway), items, args.concurrency, args.rounds))
    rows = []
    for (name, level), pair in cells.items():
        figures = [number(max(pair.grpc)), number(max(pair.http)), *(number(ratio, 3) for ratio in pair.ratios())]
        rows.append([name, str(level), *figures, f"{pair.equal} of {pair.total}"])
    print(table(("workload", "c", "gRPC", "HTTP", "ratio", "median", "equal"), rows))
    slow = [cell for cell, pair in cells.items() if pair.ratios()[0] < (args.at_least or 0)]
    for name, level in slow:
        print(f"too slow: {name} at {level}, below {args.at_least}")
    return 1 if slow else 0
