"""`python -m benchmarks [NAME] ...`: runs one of the harnesses; `serve` when no name is given."""

from __future__ import annotations

import importlib
import sys

NAMES = (
    "serve",
    "schemas",
    "lossless",
    "closing",
    "maskbench",
    "fuzz_grammars",
    "isolation",
    "acceptance",
    "prefixes",
    "bench_channel",
    "bench_sidecar",
    "bench_sync",
    "bench_graph",
    "bench_forward",
    "bench_kernels",
    "bench_gpu",
)


def main() -> int:
    """Dispatch on the first argument."""
    arguments = sys.argv[1:]
    name = arguments.pop(0) if arguments and arguments[0] in NAMES else "serve"
    sys.argv = [f"python -m benchmarks.{name}", *arguments]
    code = importlib.import_module(f"benchmarks.{name}").main()
    return int(code or 0)


if __name__ == "__main__":
    sys.exit(main())
