"""A model over two ranks, each on a recorded device of its own, in threads of the test's process.

The hosts' group is gloo's, as between processes. `FakeNccl` is the devices': each call is one node, which a replay runs
again, and meets the other rank's node of the same kind, as NCCL's kernels do. The model is unfused (see conftest.py),
so its sums are in transformers' modules.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from gpu_engine.api.errors import RankLost
from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.fusion import Fused
from gpu_engine.model.loader import LoadedModel, _load
from gpu_engine.model.parallel.collectives import Collectives, open_group
from gpu_engine.model.parallel.device_collectives import DeviceCollectives, Plans
from gpu_engine.model.parallel.forward import LeadingForward, SummedProduct
from gpu_engine.model.parallel.shards import Shard
from gpu_engine.step.device.rank_graphs import DeviceFollower
from kernels.kv_pages import KVPages
from tests.gpu_engine.device.recorded_stream import RecordedStream, is_capturing, opaque
from tests.gpu_engine.harness import PATIENCE_S, config
from tests.gpu_engine.model.parallel.threads import FollowedRanks

CPU = torch.device("cpu")
SIZE = 2


@dataclass(eq=False)
class Link:
    """Where the nodes of all ranks meet."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(SIZE))
    sent: list[tuple[str, torch.Tensor]] = field(default_factory=lambda: [("", torch.empty(0))] * SIZE)
    met: int = 0

    def meet(self, rank: int, kind: str, own: torch.Tensor) -> list[torch.Tensor]:
        """Return the memory of every rank, which none changes before all have read it (`leave`)."""
        self.sent[rank] = kind, own
        self.barrier.wait(PATIENCE_S)
        kinds = {(name, tuple(tensor.shape)) for name, tensor in self.sent}
        assert len(kinds) == 1, f"the ranks are at different collectives: {kinds}"
        return [tensor for _, tensor in self.sent]

    def leave(self) -> None:
        if self.barrier.wait(PATIENCE_S) == 0:
            self.met += 1


class Enqueued:
    def wait(self) -> None:
        """NCCL's: the current stream waits, and the host does not."""


@dataclass(eq=False)
class FakeNccl:
    """One rank's end of the devices' group."""

    link: Link
    rank: int

    def _allgather_base(self, whole: torch.Tensor, own: torch.Tensor) -> Enqueued:
        opaque(self._gather)(whole, own)
        return Enqueued()

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Enqueued:
        assert (options.rootRank, options.rootTensor, len(tensors)) == (0, 0, 1)
        if is_capturing():
            with _disable_current_modes():
                tensors[0].zero_()  # a real capture looks up no embedding
        opaque(self._send)(tensors[0])
        return Enqueued()

    def _gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        whole.copy_(torch.cat(self.link.meet(self.rank, "gather", own)))
        self.link.leave()

    def _send(self, numbers: torch.Tensor) -> None:
        first = self.link.meet(self.rank, "broadcast", numbers)[0]
        if self.rank:
            numbers.copy_(first)
        self.link.leave()


@dataclass(eq=False)
class Unfused:
    """The forward of a rank's part through the model's own modules, with the sums in them."""

    part: LoadedModel

    @property
    def layers(self) -> Sequence[object]:
        return tuple(self.part.net.get_decoder().layers)

    def logits(self, ids_BP: torch.Tensor, ctx: AttentionContext) -> torch.Tensor:
        return self.part.logits(ids_BP, ctx)

    def fill(self, ids_BP: torch.Tensor, ctx: AttentionContext) -> None:
        self.part.prefill(ids_BP, ctx)


def part_of(model: str, rank: int, collectives: Collectives) -> Unfused:
    part = _load(config(model=model, fuse_parts=False, tensor_parallel_size=SIZE), None, "model", Shard(rank, SIZE))
    for layer in part.net.get_decoder().layers:
        layer.self_attn.o_proj = SummedProduct(layer.self_attn.o_proj, collectives)
        layer.mlp.down_proj = SummedProduct(layer.mlp.down_proj, collectives)
    return Unfused(replace(part, fused=Fused()))


class DeviceRanks(FollowedRanks):
    """A `RankSet` of a thread with a recorded device of its own. `model` is rank 0's."""

    def __init__(self, model: str, store: Path) -> None:
        self.link, self.stream = Link(), RecordedStream()
        self.failed: list[BaseException] = []
        self._hosts: dict[int, Collectives] = {}
        self._store, self._model = store, model
        self._thread = threading.Thread(target=self._follow, name="rank 1", daemon=True)
        self._thread.start()
        self.collectives, self.plans = self._open(0)
        own = part_of(model, 0, self.collectives)
        leading = LeadingForward(own, self.collectives, own.part.vocab_size)
        self.model = replace(own.part, fused=Fused(forward=leading), ranks=self)

    def _open(self, rank: int) -> tuple[DeviceCollectives, Plans]:
        hosts = Collectives(open_group(self._store, rank, SIZE), rank, SIZE, CPU)
        self._hosts[rank] = hosts
        plans = Plans(hosts)
        return DeviceCollectives(FakeNccl(self.link, rank), rank, SIZE, CPU, plans=plans), plans

    def _follow(self) -> None:
        collectives, plans = self._open(1)
        own = part_of(self._model, 1, collectives)
        allocate: Callable[[int, int], list[KVPages]] = partial(own.part.allocate_pages, token_major=True)
        self.follower = DeviceFollower(self.stream, own, collectives, plans, allocate)
        try:
            self.follower.run()
        except RankLost:
            return
        except BaseException as error:
            self.failed.append(error)
            self.link.barrier.abort()
            raise

    def end(self) -> None:
        self._hosts[0].group = None  # the thread's wait for a plan ends with an error
        self._thread.join(PATIENCE_S)
        self.stream.close()
        assert self.failed == []
