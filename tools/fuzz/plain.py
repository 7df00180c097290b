"""`python -m tools.fuzz.plain TARGET [libFuzzer's flags] [corpora]`: one target on inputs that only its mutations make.

It has no coverage to guide it, and makes ten times as many inputs as child.py in the same time. Takes the flags
-max_total_time, -runs, -seed, -max_len and -artifact_prefix, and ignores others. Invariant: whatever ends the process,
the input that it ran is in the file `current` of the artifacts' folder.

Not responsible for: what is done with it (see __main__.py).
"""

from __future__ import annotations

import logging
import mmap
import re
import resource
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from tools.fuzz.target import Target
from tools.fuzz.targets import load

PROGRESS = "executions"
REPORT_S = 1.0
POOL = 1000
"""Made inputs from which others are made."""
_KEEP = 0.05
_LENGTH_BYTES = 8
_MAX_BYTES = 1 << 16


class Current:
    """The input that runs, in a file that outlives the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.write_bytes(bytes(_LENGTH_BYTES + _MAX_BYTES))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    @staticmethod
    def of(flags: Mapping[str, str]) -> Current:
        """Return the file `current` in the folder of the artifacts."""
        return Current(Path(flags.get("artifact_prefix", "./")) / "current")

    def set(self, data: bytes) -> None:
        """Note the input that is about to run."""
        data = data[:_MAX_BYTES]
        self._memory[: _LENGTH_BYTES + len(data)] = len(data).to_bytes(_LENGTH_BYTES, "little") + data

    @staticmethod
    def read(path: Path) -> bytes:
        """Return the input of a process that has ended."""
        held = path.read_bytes()
        size = int.from_bytes(held[:_LENGTH_BYTES], "little")
        return held[_LENGTH_BYTES : _LENGTH_BYTES + size]


def flags_of(arguments: Sequence[str]) -> dict[str, str]:
    """Return the flags among the arguments, without those that are no flags."""
    return {found[1]: found[2] for each in arguments if (found := re.fullmatch(r"-(\w+)=(.*)", each))}


def bounded(target: Target, flags: Mapping[str, str]) -> Target:
    """Return the target with the bound on its inputs that the flags set; theirs may only be lower."""
    most = int(flags.get("max_len") or target.max_bytes)
    return replace(target, max_bytes=min(most, target.max_bytes))


def main() -> None:
    """Run the target that the first argument names; status 1 for a defect."""
    name, *arguments = sys.argv[1:]
    flags = flags_of(arguments)
    folders = [Path(each) for each in arguments if not each.startswith("-")]
    logging.disable(logging.CRITICAL)
    target, current = bounded(load(name), flags), Current.of(flags)
    signal.signal(signal.SIGALRM, _hang)
    seeds = [path.read_bytes() for folder in folders for path in sorted(folder.iterdir()) if path.is_file()]
    random = Random(int(flags.get("seed") or secrets.randbits(32)))
    until_s = time.monotonic() + float(flags.get("max_total_time") or "inf")
    count = _loop(target, current, seeds, random, until_s, int(flags.get("runs") or 0))
    target.close()
    print(f"executed {count}", file=sys.stderr)


def _loop(target: Target, current: Current, seeds: list[bytes], random: Random, until_s: float, runs: int) -> int:
    """Run the seeds, and inputs made from them until the time or the number of runs is over; return the number."""
    pool, count, reported_s = [*seeds], 0, 0.0
    while not runs or count < runs:
        now_s = time.monotonic()
        if now_s >= until_s:
            break
        if now_s - reported_s >= REPORT_S:
            reported_s = now_s
            print(f"{PROGRESS} {count}", file=sys.stderr, flush=True)
            used_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
            if used_mb > target.memory_mb:
                raise SystemExit(f"{used_mb} MB of memory, at most {target.memory_mb} are allowed")
        data = seeds[count] if count < len(seeds) else target.mutate(random.choice(pool), random)[: target.max_bytes]
        if random.random() < _KEEP:
            if len(pool) < len(seeds) + POOL:
                pool.append(data)
            else:
                pool[random.randrange(len(seeds), len(pool))] = data
        current.set(data)
        signal.alarm(target.timeout_s)
        target.run(data)
        signal.alarm(0)
        count += 1
    return count


def _hang(*_: object) -> None:
    print("a hang:", file=sys.stderr)
    traceback.print_stack()
    raise SystemExit(1)


if __name__ == "__main__":
    main()
