"""Results on each vector unit of this CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.vector_unit import WITH_BLOCKS, on_unit, unit_levels, unit_name


def assert_same_on_every_unit(run: Callable[[], torch.Tensor]) -> None:
    """Assert that `run` returns the same bits on all units that multiply blocks: the others round a product twice."""
    want = run()
    for level in unit_levels():
        if level >= WITH_BLOCKS:
            with on_unit(level):
                assert torch.equal(run(), want), unit_name(level)
