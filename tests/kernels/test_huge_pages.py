"""Tensors of mapped memory are apart from each other, and their mapping goes with the last of them."""

from __future__ import annotations

import gc
import itertools
import threading

import psutil
import torch

from kernels import huge_pages

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
