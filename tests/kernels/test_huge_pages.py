"""Tensors of mapped memory are apart from each other, and their mapping goes with the last of them."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from kernels import huge_pages
from kernels.blocks import BlockKind, PackedBlocks, can_multiply_blocks, quantised

LARGE = (40 << 20, 1)
"""Bytes that get a mapping of their own."""


def mapped_mib() -> float:
    """Return the address space of this process, in MiB."""
    return psutil.Process().memory_info().vms / 2**20


def test_tensors_do_not_overlap_and_begin_at_a_line() -> None:
    shapes = [((3, 5), torch.float16), ((7,), torch.uint8), ((2, 2, 2), torch.float32), (LARGE, torch.uint8)] * 3
    made = [huge_pages.empty(*shape, dtype=dtype, lasts=lasts) for lasts in (True, False) for shape, dtype in shapes]
    assert [(tuple(each.shape), each.dtype) for each in made] == shapes * 2
    assert all(each.is_contiguous() and each.data_ptr() % 64 == 0 for each in made)
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in made), "memory is counted by storages"
    for number, each in enumerate(made):
        each.fill_(number)
    assert all((each == number).all() for number, each in enumerate(made))
    assert huge_pages.empty(0, 4, dtype=torch.uint8, lasts=True).shape == (0, 4)


def lies_in_huge_pages(tensor: torch.Tensor) -> bool:
    """Return whether the kernel was asked for huge pages where the tensor lies."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        name, *values = line.split()
        if "-" in name and ":" not in name:
            begin, end = (int(address, 16) for address in name.split("-"))
            inside = begin <= tensor.data_ptr() < end
        elif inside and name == "VmFlags:":
            return "hg" in values
    raise AssertionError("no mapping has the tensor")


def bytes_shared_by(make: Callable[[], object]) -> int:
    """Return the bytes that a call takes of the mapping that small tensors share.

    A tensor of the heap may lie in huge pages all the same: NumPy asks for them where its large arrays lie, and malloc
    gives that memory to others later.
    """
    before = huge_pages.empty(64, dtype=torch.uint8, lasts=True)
    make()
    after = huge_pages.empty(64, dtype=torch.uint8, lasts=True)
    return after.data_ptr() - before.data_ptr() - 64


needs_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="the kernel has no transparent huge pages"
)


@needs_huge_pages
def test_large_tensors_and_those_that_last_lie_in_huge_pages() -> None:
    assert lies_in_huge_pages(huge_pages.empty(*LARGE, dtype=torch.uint8))
    assert lies_in_huge_pages(huge_pages.empty(100, dtype=torch.uint8, lasts=True))
    assert bytes_shared_by(lambda: huge_pages.empty(100, dtype=torch.uint8, lasts=True)) == 128
    assert bytes_shared_by(lambda: huge_pages.empty(100, dtype=torch.uint8)) == 0


@needs_huge_pages
@pytest.mark.skipif(not can_multiply_blocks(), reason="no products of blocks on this CPU")
def test_a_joined_matrix_lies_in_huge_pages_and_its_parts_do_not() -> None:
    made = [quantised(torch.randn(64, 64), BlockKind.Q4) for _ in range(2)]
    parts: list[PackedBlocks] = []
    assert bytes_shared_by(lambda: parts.extend(PackedBlocks(each) for each in made)) == 0
    joined = PackedBlocks.joined(parts)
    arrays = [joined.quants, joined.scales, *([] if joined.offsets is None else [joined.offsets])]
    assert all(map(lies_in_huge_pages, arrays))


def test_small_tensors_share_a_mapping_which_goes_with_the_last_of_them() -> None:
    pieces = huge_pages.Pieces()
    taken = [pieces.take(size) for size in (1 << 20, 5, 64, 3 << 20)]
    assert len({id(mapping) for mapping, _ in taken}) == 1
    assert [begin for _, begin in taken] == [0, 1 << 20, (1 << 20) + 64, (1 << 20) + 128]
    mapping = weakref.ref(taken[0][0])
    tensor = torch.frombuffer(taken[1][0], dtype=torch.uint8, count=5, offset=taken[1][1])
    taken.clear()
    gc.collect()
    assert mapping() is not None
    del tensor
    gc.collect()
    assert mapping() is None
    assert pieces.take(8)[1] == 0


def test_a_full_mapping_is_followed_by_another() -> None:
    pieces = huge_pages.Pieces()
    first, second, third = (pieces.take(40 << 20) for _ in range(3))
    assert len({id(mapping) for mapping, _ in (first, second, third)}) == 3
    assert [begin for _, begin in (first, second, third)] == [0, 0, 0]


def test_threads_get_different_memory() -> None:
    made: list[torch.Tensor] = []

    def take() -> None:
        made.extend(huge_pages.empty(100, dtype=torch.uint8, lasts=True) for _ in range(500))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    begins = sorted(each.data_ptr() for each in made)
    assert len(begins) == 2000
    assert all(after - before >= 100 for before, after in itertools.pairwise(begins))


def test_a_mapping_goes_with_its_last_tensor() -> None:
    gc.collect()
    before = mapped_mib()
    made = [huge_pages.empty(*LARGE, dtype=torch.uint8) for _ in range(3)]
    part = made[0][5:9]
    assert mapped_mib() >= before + 120
    made.clear()
    gc.collect()
    assert mapped_mib() < before + 60, "a part keeps the mapping that it is of"
    del part
    gc.collect()
    assert mapped_mib() < before + 20
