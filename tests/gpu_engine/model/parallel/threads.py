"""A model over ranks that are threads of the test's process: the collectives are gloo's, as between processes.

Not responsible for: processes (see test_rank_processes.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.errors import RankLost
from gpu_engine.model.fused_forward import FusedForward
from gpu_engine.model.loader import LoadedModel, load_shard
from gpu_engine.model.parallel.collectives import Call, Collectives, open_group
from gpu_engine.model.parallel.device_collectives import Plans
from gpu_engine.model.parallel.division import lead
from gpu_engine.model.parallel.forward import Follower, add_over_ranks
from gpu_engine.model.parallel.shards import Shard
from kernels.kv_pages import KVPages, copy_page

CPU = torch.device("cpu")


class FollowedRanks:
    """A `RankSet` whose other ranks follow `collectives`, one engine after another: nothing watches or ends them."""

    plans: Plans | None = None
    collectives: Collectives

    def allocate_pages(self, num_pages: int, page_size: int) -> None:
        self.collectives.send(Call.ALLOCATE, num_pages, page_size)

    def copy_page(self, pages: list[KVPages], source: int, target: int) -> None:
        self.collectives.send(Call.COPY, source, target)
        copy_page(pages, source, target)

    def watch(self, lost: Callable[[], None]) -> None:
        pass

    def wake(self, engine: Callable[[], None]) -> None:
        pass

    def step_along(self) -> bool:
        return False

    def check(self) -> None:
        pass

    def close(self) -> None:
        """An engine has ended; the ranks follow the next one."""


class ThreadRanks(FollowedRanks):
    """A `RankSet` of threads. `model` is rank 0's; engines of one size of cache may run on it one after another."""

    def __init__(self, config: EngineConfig, store: Path) -> None:
        self._size = config.tensor_parallel_size
        self._store = store
        own, *others = (load_shard(config, Shard(rank, self._size)) for rank in range(self._size))
        self._threads = [
            threading.Thread(target=self._follow, args=(rank, *loaded), daemon=True)
            for rank, loaded in enumerate(others, 1)
        ]
        for thread in self._threads:
            thread.start()
        self.collectives = Collectives(open_group(store, 0, self._size), 0, self._size, CPU)
        self.model: LoadedModel = lead(*own, self.collectives, self)

    def _follow(self, rank: int, model: LoadedModel, forward: FusedForward) -> None:
        collectives = Collectives(open_group(self._store, rank, self._size), rank, self._size, CPU)
        add_over_ranks(forward, collectives)
        try:
            Follower(forward, collectives, model.allocate_pages).run()
        except RankLost:
            return

    def end(self) -> None:
        """End the threads."""
        self.collectives.group = None
        for thread in self._threads:
            thread.join(5)
