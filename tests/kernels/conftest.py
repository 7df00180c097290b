"""Triton's kernels run on a GPU if there is one, and else in Triton's interpreter on a CPU."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.kernels.checked_interpreter import checked_interpreter
from tests.kernels.ordered_sums import ordered_sums


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device of Triton's kernels."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    assert os.environ.get("TRITON_INTERPRET") == "1"
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    """Check each access of the interpreter to memory (see checked_interpreter.py)."""
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        yield
        return
    with checked_interpreter() as found:
        yield
    assert found.faults == []


@pytest.fixture
def in_order() -> Iterator[None]:
    """Give the interpreter's products the order of a GPU's (see ordered_sums.py)."""
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        yield
        return
    with ordered_sums():
        yield


@pytest.fixture(params=["native", "triton"])
def target(request: pytest.FixtureRequest) -> torch.device | None:
    """None for the native kernels, and the device of Triton's: a test of both runs once for each."""
    if request.param == "native":
        return None
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton: pip install .[dev]")
    found: torch.device = request.getfixturevalue("device")
    return found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # The interpreter computes with numpy, which warns about values that masks or a select discard.
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
