"""An attack in a process of its own: `python -m benchmarks.faults.attacker NAME ADDRESS RATE`, until SIGTERM.

Invariant: the streams that are watched share no event loop and no GIL with what is done to the server, so that a gap is
the server's or the machine's. It prints its counts as JSON when it ends. Not here: what an attack does (`attacks`).
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable

from benchmarks.faults.attacks import Attack, Outcomes, Target, flood, hostile

_REMOTE: dict[str, Callable[[float], Attack]] = {
    "flood": flood,
    "hostile": hostile,
    "requests": lambda per_second: hostile(per_second, guided=False),
}


def elsewhere(name: str, per_second: float) -> Attack:
    """Return the attack `name` ("flood", "hostile", "requests"), run by a process of its own."""
    assert name in _REMOTE, name

    async def attack(target: Target, outcomes: Outcomes) -> None:
        command = (sys.executable, "-m", "benchmarks.faults.attacker", name, target.address, f"{per_second:g}")
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        try:
            await process.wait()
            raise RuntimeError(f"benchmarks.faults.attacker {name} ended by itself with {process.returncode}")
        finally:
            if process.returncode is None:
                process.terminate()
            told, _ = await process.communicate()
            outcomes.update(json.loads(told or b"{}"))

    return attack


async def run(name: str, address: str, per_second: float) -> Outcomes:
    """Attack until SIGTERM; return what was done and answered."""
    outcomes = Outcomes()
    task = asyncio.create_task(_REMOTE[name](per_second)(Target(address, None), outcomes), name="attack")
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()
    return outcomes


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(sys.argv[1], sys.argv[2], float(sys.argv[3])))))
