"""Settings that depend on the machine, resolved once at the start: the device, and the threads of a forward on a CPU.

The invariant: after `resolve_placement` no setting says "auto" for the device, and every room reads the same answer.

Not responsible for: which threads run on which cores (core_split.py), or `sync` (sidecar/process.py).
"""

from __future__ import annotations

import logging
from dataclasses import replace

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.ops.core_split import MAX_SPARE

log = logging.getLogger(__name__)

CORES_TO_SHARE = 4
"""The number of usable cores from which a forward whose `num_threads` is not set leaves some of them free."""
CORES_PER_SPARE = 8
"""One in this many cores is left free: for the grammar process, and for the event loop of the engine."""


def resolve_placement(engine: EngineConfig, server: ServerConfig, *, cuda_devices: int, cores: int) -> EngineConfig:
    """Return `engine` with `device` and `num_threads` resolved, and log one line that says what was chosen.

    Args:
        engine: `device` may be "auto": the first CUDA device if there is one, else the CPU.
        server: says whether there is a grammar process.
        cuda_devices: the number of CUDA devices that torch sees; read only if `device` is "auto".
        cores: the number of usable cores.
    """
    why = "as set"
    if engine.device == "auto":
        why = f"torch sees {cuda_devices or 'no'} CUDA device{'' if cuda_devices == 1 else 's'}"
        engine = replace(engine, device="cuda" if cuda_devices else "cpu")
    if engine.device != "cpu":
        log.info("device: %s (%s)", engine.device, why)
        return engine
    if engine.num_threads == 0:
        shares = cores >= CORES_TO_SHARE and server.grammar != "none"
        spare = min(MAX_SPARE, max(1, cores // CORES_PER_SPARE)) if shares else 0
        engine = replace(engine, num_threads=max(1, (cores - spare) // engine.tensor_parallel_size))
    ranks = f"{engine.tensor_parallel_size} ranks of " if engine.tensor_parallel_size > 1 else ""
    log.info("device: cpu (%s), %s%d threads on %d usable cores", why, ranks, engine.num_threads, cores)
    return engine
