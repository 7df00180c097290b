"""The compiled flags, seen from Python: structs that mirror native/flags.h, and the functions with their types.

Invariant: a struct here has the fields of the C struct in the same order; `ls_abi` is compared at load. Functions that
wait release the GIL. Functions that only touch a few lines hold it: while another Python thread is busy, releasing the
GIL for a microsecond cost 8-9 ms at the 99th percentile, and holding it 8-29 us. Not responsible for: the meaning of
the calls (see channel.py).
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from shared_mem.errors import NativeMissing
from shared_mem.layout import Layout

ABI = 7

DEFAULT_SPIN_NS = 20_000
"""Spin so long before parking: longer than a futex round trip on an idle machine, shorter than a scheduler tick."""

OK = 0
EMPTY = 1
NOT_IN_RING = 2
BAD_SLOT = -1
BAD_N_COMMIT = -2
BAD_N_DRAFT = -3
BAD_COMMIT_POS = -4


class View(ctypes.Structure):
    """`struct ls_view`: addresses and strides in this process's mapping."""

    _fields_: ClassVar = [
        ("words", c_void_p),
        ("rec", c_void_p),
        ("ans", c_void_p),
        ("rec_entry_stride", c_uint64),
        ("num_slots", c_uint32),
        ("num_rows", c_uint32),
        ("num_recs", c_uint32),
        ("rec_head_bytes", c_uint32),
        ("rec_stride", c_uint32),
        ("ans_stride", c_uint32),
        ("ans_forced", c_uint32),
        ("ans_late", c_uint32),
    ]

    @staticmethod
    def of(layout: Layout, address: int) -> View:
        """Return the view of a segment that is mapped at `address`; it does not own the mapping."""
        return View(
            address + layout.words_offset,
            address + layout.rec_offset,
            address + layout.ans_offset,
            layout.rec_entry_stride,
            layout.num_slots,
            layout.num_rows,
            layout.num_recs,
            layout.rec_head_bytes,
            layout.rec_stride,
            layout.ans_stride,
            layout.ans_forced_offset,
            layout.ans_late_offset,
        )


class Counter(ctypes.Structure):
    """`struct ls_counter`: the engine's private sequence."""

    _fields_: ClassVar = [("last", c_uint64), ("current", c_uint64)]

    last: int
    current: int


class PostArgs(ctypes.Structure):
    """`struct ls_post_args`."""

    _fields_: ClassVar = [
        ("view", POINTER(View)),
        ("counter", POINTER(Counter)),
        ("slots", c_void_p),
        ("slot_gens", c_void_p),
        ("commit_pos", c_void_p),
        ("n_commit", c_void_p),
        ("n_draft", c_void_p),
        ("need_rows", c_void_p),
        ("tokens", c_void_p),
        ("batch", c_int32),
        ("stage", c_int32),
        ("status", c_int32),
        ("bad_lane", c_int32),
    ]

    batch: int
    stage: int
    status: int
    bad_lane: int


class AwaitArgs(ctypes.Structure):
    """`struct ls_await_args`."""

    _fields_: ClassVar = [
        ("view", POINTER(View)),
        ("seq", c_void_p),
        ("slots", c_void_p),
        ("slot_gens", c_void_p),
        ("kinds", c_void_p),
        ("forced", c_void_p),
        ("awaited", c_void_p),
        ("batch", c_int32),
        ("missing", c_int32),
        ("deadline_ns", c_int64),
        ("timeout_ns", c_int64),
        ("spin_ns", c_int64),
        ("waited_ns", c_int64),
        ("late", c_int32),
    ]

    seq: int
    batch: int
    missing: int
    deadline_ns: int
    timeout_ns: int
    spin_ns: int
    waited_ns: int
    late: int


class RecordsArgs(ctypes.Structure):
    """`struct ls_records_args`."""

    _fields_: ClassVar = [
        ("view", POINTER(View)),
        ("slots", c_void_p),
        ("slot_gens", c_void_p),
        ("commit_pos", c_void_p),
        ("n_commit", c_void_p),
        ("n_draft", c_void_p),
        ("stage", c_void_p),
        ("need_rows", c_void_p),
        ("first", c_void_p),
        ("tokens", c_void_p),
        ("seq", c_uint64),
        ("count", c_int32),
        ("status", c_int32),
    ]

    seq: int
    count: int
    status: int


