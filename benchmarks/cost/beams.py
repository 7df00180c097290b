"""`python -m benchmarks beams`: the time of a beam search against that of as many sampled sequences, in turn.

Invariant: one server answers both; all answers have `max_tokens` tokens, so that both run as many steps over as many
lanes. Drafts are off for both, as they are for beams. Not responsible for: whether the answers are right (see
tests/gpu_engine/core/test_beams.py).
"""

from __future__ import annotations

import sys
import time

import grpc

from benchmarks.harness.flags import harness_parser, whole
from benchmarks.harness.measure import percentile
from benchmarks.harness.server import EngineServer, ServerOptions
from benchmarks.harness.tables import number, table
from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc

PROMPT = "The history of the sea, told by a fisherman: "
ENDLESS = "([a-z]+[ ,.]){400}"

EXAMPLES = """
examples:
  python -m benchmarks beams
  python -m benchmarks beams --width 2 --count 20

exit code: 0, 1 an answer had another length or a call was refused, 2 a server failed
"""


def request(width: int, max_tokens: int, *, searches: bool, guided: bool) -> pb.GenerateRequest:
    """Return a search with so many beams, or so many sampled sequences."""
    made = pb.GenerateRequest(text=PROMPT, sampling=pb.SamplingParams(max_tokens=max_tokens, n=width))
    if guided:
        made.grammar.regex = ENDLESS
    else:
        made.sampling.ignore_eos = True
    if searches:
        made.beam_search.beam_width = width
    else:
        made.speculation.num_draft_tokens = 0
        made.sampling.seed = 1
    return made


def step_ms(stub: engine_pb2_grpc.EngineStub, made: pb.GenerateRequest) -> float:
    """Return the time of one token of every answer, in milliseconds. Raises ValueError for a shorter answer."""
    begun_s = time.perf_counter()
    last = [response for response in stub.Generate(made, timeout=600) if response.finish_reason]
    took_s = time.perf_counter() - begun_s
    if any(response.usage.completion_tokens != made.sampling.max_tokens for response in last):
        raise ValueError("an answer has another length")
    return took_s * 1e3 / made.sampling.max_tokens


def measure(stub: engine_pb2_grpc.EngineStub, width: int, max_tokens: int, count: int, *, guided: bool) -> list[str]:
    """Ask both in turn; return a row of the table."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for i in range(count + 1):
        for searches in (True, False) if i % 2 else (False, True):
            took = step_ms(stub, request(width, max_tokens, searches=searches, guided=guided))
            if i:  # the first of each warms up
                times[searches].append(took)
    beams, sampled = times[True], times[False]
    kind = "guided" if guided else "free"
    halves = (percentile(sampled, 50), percentile(beams, 50), min(sampled), min(beams))
    ratio = number(min(beams) / min(sampled), 2, "x")
    return [kind, str(width), *(number(ms, 2, " ms") for ms in halves), ratio]


def main() -> int:
    """Measure and print."""
    parser = harness_parser(__doc__, EXAMPLES)
    parser.add_argument("--width", type=whole(1), default=4, help="beams, and sampled sequences (default: 4)")
    parser.add_argument("--max-tokens", type=whole(1), default=64, help="tokens of each answer (default: 64)")
    parser.add_argument("--count", type=whole(1), default=8, help="answers of each kind (default: 8)")
    parser.add_argument("--threads", type=whole(1), default=1, help="threads of the model (default: 1)")
    args = parser.parse_args()
    options = ServerOptions(dtype="auto", num_threads=args.threads, max_batch_size=max(4, args.width))
    try:
        with EngineServer(options) as engine, grpc.insecure_channel(engine.address) as channel:
            stub = engine_pb2_grpc.EngineStub(channel)
            rows = [measure(stub, args.width, args.max_tokens, args.count, guided=guided) for guided in (False, True)]
    except (ValueError, grpc.RpcError) as error:
        print(error, file=sys.stderr)
        return 1
    heads = ("answers", "width", "sampled, p50", "beams, p50", "sampled, least", "beams, least", "ratio of the least")
    print(table(heads, rows))
    return 0
