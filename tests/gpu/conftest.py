"""All tests of this folder need a CUDA device. Eager loading of kernels is set before CUDA is initialised."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_engine.model.loader import load_kernels_eagerly

load_kernels_eagerly()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            assert item.get_closest_marker("gpu") is not None, f"{item.nodeid}: everything in tests/gpu is marked gpu"
