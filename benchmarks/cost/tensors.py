"""`python -m benchmarks tensors`: what it costs to return logits, hidden states and results of modules.

Invariant: each kind of request is sent in turn with the same requests without tensors, greedy; all must give the same
tokens. Not responsible for: the tensors' values (see tests/gpu_engine/core/test_outputs.py).
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

EXAMPLES = """
what it does:
  Prompts of 64 tokens, one at a time and several at once. Every answer has --max-tokens tokens. Rounds alternate
  between the kinds, and each kind's best round counts. The last column is for one request that returns tensors among
  others that return none: the time of the others.

examples:
  python -m benchmarks tensors
  python -m benchmarks tensors --model DIR --threads 8 --concurrency 16

exit code: 0, 1 a token differed or a server failed
"""


@dataclass(slots=True)
class Findings:
    """Best times by kind and concurrency."""

    seconds: dict[tuple[str, int], float] = field(default_factory=lambda: defaultdict(lambda: float("inf")))
    first_s: dict[tuple[str, int], float] = field(default_factory=lambda: defaultdict(lambda: float("inf")))
    beside_s: dict[str, float] = field(default_factory=lambda: defaultdict(lambda: float("inf")))
    """Of the requests without tensors next to one with them."""
    num_bytes: dict[str, int] = field(default_factory=dict)
    differ: int = 0


def kinds(names: list[str]) -> dict[str, pb.ResponseOptions]:
    """Return the parts of a response by name; `names` are the model's outputs."""
    middle = [name for name in names if name.endswith(".mlp")]
    states = max((name for name in names if name.startswith("hidden_states.")), key=lambda name: int(name[14:]))
    found = {
        "generation_logits": pb.ResponseOptions(generation_logits=True),
        "context_logits": pb.ResponseOptions(context_logits=True),
        states: pb.ResponseOptions(additional_outputs=[pb.AdditionalOutput(name=states)]),
        f"{states}, context": pb.ResponseOptions(additional_outputs=[pb.AdditionalOutput(name=states, context=True)]),
    }
    for name in middle[len(middle) // 2 :][:1]:
        found[name] = pb.ResponseOptions(additional_outputs=[pb.AdditionalOutput(name=name)])
    return found


def request(seed: int, max_tokens: int, options: pb.ResponseOptions | None) -> pb.GenerateRequest:
    """Return a request whose prompt no other has."""
    ids = [(seed * 7919 + at * at * 31) % 250 + 1 for at in range(PROMPT_TOKENS)]
    sampling = pb.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=sampling, response=options)


async def ask(
    stub: engine_pb2_grpc.EngineAsyncStub, message: pb.GenerateRequest
) -> tuple[float, float, list[int], int]:
    """Return the time to the first token, the time in all, the tokens, and the bytes of tensors."""
    begun_s, first_s, tokens, size = time.perf_counter(), 0.0, list[int](), 0
    async for response in stub.Generate(message):
        if response.token_ids and not first_s:
            first_s = time.perf_counter() - begun_s
        tokens += response.token_ids
        size += sum(len(output.data) for output in response.outputs)
    return first_s, time.perf_counter() - begun_s, tokens, size


async def measure(address: str, args: argparse.Namespace) -> Findings:
    """Ask everything."""
    findings = Findings()
    expected: dict[int, list[int]] = {}
    async with grpc.aio.insecure_channel(address, [("grpc.max_receive_message_length", -1)]) as channel:
        stub: engine_pb2_grpc.EngineAsyncStub = engine_pb2_grpc.EngineStub(channel)
        info: pb.GetModelInfoResponse = await stub.GetModelInfo(pb.GetModelInfoRequest())
        every: dict[str, pb.ResponseOptions | None] = {PLAIN: None, **kinds(list(info.output_names))}
        await ask(stub, request(0, 4, None))
        for _ in range(args.rounds):
            for name, options in every.items():
                for at_once in (1, args.concurrency):
                    begun_s = time.perf_counter()
                    asked = [ask(stub, request(seed, args.max_tokens, options)) for seed in range(at_once)]
                    answers = await asyncio.gather(*asked)
                    key = name, at_once
                    findings.seconds[key] = min(findings.seconds[key], time.perf_counter() - begun_s)
                    findings.first_s[key] = min(findings.first_s[key], *(first_s for first_s, *_ in answers))
                    findings.num_bytes[name] = answers[0][3]
                    for seed, (_, _, tokens, _) in enumerate(answers):
                        findings.differ += expected.setdefault(seed, tokens) != tokens
                one = [request(seed, args.max_tokens, None if seed else options) for seed in range(args.concurrency)]
                beside = (await asyncio.gather(*(ask(stub, message) for message in one)))[1:]
                findings.beside_s[name] = min(findings.beside_s[name], max(total_s for _, total_s, _, _ in beside))
    return findings


def report(findings: Findings, concurrency: int) -> str:
    """Return the table."""
    rows = []
    for name, size in findings.num_bytes.items():
        speeds = [findings.seconds[PLAIN, many] / findings.seconds[name, many] for many in (1, concurrency)]
        first = [findings.first_s[name, many] * 1e3 for many in (1, concurrency)]
        beside = findings.beside_s[PLAIN] / findings.beside_s[name]
        cells = [number(size / 1e6, 1, " MB"), number(speeds[0], 2, "x"), number(first[0], 0, " ms")]
        rows.append([name, *cells, number(speeds[1], 2, "x"), number(first[1], 0, " ms"), number(beside, 2, "x")])
    heads = ("tensors", "each", "speed at 1", "TTFT", f"speed at {concurrency}", "TTFT", "others beside one")
    return f"{table(heads, rows)}\nanswers that differ: {findings.differ}"


def main() -> int:
    """Measure and print."""
    parser = harness_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add_engine_flags(parser, "model", "dtype", "device", "threads")
    add("--num-draft-tokens", type=int, default=0, help="drafts per step (default 0)")
    add("--concurrency", type=int, default=8, help="requests at once (default 8)")
    add("--max-tokens", type=int, default=96, help="tokens of an answer (default 96)")
    add("--rounds", type=int, default=3, help="rounds, the best of which counts (default 3)")
    args = parser.parse_args()
    options = engine_options(args, prefix_cache=False, extra=("--stream-pace-ms", "0"))
    try:
        with EngineServer(options) as server:
            findings = asyncio.run(measure(server.address, args))
    except ServerFailed as error:
        print(error, file=sys.stderr)
        return 1
    drafts = f"K = {args.num_draft_tokens}"
    print(f"{args.model} {args.dtype}, {args.threads} threads, {drafts}\n\n{report(findings, args.concurrency)}")
    return int(findings.differ > 0)
