"""Triton's interpreter with every access to memory checked: it finds races and stray reads that a CPU hides.

The interpreter runs the programs of a launch one after the other on plain addresses, so a read past the end, or of
what another program writes, goes unnoticed. Here each pointer carries its argument's number in its upper bits, and the
accesses of a launch are kept until its end. `MemoryFault` names the kernel, the argument and the fault:

- an access outside of the elements of its argument;
- a key or value outside of the positions of the program's lane (`LANE_OF`);
- two programs that write to one address, unless `EQUAL_WRITES` names the kernel and the bytes are equal, or the launch
  is in a warm-up and the address in page 0, which no sequence owns yet (`warm_up`);
- a program that reads what another program of the launch writes;
- a program that reads what it wrote before, without a barrier: another thread of it may have written;
- a read of memory that nothing wrote: what `torch.empty` and its like return holds `POISON`.

Atomic operations may share an address with each other, in the kernels of `ATOMICS`.
Not responsible for: the order of launches (see recorded_stream.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

Array = npt.NDArray[Any]
Grid = tuple[int, int, int]

_TAG = np.uint64(48)
_ADDRESS = np.uint64((1 << 48) - 1)
_POISON_BYTES = b"\xed\x7f"
POISON = {size: int.from_bytes(_POISON_BYTES * (size // 2), "little") for size in (2, 4, 8)}
"""What memory that nothing wrote holds, by bytes of an element: NaN in each floating type, and a large integer. Types
of one byte are not poisoned."""

EQUAL_WRITES = {"decode_kernel": "the programs of a sequence store the keys and values that they read"}
"""Kernels whose programs may write equal bytes to one address, and why."""
DISCARDS = {
    (kernel, argument)
    for kernel in ("acceptance_kernel", "tree_acceptance_kernel", "draft_kernel")
    for argument in ("best", "best_column", "peaks", "chosen")
} | {("grow_kernel", "values")}
"""Scratch of which a kernel also reads the rows that the launch before left out, and discards them: rows of idle lanes,
rows after the drafts. They hold NaN here, so a use would change a result."""
ATOMICS = {"acceptance_kernel", "tree_acceptance_kernel"}
LANE_OF: dict[str, Callable[[dict[str, Any], Grid], int]] = {
    "decode_kernel": lambda given, at: at[1] // given["Hkv"],
    "tree_decode_kernel": lambda given, at: at[1] // given["Hkv"],
    "prefill_kernel": lambda given, at: at[2],
    "store_kernel": lambda given, at: at[0] // given["P"],
}
"""The lane whose page table a program uses, by kernel."""


class MemoryFault(AssertionError):
    """An access that can have another result on a GPU; the message names the kernel, the argument and the fault."""


class Region(NamedTuple):
    """The elements of an argument: bytes from `first` up to `end`."""

    name: str
    first: int
    end: int
    storage: int


class Access(NamedTuple):
    """A load, a store or an atomic operation of one program."""

    program: Grid
    epoch: int
    """Counts the barriers of the launch."""
    kind: str
    storage: int
    addresses: Array
    size: int
    values: Array | None


class _Argument:
    """Takes a tensor's place in a launch, with the tag in its address."""

    def __init__(self, tensor: torch.Tensor, tag: int) -> None:
        self.dtype, self._address = tensor.dtype, tensor.data_ptr() | (tag << int(_TAG))

    def data_ptr(self) -> int:
        return self._address