class PublishArgs(ctypes.Structure):
    """`struct ls_publish_args`."""

    _fields_: ClassVar = [
        ("view", POINTER(View)),
        ("kinds", c_void_p),
        ("forced", c_void_p),
        ("seq", c_uint64),
        ("slot", c_int32),
        ("slot_gen", c_int32),
        ("late", c_int32),
    ]

    seq: int
    slot: int
    slot_gen: int
    late: int


def library_path(directory: Path | None = None) -> Path:
    """Return the compiled library in `directory` (default: next to this file).

    Raises:
        NativeMissing: it is not there.
    """
    where = directory or Path(__file__).parent
    found = sorted(where.glob("_flags*.so"))
    if not found:
        raise NativeMissing(f"no _flags*.so in {where}: build it with `pip install -e .`")
    return found[0]


_PATH = library_path()
_waiting = ctypes.CDLL(str(_PATH))
_short = ctypes.PyDLL(str(_PATH))

if _short.ls_abi() != ABI:
    raise NativeMissing(f"{_PATH} has ABI {_short.ls_abi()}, this code needs {ABI}: build it again")

post = _short.ls_post
"""(PostArgs pointer) -> None."""
post.argtypes = [c_void_p]
post.restype = None

take = _short.ls_take
"""(AwaitArgs pointer) -> lanes that an await would still wait for; takes the answers that are there."""
take.argtypes = [c_void_p]
take.restype = c_int32

await_rows = _waiting.ls_await
"""(AwaitArgs pointer) -> None. Waits."""
await_rows.argtypes = [c_void_p]
await_rows.restype = None

set_abort = _short.ls_set_abort
"""(View pointer, value) -> None."""
set_abort.argtypes = [POINTER(View), c_uint64]
set_abort.restype = None

wait_req = _waiting.ls_wait_req
"""(View pointer, last, timeout_ns, spin_ns, address of the worker's word or None) -> newest sequence. Waits."""
wait_req.argtypes = [POINTER(View), c_uint64, c_int64, c_int64, c_void_p]
wait_req.restype = c_uint64

overdue = _waiting.ls_overdue
"""(View pointer, address of the worker's word, of the `ls_watch`, limit_ns, timeout_ns) -> 1: it is overdue. Waits."""
overdue.argtypes = [POINTER(View), c_void_p, c_void_p, c_int64, c_int64]
overdue.restype = c_int32

records = _short.ls_records
"""(RecordsArgs pointer) -> None."""
records.argtypes = [c_void_p]
records.restype = None

publish = _short.ls_publish
"""(PublishArgs pointer) -> 0, or 1 when a newer answer was there."""
publish.argtypes = [c_void_p]
publish.restype = c_int32

add_rows = _short.ls_add_rows
"""(PublishArgs pointer) -> 0, or 1 when another answer is there."""
add_rows.argtypes = [c_void_p]
add_rows.restype = c_int32

load64 = _short.ls_load64
load64.argtypes = [c_void_p]
load64.restype = c_uint64

store64 = _short.ls_store64
store64.argtypes = [c_void_p, c_uint64]
store64.restype = None

load32 = _short.ls_load32
load32.argtypes = [c_void_p]
load32.restype = c_uint32

store32 = _short.ls_store32
store32.argtypes = [c_void_p, c_uint32]
store32.restype = None

stamp = _short.ls_stamp
stamp.argtypes = [c_void_p]
stamp.restype = None

age_ns = _short.ls_age_ns
age_ns.argtypes = [c_void_p]
age_ns.restype = c_int64


def releasing(name: str) -> Any:
    """Return an exported function that releases the GIL; the caller sets its types."""
    return getattr(_waiting, name)


def holding(name: str) -> Any:
    """Return an exported function that holds the GIL, for calls of a few microseconds; the caller sets its types."""
    return getattr(_short, name)


def function_address(name: str) -> int:
    """Return the address of an exported function, for callers that are not Python (a CUDA host function)."""
    address = ctypes.cast(getattr(_waiting, name), c_void_p).value
    if address is None:
        raise NativeMissing(f"{_PATH} has no {name}")
    return address


def address_of(array: np.ndarray) -> int:
    """Return where the data of a C-contiguous array starts; the caller holds the array."""
    address: int = array.ctypes.data
    return address
