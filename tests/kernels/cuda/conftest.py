"""The same tests run the Triton kernels on a GPU if there is one, and else in Triton's interpreter on a CPU."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]  # a CPU-only install without the dev extra


@pytest.fixture(scope="session")
def device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    assert os.environ.get("TRITON_INTERPRET") == "1"
    return torch.device("cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # The interpreter computes with numpy, which warns about values that masks or a select discard.
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
