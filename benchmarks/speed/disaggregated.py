"""`python -m benchmarks disaggregated`: prompts prefilled by another engine, and by the one that decodes.

One engine has all threads. Next to it a prefill engine and a decode engine have half of them each. All three run at
once, and one of the two ways works at a time. Streams decode while long prompts arrive: the time to the first token of
these prompts, and the gaps between the tokens of the streams, are what the two ways differ in.

Invariant: both ways get the same requests, greedy, and must give the same tokens.
Not responsible for: engines on several machines, whose network this does not show.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import time
from dataclasses import dataclass, field

import grpc

from benchmarks.harness.flags import add_engine_flags, engine_options, harness_parser, whole
from benchmarks.harness.measure import percentile
from benchmarks.harness.server import EngineServer, ServerOptions
from benchmarks.harness.tables import Progress, number, table
from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc

ONE, TWO = "one engine", "prefill and decode"

EXAMPLES = """
what it does:
  Streams of --stream-tokens tokens decode. Meanwhile prompts of --prompt-tokens random tokens arrive one after the
  other, each new to both caches. The two ways take turns, --rounds times.

examples:
  python -m benchmarks disaggregated
  python -m benchmarks disaggregated --threads 8 --prompt-tokens 1800 --rounds 4

exit code: 0, 1 tokens differed or nothing was fetched, 2 a server failed
"""


@dataclass(slots=True)
class Moments:
    """When the tokens of an answer arrived."""

    seconds: list[float] = field(default_factory=list)
    first: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self) -> None:
        """Note that tokens arrive now."""
        self.seconds.append(time.perf_counter())
        self.first.set()


@dataclass(slots=True)
class Findings:
    """What was seen of one way."""

    ttft_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By request."""
    cached: int = 0
    """Prompt tokens that the decoding engine had not to prefill."""


async def generate(
    stub: engine_pb2_grpc.EngineAsyncStub, request: pb.GenerateRequest, findings: Findings, moments: Moments
) -> None:
    """Run one request; note when its tokens arrive."""
    ids: list[int] = []
    async for response in stub.Generate(request, timeout=600.0):
        if response.token_ids:
            moments.add()
            ids += response.token_ids
        findings.cached += response.usage.cached_tokens if response.HasField("usage") else 0
    findings.tokens[request.cache_salt] = tuple(ids)


def request(name: str, count: int, max_tokens: int) -> pb.GenerateRequest:
    """Return a request with `count` random tokens, whose name is its salt: no request shares its pages."""
    ids = random.Random(name).choices(range(1000, 40000), k=count)
    sampling = pb.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=sampling, cache_salt=name)


async def one_round(address: str, number_of_round: int, args: argparse.Namespace, findings: Findings) -> None:
    """Let streams decode, and long prompts arrive one after the other."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        streams = [Moments() for _ in range(args.streams)]
        running = []
        for at, moments in enumerate(streams):
            call = request(f"stream {number_of_round} {at}", 16, args.stream_tokens)
            running.append(asyncio.create_task(generate(stub, call, findings, moments)))
        for moments in streams:
            await moments.first.wait()
        for at in range(args.prompts):
            moments, began_s = Moments(), time.perf_counter()
            await generate(stub, request(f"prompt {number_of_round} {at}", args.prompt_tokens, 4), findings, moments)
            findings.ttft_ms.append((moments.seconds[0] - began_s) * 1e3)
        ended_s = time.perf_counter()
        await asyncio.gather(*running)
    for moments in streams:  # gaps while prompts were prefilled
        during = [moment for moment in moments.seconds if moment <= ended_s]
        findings.gaps_ms += [(after - before) * 1e3 for before, after in itertools.pairwise(during)]


async def measure(addresses: dict[str, str], args: argparse.Namespace) -> dict[str, Findings]:
    """Let the ways take turns."""
    found = {way: Findings() for way in addresses}
    progress = Progress(len(addresses) * args.rounds)
    try:
        for address in addresses.values():
            warm = argparse.Namespace(**{**vars(args), "prompts": 1, "stream_tokens": 64})
            await one_round(address, -1, warm, Findings())
        for turn in range(args.rounds):
            # Each way comes first every other time.
            for way in sorted(addresses, reverse=turn % 2 == 1):
                await one_round(addresses[way], turn, args, found[way])
                progress.step(way)
    finally:
        progress.close()
    return found


def report(found: dict[str, Findings]) -> str:
    """Return the table."""
    rows = []
    for way, each in found.items():
        gaps, ttft = sorted(each.gaps_ms), sorted(each.ttft_ms)
        cells = [number(value, 1, " ms") for value in (percentile(ttft, 50), ttft[0], ttft[-1])]
        cells += [number(value, 1, " ms") for value in (percentile(gaps, 50), percentile(gaps, 99), gaps[-1])]
        rows.append([way, *cells, str(each.cached)])
    head = ("way", "TTFT, p50", "least", "most", "gap, p50", "p99", "most", "prompt tokens from elsewhere")
    one, two = found[ONE], found[TWO]
    differ = sum(one.tokens[name] != two.tokens[name] for name in one.tokens)
    return f"{table(head, rows)}\nanswers that differ: {differ} of {len(one.tokens)}"


def main() -> int:
    """Measure and print."""
    parser = harness_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add_engine_flags(parser, "model", "dtype")
    add("--threads", type=whole(1), default=len(os.sched_getaffinity(0)), help="of the one engine (default: the cores)")
    add("--streams", type=whole(1), default=2, help="answers that decode all the time (default 2)")
    add("--stream-tokens", type=whole(1), default=300, help="tokens of such an answer (default 300)")
    add("--prompts", type=whole(1), default=4, help="long prompts of a round (default 4)")
    add("--prompt-tokens", type=whole(1), default=1024, help="tokens of a long prompt (default 1024)")
    add("--rounds", type=whole(1), default=3, help="rounds of each way (default 3)")
    args = parser.parse_args()
    always = ("--grammar", "none", "--stream-pace-ms", "0", "--num-draft-tokens", "0")
    half = max(1, args.threads // 2)

    def options(threads: int, *extra: str) -> ServerOptions:
        return engine_options(args, num_threads=threads, extra=(*always, *extra))

    with EngineServer(options(args.threads)) as one, EngineServer(options(half, "--role", "prefill")) as prefill:
        decode_options = options(half, "--role", "decode", "--prefill-from", prefill.address)
        with EngineServer(decode_options) as decode:
            found = asyncio.run(measure({ONE: one.address, TWO: decode.address}, args))
    print(f"{args.model} {args.dtype}: one engine with {args.threads} threads, two with {half} each\n\n{report(found)}")
    return int(found[ONE].tokens != found[TWO].tokens or not found[TWO].cached)
