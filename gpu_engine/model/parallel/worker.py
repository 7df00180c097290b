"""The process of a rank other than 0: loads its part of the model, and runs the forwards that rank 0 announces.

Started by ranks.py, never by hand. Invariant: the process ends with rank 0, however that ends. Not responsible for:
requests, sampling, drafts and grammars, which are rank 0's.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.errors import RankLost
from gpu_engine.model.parallel.heartbeat import Heartbeat
from service_runtime.logs import configure

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run a rank. Arguments: settings, number, store, socket, process id of rank 0, log level and format."""
    settings, number, store, descriptor, parent, level, log_format = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit("rank 0 is gone")
    configure(level, log_format)
    heartbeat = Heartbeat(socket.socket(fileno=int(descriptor)))
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(settings).items()
    }
    _follow(EngineConfig(**values), int(number), Path(store), heartbeat)


def _follow(config: EngineConfig, number: int, store: Path, heartbeat: Heartbeat) -> None:
    # These import torch, which takes seconds: rank 0 has heard the first heartbeat before.
    from transformers.utils import logging as transformers_logging

    from gpu_engine.model.cache_size import cache_dtype
    from gpu_engine.model.loader import load_shard
    from gpu_engine.model.parallel.collectives import Collectives, open_group
    from gpu_engine.model.parallel.forward import Follower, add_over_ranks
    from gpu_engine.model.parallel.shards import Shard

    transformers_logging.disable_progress_bar()  # rank 0 shows its own

    size = config.tensor_parallel_size
    try:
        model, forward = load_shard(config, Shard(number, size))
    except Exception as error:
        heartbeat.fail(f"cannot load its part: {error}")
        raise
    heartbeat.ready()
    try:
        group = open_group(store, number, size)
        collectives = Collectives(group, number, size, model.device)
        collectives.rendezvous()
        add_over_ranks(forward, collectives)
        allocate = partial(model.allocate_pages, dtype=cache_dtype(config, model.dtype))
        Follower(forward, collectives, allocate).run()
    except RankLost as error:
        log.debug("rank %d ends: %s", number, error)  # rank 0 says why
        os._exit(1)


if __name__ == "__main__":
    main()
