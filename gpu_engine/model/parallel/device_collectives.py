"""The collectives of ranks on devices: nodes of each rank's graph, whose forwards rank 0 announces from host to host.

A rank on a device may not read what another rank sent before it enqueues its own work. So a forward is announced twice:
its kind and shape by `Plans`, over a group of the hosts and ahead of the forward, and its ids, positions and pages by a
broadcast of the devices, which is the forward's first node. A rank's part of a sum is gathered, and the parts are added
in the order of the ranks as on a CPU, so no bit depends on how NCCL adds. Invariant: every rank enqueues the same
collectives in the same order. Not responsible for: the graphs (see step/device/rank_graphs.py).

Shapes: N rows, V columns of the logits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from gpu_engine.model.parallel.collectives import Call, Collectives


class Plan(NamedTuple):
    """A call that the other ranks take part in."""

    call: Call
    numbers: tuple[int, ...]
    """At most 3; of a forward the lanes, the positions of each, and the numbers of its broadcast."""
    captured: bool = False
    """The other ranks replay a graph of it, as rank 0 does."""


class _Captured(threading.local):
    plans: list[Plan] | None = None


class Plans:
    """Announces calls to the hosts of the other ranks. Used by the thread that enqueues rank 0's work.

    Args:
        hosts: the group of the hosts.
    """

    def __init__(self, hosts: Collectives) -> None:
        self._hosts, self._captured = hosts, _Captured()

    def announce(self, plan: Plan) -> None:
        """Send a plan; while this thread captures a graph, keep it for the graph's replays. Raises RankLost."""
        if self._captured.plans is not None:
            self._captured.plans.append(plan._replace(captured=True))
            return
        numbers = (*plan.numbers, *[0] * (3 - len(plan.numbers)))
        self._hosts.send(plan.call, *numbers, int(plan.captured))

    @contextmanager
    def capturing(self) -> Iterator[list[Plan]]:
        """Yield the plans that this thread announces inside the `with` block, which are not sent."""
        plans: list[Plan] = []
        self._captured.plans = plans
        try:
            yield plans
        finally:
            self._captured.plans = None

    def receive(self) -> Plan:
        """Wait for the next plan, on another rank than 0. Raises RankLost."""
        message = self._hosts.receive()
        *numbers, captured = message.numbers
        return Plan(message.call, tuple(numbers), bool(captured))


@dataclass(slots=True, eq=False)
class DeviceCollectives(Collectives):
    """One rank's end of a group of devices. Its calls enqueue, on the current stream, and wait for nothing."""

    plans: Plans | None = field(kw_only=True)

    def gather(self, own_NS: torch.Tensor, num_columns: int) -> torch.Tensor | None:
        """Bring every rank's columns to rank 0; see `Collectives.gather`. Every rank receives all."""
        parts_RNS = self._of_all(own_NS)
        if self.rank:
            return None
        return parts_RNS.transpose(0, 1).reshape(len(own_NS), -1)[:, :num_columns].contiguous()

    def send(self, call: Call, *numbers: int, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Announce a call, and broadcast integer tensors as int32. Only on rank 0. Raises RankLost."""
        assert self.plans is not None, "rank 0 announces"
        length = sum(tensor.numel() for tensor in tensors)
        self.plans.announce(Plan(call, (*numbers, length) if tensors else numbers))
        if tensors:
            self._broadcast(torch.cat([tensor.reshape(-1).int() for tensor in tensors]))

    def take(self, length: int) -> torch.Tensor:
        """Return the int32 numbers that rank 0 broadcasts with its next call. Only on the other ranks."""
        numbers = torch.empty(length, dtype=torch.int32, device=self.device)
        self._broadcast(numbers)
        return numbers

    def _of_all(self, part: torch.Tensor) -> torch.Tensor:
        parts_R = part.new_empty(self.size, *part.shape)
        whole, own = parts_R.view(torch.uint8).view(-1), part.contiguous().view(torch.uint8).view(-1)
        self._wait(lambda: self.group._allgather_base(whole, own))
        return parts_R
