"""`python -m benchmarks [NAME] ...`: runs one of the harnesses; `serve` when no name is given."""

from __future__ import annotations

import importlib
import sys

ROOMS = {
    "serve": "speed",
    "schemas": "quality",
    "lossless": "quality",
    "token_ids": "quality",
    "closing": "quality",
    "maskbench": "quality",
    "acceptance": "quality",
    "fuzz_grammars": "faults",
    "isolation": "faults",
    "prefixes": "speed",
    "bench_channel": "speed",
    "bench_sidecar": "speed",
    "bench_forward": "speed",
    "bench_sync": "gpu",
    "bench_graph": "gpu",
    "bench_kernels": "gpu",
    "bench_gpu": "gpu",
}
"""Name of a harness -> the folder that it is in."""


def main() -> int:
    """Dispatch on the first argument."""
    arguments = sys.argv[1:]
    name = arguments.pop(0) if arguments and arguments[0] in ROOMS else "serve"
    sys.argv = [f"python -m benchmarks {name}", *arguments]
    code = importlib.import_module(f"benchmarks.{ROOMS[name]}.{name}").main()
    return int(code or 0)


if __name__ == "__main__":
    sys.exit(main())
