"""The choice of a vector unit: it is the one whose kernels run, and it ends with its block."""

from __future__ import annotations

import platform

import pytest
import torch

from kernels.accept import gumbel_noise
from kernels.vector_unit import on_unit, unit_level, unit_levels, unit_name


def test_the_fastest_unit_is_used_and_a_choice_ends_with_its_block() -> None:
    levels, before = unit_levels(), unit_level()
    assert before == levels[-1]
    with on_unit(levels[0]):
        assert unit_level() == levels[0]
        with on_unit(before):
            assert unit_name() == unit_name(before)
        assert unit_level() == levels[0]
        assert unit_levels() == levels
    assert unit_level() == before


def test_a_unit_that_the_cpu_does_not_run_is_refused_and_changes_nothing() -> None:
    before = unit_level()
    with pytest.raises(ValueError, match="does not run"), on_unit(3 if platform.machine() == "aarch64" else 9):
        pass
    assert unit_level() == before


@pytest.mark.skipif(unit_levels()[0] != 1 or unit_level() == 1, reason="x86-64 with and without FMA")
def test_the_kernels_of_the_chosen_unit_are_called() -> None:
    """Without FMA a product is rounded before a sum, so some of the noise has other bits."""
    fused_V = gumbel_noise(7, 5, 4096)
    with on_unit(1):
        rounded_V = gumbel_noise(7, 5, 4096)
    assert not torch.equal(rounded_V, fused_V)
    torch.testing.assert_close(rounded_V, fused_V, rtol=1e-5, atol=1e-5)
