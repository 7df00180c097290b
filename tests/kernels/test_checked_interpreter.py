"""The checked interpreter finds each kind of fault by the names of the kernel and the argument."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None or torch.cuda.is_available():
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests.kernels.checked_interpreter import checked_interpreter, warm_up


@pytest.fixture(autouse=True)
def checked() -> None:
    """In place of the fixture of all other tests, since checks do not nest."""


@triton.jit
def copy_kernel(x, out, N, FAR: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at + FAR, mask=at < N, other=0.0), mask=at < N)


@triton.jit
def reduce_kernel(x, out):
    tl.store(out, tl.load(x + tl.program_id(0)))


@triton.jit
def shift_kernel(x):
    at = tl.program_id(0)
    tl.store(x + at, tl.load(x + at + 1))


@triton.jit
def relay_kernel(x, BARRIER: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, at.to(tl.float32))
    if BARRIER:
        tl.debug_barrier()
    tl.store(x + at, tl.load(x + BLOCK - 1 - at))


@triton.jit
def count_kernel(x):
    tl.atomic_add(x, 1.0)


@triton.jit
def store_kernel(k, k_pages, table, positions, P, LANE: tl.constexpr, T: tl.constexpr):
    """As the kernel of this name for one head of one channel, for lane b + LANE."""
    b = tl.program_id(0) // P
    position = tl.load(positions + tl.program_id(0))
    page = tl.load(table + (b + LANE) * 2 + position // T)
    tl.store(k_pages + page * T + position % T, tl.load(k + tl.program_id(0)))


def test_accesses_outside_of_an_argument_are_found() -> None:
    whole = torch.arange(40.0)
    with checked_interpreter() as checked:
        copy_kernel[(2,)](whole[4:24], torch.zeros(20), 20, FAR=0, BLOCK=16)
        for far, words in ((1, "4 bytes after the last element"), (-1, "4 bytes before the first element")):
            # The neighbours are other elements of the same memory.
            with pytest.raises(InterpreterError, match=f"copy_kernel, x: load of {words}"):
                copy_kernel[(2,)](whole[4:24], torch.zeros(20), 20, FAR=far, BLOCK=16)
    assert len(checked.faults) == 2


def test_programs_that_use_what_another_one_writes_are_found() -> None:
    with checked_interpreter():
        with pytest.raises(Exception, match=r"reduce_kernel, out: programs .* write to one address"):
            reduce_kernel[(3,)](torch.arange(3.0), torch.zeros(1))
        with pytest.raises(Exception, match=r"shift_kernel, x: program .* reads what program .* writes"):
            shift_kernel[(3,)](torch.arange(4.0))
        shift_kernel[(1,)](torch.arange(4.0))
        with pytest.raises(InterpreterError, match=r"count_kernel: an atomic operation in a kernel that ATOMICS"):
            count_kernel[(2,)](torch.zeros(1))


def test_a_program_that_reads_what_it_wrote_needs_a_barrier() -> None:
    with checked_interpreter():
        with pytest.raises(Exception, match=r"relay_kernel, x: program .* reads what it wrote, without a barrier"):
            relay_kernel[(1,)](torch.zeros(8), BARRIER=False, BLOCK=8)
        x = torch.zeros(8)
        relay_kernel[(1,)](x, BARRIER=True, BLOCK=8)
    assert x.tolist() == [7, 6, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32])
def test_a_read_of_memory_that_nothing_wrote_is_found(dtype: torch.dtype) -> None:
    with checked_interpreter():
        x = torch.empty(20, dtype=dtype)
        with pytest.raises(InterpreterError, match="copy_kernel, x: a read of memory that nothing wrote"):
            copy_kernel[(2,)](x, torch.zeros(20, dtype=dtype), 20, FAR=0, BLOCK=16)
        copy_kernel[(2,)](x.fill_(1), torch.empty(20, dtype=dtype), 20, FAR=0, BLOCK=16)


def test_a_row_of_another_lane_is_found() -> None:
    k, positions = torch.arange(2.0), torch.tensor([[16], [3]], dtype=torch.int32)
    table, pages = torch.tensor([[2, 3], [1, 0], [0, 2]], dtype=torch.int32), torch.zeros(4, 1, 16, 1)
    with checked_interpreter():
        store_kernel[(2,)](k, pages, table, positions, 1, LANE=0, T=16)
        assert pages.view(4, 16)[3, 0] == 0
        assert pages.view(4, 16)[1, 3] == 1
        with pytest.raises(InterpreterError, match=r"store_kernel, k_pages: store of page 0, token 0, .* lane 0"):
            store_kernel[(2,)](k, pages, table, positions, 1, LANE=1, T=16)


def test_page_0_may_be_shared_in_a_warm_up_only() -> None:
    """No sequence owns it yet. A lane with an empty table is a fault at any other time."""
    k, positions, pages = torch.arange(17.0), torch.arange(17, dtype=torch.int32)[None], torch.zeros(4, 1, 16, 1)

    def store(page: int) -> None:
        table = torch.full((1, 2), page, dtype=torch.int32)
        store_kernel[(17,)](k, pages, table, positions, 17, LANE=0, T=16)

    with checked_interpreter():
        with warm_up():
            store(0)
            with pytest.raises(Exception, match=r"store_kernel, k_pages: programs .* write to one address"):
                store(1)
        with pytest.raises(Exception, match=r"store_kernel, k_pages: programs .* write to one address"):
            store(0)