@dataclass(eq=False)
class Launch:
    """One launch: its arguments, and what its programs access."""

    kernel: str
    given: dict[str, Any]
    """The values of the arguments, by name."""
    regions: list[Region] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)
    epoch: int = 0
    owned: dict[tuple[int, bool], Array] = field(default_factory=dict)

    def argument(self, name: str, tensor: torch.Tensor) -> _Argument:
        self.regions.append(_region(name, tensor))
        return _Argument(tensor, len(self.regions))

    def access(
        self, kind: str, program: Grid, pointers: Array, mask: Array | None, size: int, values: Array | None = None
    ) -> None:
        """Check the places of an access, and keep it for the end of the launch."""
        if mask is not None and not mask.all():
            pointers, values = pointers[mask], None if values is None else values[mask]
        if not pointers.size:
            return
        pointers = pointers.ravel()
        values = None if values is None else np.ascontiguousarray(values).ravel().view(f"u{size}")
        tags = {int(pointers.min()) >> int(_TAG), int(pointers.max()) >> int(_TAG)}
        if len(tags) == 1:
            self._access_one(kind, program, tags.pop(), pointers & _ADDRESS, size, values)
            return
        of_all = pointers >> _TAG  # a select between arguments
        for tag in np.unique(of_all):
            mine = of_all == tag
            chosen = None if values is None else values[mine]
            self._access_one(kind, program, int(tag), pointers[mine] & _ADDRESS, size, chosen)

    def _access_one(
        self, kind: str, program: Grid, tag: int, addresses: Array, size: int, values: Array | None
    ) -> None:
        first, end = int(addresses.min()), int(addresses.max()) + size
        regions = [self.regions[tag - 1]] if tag else self._by_address
        region = next((region for region in regions if region.first <= first and end <= region.end), None)
        if region is None:
            region = regions[0] if regions else Region("an address of no argument", 0, 0, 0)
            before = first < region.first
            far, of = (region.first - first, "before the first") if before else (end - region.end, "after the last")
            raise MemoryFault(f"{self.kernel}, {region.name}: {kind} of {far} bytes {of} element")
        if region.name in ("k_pages", "v_pages") and self.kernel in LANE_OF:
            self._check_lane(kind, program, region, addresses)
        self.accesses.append(Access(program, self.epoch, kind, region.storage, addresses, size, values))

    @property
    def _by_address(self) -> list[Region]:
        """The tensors whose addresses the launch takes as numbers."""
        if "addresses" not in self.given:
            return []
        like = _region("like", self.given["like"])
        return [Region("addresses", at, at + like.end - like.first, at) for at in self.given["addresses"].tolist()]

    def _check_lane(self, kind: str, program: Grid, region: Region, addresses: Array) -> None:
        """Check that pages are read up to the lane's last position, and written at the positions of the step only."""
        lane, stores = LANE_OF[self.kernel](self.given, program), kind == "store"
        pages, T = self.given[region.name], self.given["T"]
        if (lane, stores) not in self.owned:
            positions = self.given["positions"].view(-1, self.given["P"])[lane]
            count = int((positions >= 0).sum())
            tokens = torch.arange(int(positions[0]) if stores else 0, int(positions[0]) + count if count else 0)
            owned = np.zeros(len(pages) * T, dtype=bool)
            owned[(self.given["table"][lane][tokens // T].long() * T + tokens % T).numpy()] = True
            self.owned[lane, stores] = owned
        rows = (addresses - np.uint64(region.first)).astype(np.int64) // (pages.shape[3] * pages.element_size())
        places = rows // (pages.shape[1] * T) * T + rows % T
        if not self.owned[lane, stores][places].all():
            other = places[~self.owned[lane, stores][places]][0]
            raise MemoryFault(
                f"{self.kernel}, {region.name}: {kind} of page {other // T}, token {other % T}, which is no position "
                f"of lane {lane}"
            )

    def check_races(self) -> None:
        """Check the order of the accesses to the memory that the launch writes."""
        written = {access.storage for access in self.accesses if access.kind != "load"}
        shared = self._shared_pages
        for storage in written:
            accesses = [access for access in self.accesses if access.storage == storage]
            unit = min(access.size for access in accesses)
            found = [_in_units(access, unit) for access in accesses]
            if storage in shared:
                found = [access for access in (_outside(access, *shared[storage]) for access in found) if access]
            if any(access.kind != "load" for access in found):
                _Races(self, found).check()

    @property
    def _shared_pages(self) -> dict[int, tuple[int, int]]:
        """The first and last address of page 0 of keys and of values, by storage, if this is a warm-up."""
        if not _warming or self.kernel not in LANE_OF:
            return {}
        pages = {name: self.given[name] for name in ("k_pages", "v_pages") if name in self.given}
        regions = [region for region in self.regions if region.name in pages]
        return {region.storage: (region.first, region.first + pages[region.name][0].nbytes) for region in regions}

    def name_at(self, address: int) -> str:
        return next((region.name for region in self.regions if region.first <= address < region.end), "addresses")


def _region(name: str, tensor: torch.Tensor) -> Region:
    first, size = tensor.data_ptr(), tensor.element_size()
    last = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = first + (last + 1) * size if tensor.numel() else first
    return Region(name, first, end, tensor.untyped_storage().data_ptr())


def _in_units(access: Access, unit: int) -> Access:
    """Return the same access in elements of `unit` bytes."""
    if access.size == unit:
        return access
    offsets = np.arange(0, access.size, unit, dtype=np.uint64)
    values = None if access.values is None else access.values.view(f"u{unit}")
    addresses = (access.addresses[:, None] + offsets[None, :]).ravel()
    return access._replace(addresses=addresses, size=unit, values=values)


def _outside(access: Access, first: int, end: int) -> Access | None:
    """Return the part of an access that is outside of the addresses, or None."""
    kept = (access.addresses < first) | (access.addresses >= end)
    values = None if access.values is None else access.values[kept]
    return access._replace(addresses=access.addresses[kept], values=values) if kept.any() else None


class _Races:
    """The accesses to one storage, in the order in which the interpreter made them."""

    def __init__(self, launch: Launch, accesses: list[Access]) -> None:
        self._launch, self._accesses = launch, accesses

    def check(self) -> None:
        launch, writes = self._launch, [access for access in self._accesses if access.kind != "load"]
        programs = sorted({access.program for access in self._accesses})
        number = {program: place for place, program in enumerate(programs)}
        address = np.concatenate([access.addresses for access in writes])
        writer = np.concatenate([np.full(access.addresses.size, number[access.program]) for access in writes])
        source = np.concatenate([np.full(access.addresses.size, place) for place, access in enumerate(writes)])
        plain = np.array([access.kind == "store" for access in writes])
        values = np.concatenate([
            np.zeros(access.addresses.size, dtype=f"u{access.size}") if access.values is None else access.values
            for access in writes
        ])  # fmt: skip
        order = np.argsort(address, kind="stable")
        address, writer, source, values = address[order], writer[order], source[order], values[order]
        plain = plain[source]
        twice = address[1:] == address[:-1]
        unequal = (values[1:] != values[:-1]) | ~(plain[1:] & plain[:-1])
        apart, atomic = writer[1:] != writer[:-1], ~plain[1:] & ~plain[:-1]
        raced = twice & apart & ~atomic & (unequal | (launch.kernel not in EQUAL_WRITES))
        if raced.any():
            at = int(np.flatnonzero(raced)[0])
            pair = programs[writer[at]], programs[writer[at + 1]]
            raise MemoryFault(
                f"{launch.kernel}, {launch.name_at(int(address[at]))}: programs {pair} write to one address"
            )
        mixed = twice & (source[1:] == source[:-1]) & (values[1:] != values[:-1]) & plain[1:]
        if mixed.any():
            name = launch.name_at(int(address[np.flatnonzero(mixed)[0]]))
            raise MemoryFault(f"{launch.kernel}, {name}: one store writes several values to one address")
        first = np.concatenate([[True], ~twice])
        shared = np.zeros(int(first.sum()), dtype=bool)
        np.logical_or.at(shared, np.cumsum(first)[1:][twice & apart] - 1, True)
        self._check_reads(address[first], np.where(shared, -1, writer[first]), programs, number)

    def _check_reads(self, written: Array, writer: Array, programs: list[Grid], number: dict[Grid, int]) -> None:
        """Check the loads. `written`: addresses in their order; `writer`: the program of each, -1: several."""
        launch = self._launch
        for program, accesses in itertools.groupby(self._accesses, key=lambda access: access.program):
            own: list[Access] = []
            for access in accesses:
                if access.kind == "store":
                    own.append(access)
                if access.kind != "load":
                    continue
                at = np.minimum(np.searchsorted(written, access.addresses), len(written) - 1)
                hit = written[at] == access.addresses
                if not hit.any():
                    continue
                recent = [store.addresses for store in own if store.epoch == access.epoch]
                if recent and np.isin(access.addresses, np.concatenate(recent)).any():
                    name = launch.name_at(int(access.addresses[0]))
                    raise MemoryFault(
                        f"{launch.kernel}, {name}: program {program} reads what it wrote, without a barrier"
                    )
                foreign = access.addresses[hit & (writer[at] != number[program])]
                if foreign.size and own:
                    foreign = foreign[~np.isin(foreign, np.concatenate([store.addresses for store in own]))]
                if foreign.size:
                    by = writer[np.searchsorted(written, foreign[0])]
                    name, other = launch.name_at(int(foreign[0])), "several" if by < 0 else programs[by]
                    raise MemoryFault(f"{launch.kernel}, {name}: program {program} reads what program {other} writes")


@dataclass(eq=False)
class CheckedInterpreter:
    """What was checked, and what was found. One launch at a time: `opaque_launches` keeps threads apart."""

    faults: list[MemoryFault] = field(default_factory=list)
    launches: int = 0
    num_accesses: int = 0
    current: Launch | None = None
    then: Callable[[Launch], None] | None = None
    """Gets each launch at its end."""

    def loaded(self, values: Array, size: int, pointers: Array, mask: Array | None) -> None:
        """Check that a load found no poison."""
        assert self.current is not None
        if size in POISON:
            found = np.ascontiguousarray(values).view(f"u{size}") == POISON[size]
            if mask is not None:
                found &= mask
            if found.any():
                tag = int(pointers.ravel()[np.flatnonzero(found.ravel())[0]]) >> int(_TAG)
                name = self.current.regions[tag - 1].name if tag else "addresses"
                if (self.current.kernel, name) not in DISCARDS:
                    raise MemoryFault(f"{self.current.kernel}, {name}: a read of memory that nothing wrote")

    @contextmanager
    def noting(self) -> Iterator[Launch]:
        """Keep a fault: the code that launched may turn its error into a failed request."""
        assert self.current is not None
        try:
            yield self.current
        except MemoryFault as fault:
            self.faults.append(fault)
            raise


_checking: list[CheckedInterpreter] = []
_warming: list[bool] = []


@contextmanager
def warm_up() -> Iterator[None]:
    """Let the lanes of each launch inside the `with` block share page 0."""
    _warming.append(True)
    try:
        yield
    finally:
        _warming.pop()


def is_checking() -> bool:
    """Return whether memory that nothing wrote is poisoned now."""
    return bool(_checking)


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor that has just been allocated, and return it."""
    if tensor.device.type == "cpu" and tensor.element_size() > 1 and tensor.numel() and not tensor.is_quantized:
        with _disable_current_modes():  # this is no operation of the code under test
            tensor.as_strided((tensor.numel(),), (1,)).view(torch.int16).fill_(POISON[2])
    return tensor


@contextmanager
def checked_interpreter() -> Iterator[CheckedInterpreter]:
    """Check every launch of Triton's interpreter in this process, and poison what torch allocates without a value."""
    assert not _checking, "one check at a time: a second one would read the addresses of the first"
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    checked = CheckedInterpreter()
    plain_load, plain_store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    plain_rmw, plain_cas, plain_barrier = (
        getattr(InterpreterBuilder, f"create_{name}") for name in ("atomic_rmw", "atomic_cas", "barrier")
    )

    def begin(self: GridExecutor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        checked.current = launch = Launch(self.fn.__name__, given)
        made = {
            name: launch.argument(name, value) if isinstance(value, torch.Tensor) else value
            for name, value in given.items()
        }
        return [made[name] for name in self.arg_names[: len(args)]], {name: made[name] for name in kwargs}

    def end(self: GridExecutor, *_: object) -> None:
        with checked.noting() as launch:
            launch.check_races()
        checked.launches += 1
        checked.num_accesses += len(launch.accesses)
        checked.current = None
        if checked.then is not None:
            checked.then(launch)

    def load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        with checked.noting() as launch:
            size, pointers = _size(ptrs), ptrs.data
            launch.access("load", self.grid_idx, pointers, mask.data, size)
            ptrs.data = pointers & _ADDRESS
            try:
                found = plain_load(self, ptrs, mask, *rest)
            finally:
                ptrs.data = pointers
            checked.loaded(found.data, size, pointers, mask.data)
        return found

    def store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        with checked.noting() as launch:
            size, pointers = _size(ptrs), ptrs.data
            shape = pointers.shape
            launch.access("store", self.grid_idx, pointers, mask.data, size, np.broadcast_to(value.data, shape))
            ptrs.data = pointers & _ADDRESS
            try:
                return plain_store(self, ptrs, value, mask, *rest)
            finally:
                ptrs.data = pointers

    def atomic(self: Any, plain: Callable[..., Any], before: tuple[Any, ...], ptr: Any, mask: Any, *rest: Any) -> Any:
        with checked.noting() as launch:
            if launch.kernel not in ATOMICS:
                raise MemoryFault(f"{launch.kernel}: an atomic operation in a kernel that ATOMICS does not name")
            pointers = ptr.data
            launch.access("atomic", self.grid_idx, pointers, mask, _size(ptr))
            ptr.data = pointers & _ADDRESS
            try:
                return plain(self, *before, ptr, *rest)
            finally:
                ptr.data = pointers

    def rmw(self: Any, operation: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
        return atomic(self, plain_rmw, (operation,), ptr, mask.data, val, mask, *rest)

    def cas(self: Any, ptr: Any, *rest: Any) -> Any:
        return atomic(self, plain_cas, (), ptr, None, *rest)

    def barrier(self: Any) -> None:
        assert checked.current is not None
        checked.current.epoch += 1
        plain_barrier(self)

    def fills(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, **kwargs: poisoned(allocate(*args, **kwargs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "_init_args_hst", begin)
        patch.setattr(GridExecutor, "_restore_args_dev", end)
        patch.setattr(InterpreterBuilder, "create_masked_load", load)
        patch.setattr(InterpreterBuilder, "create_masked_store", store)
        patch.setattr(InterpreterBuilder, "create_atomic_rmw", rmw)
        patch.setattr(InterpreterBuilder, "create_atomic_cas", cas)
        patch.setattr(InterpreterBuilder, "create_barrier", barrier)
        for name in ("empty", "empty_like"):
            patch.setattr(torch, name, fills(getattr(torch, name)))
        patch.setattr(torch.Tensor, "new_empty", fills(torch.Tensor.new_empty))
        _checking.append(checked)
        try:
            yield checked
        finally:
            _checking.pop()


def _size(pointers: Any) -> int:
    """Return the bytes of an element that pointers point to."""
    return max(1, pointers.get_element_ty().primitive_bitwidth // 8)
