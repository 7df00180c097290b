"""An attack in its own process: `python -m benchmarks.faults.attacker NAME ADDRESS RATE`, until SIGTERM.

Invariant: an attack shares no event loop and no GIL with the measured streams, so that a gap in a stream comes from the
server or from the machine. The process prints its counts as JSON when it ends.
Not responsible for: the requests of an attack (see attacks.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable

from benchmarks.faults.attacks import Attack, Outcomes, Target, flood, hostile, tenant
from service_runtime.parent_death import dying_with_us

_REMOTE: dict[str, Callable[[float], Attack]] = {
    "flood": flood,
    "hostile": hostile,
    "requests": lambda per_second: hostile(per_second, guided=False),
    "tenant": tenant,
}


def elsewhere(name: str, per_second: float) -> Attack:
    """Return the attack `name` ("flood", "hostile", "requests" or "tenant"), to be run by its own process."""
    assert name in _REMOTE, name

    async def attack(target: Target, outcomes: Outcomes) -> None:
        command = (sys.executable, "-m", "benchmarks.faults.attacker", name, target.address, f"{per_second:g}")
        process = await asyncio.create_subprocess_exec(*dying_with_us(command), stdout=asyncio.subprocess.PIPE)
        try:
            await process.wait()
            raise RuntimeError(f"benchmarks.faults.attacker {name} ended by itself with {process.returncode}")
        finally:
            if process.returncode is None:
                process.terminate()
            printed, _ = await process.communicate()
            outcomes.update(json.loads(printed or b"{}"))

    return attack


async def run(name: str, address: str, per_second: float) -> Outcomes:
    """Attack until SIGTERM; return the count of each outcome."""
    outcomes = Outcomes()
    task = asyncio.create_task(_REMOTE[name](per_second)(Target(address, None), outcomes), name="attack")
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()
    return outcomes


def main() -> None:
    """Attack until SIGTERM, then print the counts."""
    # What is measured is the server: the requests' own cost is that of another machine.
    os.nice(19)
    parser = argparse.ArgumentParser(
        "python -m benchmarks.faults.attacker", description="Attack a server until SIGTERM; print outcomes as JSON."
    )
    parser.add_argument("name", choices=sorted(_REMOTE))
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("rate", type=float, help="grammars or requests per second")
    args = parser.parse_args()
    print(json.dumps(asyncio.run(run(args.name, args.address, args.rate))))


if __name__ == "__main__":
    main()
