"""`python -m tools.fuzz.child TARGET [libFuzzer's flags] [corpora]`: one target under atheris, until libFuzzer ends it.

Invariant: the modules of the project are instrumented before they are loaded, so coverage leads to them and not to
libraries. An exception, a hang, a crash and too much memory each leave their input as an artifact, and a status.

Not responsible for: what is done with them (see __main__.py).
"""

from __future__ import annotations

import logging
import sys
import time
from random import Random

import atheris

from tools.fuzz.plain import PROGRESS, REPORT_S, Current, bounded, flags_of
from tools.fuzz.targets import load

PACKAGES = [
    "gpu_engine",
    "grammar_service",
    "http_gateway",
    "shared_mem.handover",
    "shared_mem.layout",
    "tools.fuzz.targets",
]


def main() -> None:
    """Run the target that the first argument names."""
    name, *flags = sys.argv[1:]
    current = Current.of(flags_of(flags))
    logging.disable(logging.CRITICAL)
    with atheris.instrument_imports(include=PACKAGES):
        target = bounded(load(name), flags_of(flags))
    count, reported_s = 0, time.monotonic()

    def one(data: bytes) -> None:
        nonlocal count, reported_s
        count += 1
        now_s = time.monotonic()
        if now_s - reported_s >= REPORT_S:
            reported_s = now_s
            print(f"{PROGRESS} {count}", file=sys.stderr, flush=True)
        current.set(data)
        target.run(data)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        random = Random(seed)
        # libFuzzer's own changes as well: they know what the code has compared.
        changed = atheris.Mutate(data, most) if random.random() < 0.3 else target.mutate(data, random)
        return bytes(changed[:most])

    limits = [f"-max_len={target.max_bytes}", f"-timeout={target.timeout_s}", f"-rss_limit_mb={target.memory_mb}"]
    atheris.Setup([sys.argv[0], *flags, *limits], one, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
