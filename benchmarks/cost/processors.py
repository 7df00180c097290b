"""`python -m benchmarks processors`: what logits processors cost, by kind.

Invariant: each kind is sent in turn with the same requests without processors, greedy and of a fixed length. The
arguments leave most tokens as they are; answers that differ are counted. Not responsible for: a server's cost of having
processors that no request names (see `python -m benchmarks builds`).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field

import grpc

from benchmarks.harness.flags import add_engine_flags, engine_options, harness_parser
from benchmarks.harness.server import EngineServer, ServerFailed
from benchmarks.harness.tables import number, table
from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc

PLAIN = "none"
PROMPT_TOKENS = 64
ROOM = "gpu_engine.processors"
ENTRIES = (
    f"ngrams={ROOM}.ngrams:NoRepeatedNgrams",
    f"end={ROOM}.long_answers:LengthPenalty",
    f'clients={ROOM}.client_tokens:ForbiddenForClient{{"clients": {{"": [0]}}}}',
)
KINDS = {
    PLAIN: [],
    "captured": [pb.LogitsProcessor(name="ngrams", arguments='{"size": 16}')],
    "batched": [pb.LogitsProcessor(name="end", arguments='{"start": 100000, "factor": 1.1}')],
    "single": [pb.LogitsProcessor(name="clients")],
}

EXAMPLES = """
what it does:
  Prompts of 64 tokens, one at a time and several at once. Every answer has --max-tokens tokens. Rounds alternate
  between the kinds, and each kind's best round counts. The last column is for one request with a processor among others
  without: the time of the others.

examples:
  python -m benchmarks processors
  python -m benchmarks processors --device cuda --model DIR --concurrency 32

exit code: 0, 1 a server failed
"""


@dataclass(slots=True)
class Findings:
    """Best times in seconds."""

    seconds: dict[tuple[str, int], float] = field(default_factory=lambda: defaultdict(lambda: float("inf")))
    """By kind and concurrency."""
    beside_s: dict[str, float] = field(default_factory=lambda: defaultdict(lambda: float("inf")))
    """Of the requests without processors next to one with them."""
    differ: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Answers whose tokens are not those without processors."""


def request(seed: int, max_tokens: int, kind: str) -> pb.GenerateRequest:
    """Return a request whose prompt no other of its kind has."""
    ids = [(seed * 7919 + at * at * 31) % 250 + 1 for at in range(PROMPT_TOKENS)]
    sampling = pb.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=sampling, logits_processors=KINDS[kind])


async def ask(stub: engine_pb2_grpc.EngineAsyncStub, message: pb.GenerateRequest) -> tuple[float, list[int]]:
    """Return the time and the tokens."""
    begun_s, tokens = time.perf_counter(), list[int]()
    async for response in stub.Generate(message):
        tokens += response.token_ids
    return time.perf_counter() - begun_s, tokens


async def measure(address: str, args: argparse.Namespace) -> Findings:
    """Ask everything."""
    findings = Findings()
    expected: dict[int, list[int]] = {}
    async with grpc.aio.insecure_channel(address) as channel:
        stub: engine_pb2_grpc.EngineAsyncStub = engine_pb2_grpc.EngineStub(channel)
        await ask(stub, request(0, 4, PLAIN))
        for _ in range(args.rounds):
            for kind in KINDS:
                for at_once in (1, args.concurrency):
                    begun_s = time.perf_counter()
                    asked = [ask(stub, request(seed, args.max_tokens, kind)) for seed in range(at_once)]
                    answers = await asyncio.gather(*asked)
                    key = kind, at_once
                    findings.seconds[key] = min(findings.seconds[key], time.perf_counter() - begun_s)
                    for seed, (_, tokens) in enumerate(answers):
                        findings.differ[kind] += expected.setdefault(seed, tokens) != tokens
                one = [request(seed, args.max_tokens, PLAIN if seed else kind) for seed in range(args.concurrency)]
                beside = (await asyncio.gather(*(ask(stub, message) for message in one)))[1:]
                findings.beside_s[kind] = min(findings.beside_s[kind], max(total_s for total_s, _ in beside))
    return findings


def report(findings: Findings, concurrency: int) -> str:
    """Return the table."""
    rows = []
    for kind in KINDS:
        speeds = [findings.seconds[PLAIN, many] / findings.seconds[kind, many] for many in (1, concurrency)]
        speeds.append(findings.beside_s[PLAIN] / findings.beside_s[kind])
        rows.append([kind, *(number(speed, 2, "x") for speed in speeds), str(findings.differ[kind])])
    heads = ("processor", "speed at 1", f"speed at {concurrency}", "others beside one", "answers that differ")
    return table(heads, rows)


def main() -> int:
    """Measure and print."""
    parser = harness_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add_engine_flags(parser, "model", "device", "threads")
    add("--num-draft-tokens", type=int, default=0, help="drafts per step (default 0)")
    add("--concurrency", type=int, default=8, help="requests at once (default 8)")
    add("--max-tokens", type=int, default=96, help="tokens of an answer (default 96)")
    add("--rounds", type=int, default=3, help="rounds, the best of which counts (default 3)")
    args = parser.parse_args()
    flags = [word for entry in ENTRIES for word in ("--logits-processor", entry)]
    options = engine_options(args, prefix_cache=False, extra=("--stream-pace-ms", "0", *flags))
    try:
        with EngineServer(options) as server:
            findings = asyncio.run(measure(server.address, args))
    except ServerFailed as error:
        print(error, file=sys.stderr)
        return 1
    about = f"{args.model} on {args.device}, {args.threads} threads, K = {args.num_draft_tokens}"
    print(f"{about}\n\n{report(findings, args.concurrency)}")
    return 0
