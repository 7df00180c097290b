"""`python -m benchmarks [NAME] ...`: runs one of the harnesses; `serve` when no name is given.

Invariant: every harness is listed in `HARNESSES`, with the line that `--help` prints for it. One that cannot run exits
with 2, after a line that says why.
Not responsible for: what a harness measures (see the module of that name).
"""

from __future__ import annotations

import importlib
import signal
import sys
from types import FrameType

from benchmarks.harness.failure import CannotRun

DEFAULT = "serve"

HARNESSES = {
    "serve": ("speed", "speed of this engine, OpenVINO, llama.cpp, vLLM and transformers on the same prompts"),
    "drafts": ("speed", "tokens per second with drafts and without, in turn"),
    "builds": ("speed", "tokens per second of two builds of this engine, in turn"),
    "gateway": ("speed", "tokens per second over HTTP and over gRPC, in turn"),
    "prefixes": ("speed", "time to the first token with and without the prefix cache"),
    "agents": ("speed", "many short calls with shared tools, with and without the prefix cache"),
    "disaggregated": ("speed", "time to the first token and gaps: one engine, and one for prefill with one for decode"),
    "distributed": ("speed", "a model over several processes and in one: equal tokens, and time by part"),
    "bench_adapters": ("speed", "time of a step's forward with LoRA adapters"),
    "bench_forward": ("speed", "time of a forward with fused and with separate layers"),
    "bench_step": ("speed", "time of a step on a CPU, guided and free in turn, and its part outside of the forward"),
    "bench_products": ("speed", "time of products over blocks on the vector unit and on the matrix unit of this CPU"),
    "bench_sidecar": ("speed", "time in which the grammar process answers a step"),
    "safeguards": ("cost", "tokens per second with verification, the way back, the repetition guard, bounds"),
    "starts": ("cost", "time and memory of a start by shape and kind of file, next to llama.cpp and OpenVINO"),
    "tensors": ("cost", "time of answers with logits, hidden states and results of modules, and without"),
    "beams": ("cost", "time of a step of a beam search and of as many sampled sequences, in turn"),
    "processors": ("cost", "time of answers with logits processors of each kind, and without"),
    "lossless": ("quality", "token ids with speculation and without, alone and in a batch"),
    "token_ids": ("quality", "token ids of this build, recorded or compared with a record"),
    "acceptance": ("quality", "tokens per step of guided answers, by drafter"),
    "pareto": ("quality", "tokens/s of a user over tokens/s of all, by drafter, K and number of users"),
    "quantisation": ("quality", "perplexity, divergence, greedy answers and extraction, by quantisation"),
    "kinds": ("quality", "logits of each kind of GGUF file next to float32, and equal tokens with drafts"),
    "exact": ("quality", "distributions of exact and of masked answers next to the model's given the grammar"),
    "schemas": ("quality", "validity of complete answers, judged by jsonschema"),
    "function_calls": ("quality", "calls of bfcl-eval's functions over HTTP: they fit, with equal tokens with drafts"),
    "closing": ("quality", "answers that end within max_tokens, and whether they are valid"),
    "maskbench": ("quality", "masks of the backends on MaskBench's instances: time and correctness"),
    "isolation": ("faults", "latency of steady streams under hostile grammars and kills of the grammar process"),
    "overtaking": ("faults", "wait of small grammars while other clients compile hostile ones"),
    "under_vllm": (
        "faults",
        "the grammar process under vLLM, next to vLLM's own backends: schemas, hostile ones, kills",
    ),
    "soak": ("faults", "memory, descriptors, slots and latency under random traffic and faults"),
    "receipts": ("faults", "receipts of random traffic under kills and restarts: each replays equal"),
    "fuzz_grammars": ("faults", "outcomes of mutated and random grammars of every kind"),
    "bench_gpu": ("gpu", "every figure that needs a GPU, in sections"),
    "bench_sync": ("gpu", "cost of a post and an await in each synchronisation mode"),
    "bench_graph": ("gpu", "time of a captured step"),
    "bench_kernels": ("gpu", "time of each kernel"),
}
"""Name -> (folder of the module, what it measures)."""


def usage() -> str:
    """Return the text of `--help`: every harness with one line."""
    lines = [f"usage: python -m benchmarks [NAME] [FLAGS]   (default: {DEFAULT}; NAME --help lists its flags)"]
    for room in dict.fromkeys(room for room, _ in HARNESSES.values()):
        lines.append(f"\n{room}:")
        lines += [f"  {name:<15} {line}" for name, (each, line) in HARNESSES.items() if each == room]
    return "\n".join(lines)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main() -> int:
    """Run the harness that the first argument names."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    if arguments and not arguments[0].startswith("-") and arguments[0] not in HARNESSES:
        print(f"python -m benchmarks: no harness is called {arguments[0]!r}\n\n{usage()}", file=sys.stderr)
        return 2
    name = arguments.pop(0) if arguments and arguments[0] in HARNESSES else DEFAULT
    sys.argv = [f"python -m benchmarks {name}", *arguments]
    signal.signal(signal.SIGTERM, _exit)  # with the contexts on the stack, so that servers stop in order
    try:
        return int(importlib.import_module(f"benchmarks.{HARNESSES[name][0]}.{name}").main() or 0)
    except CannotRun as failure:
        print(f"cannot run: {failure}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
