"""`python -m benchmarks processors`: what logits processors cost, by kind.

Invariant: each kind is sent in turn with the same requests without processors (see in_turn.py). The arguments leave
most tokens as they are; answers that differ are counted. Not responsible for: a server's cost of having processors that
no request names (see `python -m benchmarks builds`).
"""

from __future__ import annotations

from benchmarks.cost.in_turn import PLAIN, add_flags, measured
from benchmarks.harness.flags import add_engine_flags, harness_parser
from benchmarks.harness.tables import number, table
from protos.engine.v1 import engine_pb2 as pb

ROOM = "gpu_engine.processors"
ENTRIES = (
    f"ngrams={ROOM}.ngrams:NoRepeatedNgrams",
    f"end={ROOM}.long_answers:LengthPenalty",
    f'clients={ROOM}.client_tokens:ForbiddenForClient{{"clients": {{"": [0]}}}}',
)
KINDS = {
    "captured": pb.LogitsProcessor(name="ngrams", arguments='{"size": 16}'),
    "batched": pb.LogitsProcessor(name="end", arguments='{"start": 100000, "factor": 1.1}'),
    "single": pb.LogitsProcessor(name="clients"),
}

EXAMPLES = """
what it does:
  Prompts of 64 tokens, one at a time and several at once. Every answer has --max-tokens tokens. Rounds alternate
  between the kinds, and each kind's best round counts. The last column is for one request with a processor among others
  without: the time of the others.

examples:
  python -m benchmarks processors
  python -m benchmarks processors --device cuda --model DIR --concurrency 32

exit code: 0, 2 a server failed
"""


def main() -> int:
    """Measure and print."""
    parser = harness_parser(__doc__, EXAMPLES)
    add_engine_flags(parser, "model", "device", "threads")
    add_flags(parser)
    args = parser.parse_args()
    flags = tuple(word for entry in ENTRIES for word in ("--logits-processor", entry))
    kinds = {kind: {"logits_processors": [processor]} for kind, processor in KINDS.items()}
    findings = measured(args, flags, lambda info: kinds)
    rows = []
    for kind in (PLAIN, *KINDS):
        speeds = (number(speed, 2, "x") for speed in findings.speeds(kind, args.concurrency))
        rows.append([kind, *speeds, str(findings.differ[kind])])
    heads = ("processor", "speed at 1", f"speed at {args.concurrency}", "others beside one", "answers that differ")
    about = f"{args.model} on {args.device}, {args.threads} threads, K = {args.num_draft_tokens}"
    print(f"{about}\n\n{table(heads, rows)}")
    return 0
