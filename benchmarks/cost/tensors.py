"""`python -m benchmarks tensors`: what it costs to return logits, hidden states and results of modules.

Invariant: each kind of request is sent in turn with the same requests without tensors (see in_turn.py); all must give
the same tokens. Not responsible for: the tensors' values (see tests/gpu_engine/core/test_outputs.py).
"""

from __future__ import annotations

from benchmarks.cost.in_turn import add_flags, measured
from benchmarks.harness.flags import add_engine_flags, harness_parser
from benchmarks.harness.tables import number, table
from protos.engine.v1 import engine_pb2 as pb

EXAMPLES = """
what it does:
  Prompts of 64 tokens, one at a time and several at once. Every answer has --max-tokens tokens. Rounds alternate
  between the kinds, and each kind's best round counts. The last column is for one request that returns tensors among
  others that return none: the time of the others.

examples:
  python -m benchmarks tensors
  python -m benchmarks tensors --model DIR --threads 8 --concurrency 16

exit code: 0, 1 a token differed, 2 a server failed
"""


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


def main() -> int:
    """Measure and print."""
    parser = harness_parser(__doc__, EXAMPLES)
    add_engine_flags(parser, "model", "dtype", "device", "threads")
    add_flags(parser)
    args = parser.parse_args()
    several = args.concurrency
    findings = measured(
        args, (), lambda info: {name: {"response": part} for name, part in kinds(list(info.output_names)).items()}
    )
    rows = []
    for name, size in findings.num_bytes.items():
        alone, together, beside = (number(speed, 2, "x") for speed in findings.speeds(name, several))
        first = [number(findings.first_s[name, many] * 1e3, 0, " ms") for many in (1, several)]
        rows.append([name, number(size / 1e6, 1, " MB"), alone, first[0], together, first[1], beside])
    heads = ("tensors", "each", "speed at 1", "TTFT", f"speed at {several}", "TTFT", "others beside one")
    differ = sum(findings.differ.values())
    print(f"{args.model} {args.dtype}, {args.threads} threads, K = {args.num_draft_tokens}\n")
    print(f"{table(heads, rows)}\nanswers that differ: {differ}")
    return int(differ > 0)
