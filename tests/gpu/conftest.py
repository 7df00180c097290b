"""Everything here needs a CUDA device. CUDA is told to load kernels at once before anybody starts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_engine.model.kernel_loading import load_kernels_eagerly

load_kernels_eagerly()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            assert item.get_closest_marker("gpu") is not None, f"{item.nodeid}: everything in tests/gpu is marked gpu"
