"""The OpenMP runtime that the kernels share with torch. Not responsible for: the kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels.library import openmp_of


@pytest.mark.parametrize("found", ["torch/lib/libgomp.so.1", "torch.libs/libgomp-947d5fa1.so.1.0.0"])
def test_torch_s_runtime_is_taken_from_either_folder_of_its_wheels(found: str, tmp_path: Path) -> None:
    assert openmp_of(tmp_path / "torch") == "libgomp.so.1"
    (tmp_path / found).parent.mkdir(parents=True)
    (tmp_path / found).touch()
    assert openmp_of(tmp_path / "torch") == str(tmp_path / found)
