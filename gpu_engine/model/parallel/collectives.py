"""What the ranks of a model do together: announce a forward, add its parts, bring the logits to rank 0, swap rows.

A thin layer over a backend of torch.distributed, which `open_group` chooses: gloo. Invariant: a row of a sum has the
same bits for any number of rows, because the parts are added in the order of the ranks; the usual all-reduce adds each
piece of its buffer in an order that depends on the buffer's size. So drafts stay lossless. Every rank makes the same
calls in the same order. Not responsible for: the processes (see ranks.py), what is announced (see forward.py).

Shapes: N rows, H channels, V columns of the logits.
"""

from __future__ import annotations

import datetime
import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, ProcessGroupGloo

from gpu_engine.api.errors import RankLost

TIMEOUT_S = 4.0
"""Longest wait inside a forward for another rank, which is at the same part of the same layer."""
_MESSAGE = 4096
"""Numbers of a message that is one broadcast: the ids, positions and page tables of most steps."""
_HEADER = 8
_NEVER = datetime.timedelta(days=365)
"""Ranks wait for the next forward without a limit: the watch of the processes ends them (see ranks.py)."""


class Call(enum.IntEnum):
    """The kinds of message."""

    LOGITS = 1
    """Run a forward and give the logits of its rows."""
    FILL = 2
    """Run a forward for its keys and values."""
    FILL_THROUGH = 3
    """The same, through the last layer and the norm after it."""
    ALLOCATE = 4
    """Allocate the KV cache: number of pages, page size."""
    COPY = 5
    """Copy a page into another: source, target."""


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """What rank 0 announced."""

    call: Call
    numbers: tuple[int, ...]
    """At most 4; their meaning depends on `call`."""
    payload: torch.Tensor
    """int32 [n]."""


def open_group(store: Path, rank: int, size: int) -> Any:
    """Return a process group of torch.distributed. Blocks until every rank has called this. Raises RuntimeError.

    `store` is a file that all ranks see; it does not exist before the first of them.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the class that its constructor takes
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # ranks share a host
    options._timeout = datetime.timedelta(seconds=TIMEOUT_S)
    return ProcessGroupGloo(FileStore(str(store), size), rank, size, options)


PARTS = ("send", "sum", "gather", "swap")
"""The kinds of call whose time is counted."""


@dataclass(slots=True)
class Spent:
    """Calls of one kind, and the time that this rank spent in them, waiting for others included."""

    calls: int = 0
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class Collectives:
    """One rank's end of a process group. Used by one thread at a time."""

    group: Any
    """A backend of torch.distributed, as `open_group` returns it."""
    rank: int
    size: int
    device: torch.device
    on_error: Callable[[Exception], RankLost] = field(default=lambda error: RankLost(str(error)))
    """Returns the exception for an error of the group; the watch of the processes has its reason (see ranks.py)."""
    spent: dict[str, Spent] = field(default_factory=lambda: {name: Spent() for name in PARTS})

    def sum(self, part_NH: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's part, in its dtype, the same bits on every rank. Raises RankLost.

        16-bit parts are added in fp32 and rounded once.
        """
        begun_s = time.perf_counter()
        parts_RNH = self._of_all(part_NH)
        total_NH = parts_RNH[0].float()
        for part in parts_RNH[1:]:
            total_NH = total_NH.add_(part)
        self._count("sum", begun_s)
        return total_NH.to(part_NH.dtype)

    def gather(self, own_NS: torch.Tensor, num_columns: int) -> torch.Tensor | None:
        """Bring every rank's columns to rank 0: [N, V] there, and None on the others. Raises RankLost.

        Every rank has as many columns; those after the first `num_columns` of all are dropped.
        """
        begun_s = time.perf_counter()
        options = dist.GatherOptions()
        options.rootRank = 0
        own_NS = own_NS.contiguous()
        if self.rank:
            self._wait(lambda: self.group.gather([], _bytes([own_NS]), options))
            return None
        N, S = own_NS.shape
        parts_RNS = own_NS.new_empty(self.size, N, S)
        self._wait(lambda: self.group.gather([_bytes(list(parts_RNS.unbind()))], _bytes([own_NS]), options))
        whole_NV = own_NS.new_empty(N, num_columns)
        for rank, part_NS in enumerate(parts_RNS):
            columns = whole_NV[:, rank * S : (rank + 1) * S]
            columns.copy_(part_NS[:, : columns.shape[1]])
        self._count("gather", begun_s)
        return whole_NV

    def rendezvous(self) -> None:
        """Wait for every rank. After this no rank reads the store any more. Raises RankLost."""
        self.every(torch.zeros(1, dtype=torch.int64, device=self.device))

    def every(self, own_n: torch.Tensor) -> torch.Tensor:
        """Return every rank's numbers, int64 [ranks, n]; `own_n` are this rank's. Raises RankLost."""
        begun_s = time.perf_counter()
        all_Rn = own_n.new_empty(self.size, len(own_n))
        self._wait(lambda: self.group.allgather([list(all_Rn.unbind())], [own_n.contiguous()]))
        self._count("swap", begun_s)
        return all_Rn

    def swap(self, rows_NH: torch.Tensor, sent_R: list[int], received_R: list[int]) -> torch.Tensor:
        """Send each rank its number of the rows, in the order of the ranks; return the rows that they sent, in that
        order. Raises RankLost.
        """
        begun_s = time.perf_counter()
        theirs_MH = rows_NH.new_empty(sum(received_R), rows_NH.shape[1])
        theirs, rows = _bytes([theirs_MH, rows_NH.contiguous()])
        self._wait(lambda: self.group.alltoall_base(theirs, rows, received_R, sent_R))
        self._count("swap", begun_s)
        return theirs_MH

    def send(self, call: Call, *numbers: int, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Announce a call to the other ranks: at most 4 numbers, and integer tensors, which travel as int32.

        Only on rank 0. Raises RankLost.
        """
        begun_s = time.perf_counter()
        message = torch.zeros(_MESSAGE, dtype=torch.int32, device=self.device)
        sizes = [tensor.numel() for tensor in tensors]
        length = sum(sizes)
        for place, number in enumerate((call, length, *numbers)):
            message[place] = number  # one at a time: a graph can keep constants, and no copy from the host's memory
        fits = _HEADER + length <= _MESSAGE
        body = message[_HEADER : _HEADER + length] if fits else message.new_empty(length)
        for part, tensor in zip(body.split(sizes), tensors, strict=True):
            part.copy_(tensor.reshape(-1))
        self._broadcast(message)
        if not fits:
            self._broadcast(body)
        self._count("send", begun_s)

    def receive(self) -> Message:
        """Wait for the next announcement of rank 0. Raises RankLost."""
        message = torch.empty(_MESSAGE, dtype=torch.int32, device=self.device)
        self._broadcast(message, _NEVER)
        call, length, *numbers = message[:6].tolist()
        if _HEADER + length <= _MESSAGE:
            payload = message[_HEADER : _HEADER + length]
        else:
            payload = message.new_empty(length)
            self._broadcast(payload)
        return Message(Call(call), tuple(numbers), payload)

    def _of_all(self, part: torch.Tensor) -> torch.Tensor:
        """Return every rank's part, in their order."""
        parts_R = part.new_empty(self.size, *part.shape)
        self._wait(lambda: self.group.allgather([_bytes(list(parts_R.unbind()))], _bytes([part.contiguous()])))
        return parts_R

    def _broadcast(self, tensor: torch.Tensor, timeout: datetime.timedelta | None = None) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        if timeout is not None:
            options.timeout = timeout
        self._wait(lambda: self.group.broadcast([tensor], options))

    def _wait(self, start: Callable[[], Any]) -> None:
        """Start a collective and wait for it."""
        try:
            start().wait()
        except RuntimeError as error:
            raise self.on_error(error) from error

    def _count(self, name: str, begun_s: float) -> None:
        spent = self.spent[name]
        spent.calls += 1
        spent.seconds += time.perf_counter() - begun_s

    def __repr__(self) -> str:
        return f"<Collectives rank={self.rank} of {self.size} on {self.device}>"


def _bytes(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors as bytes: no collective here computes, and each backend moves bytes."""
    return [tensor.view(torch.uint8) for tensor in tensors]
