"""Models of the core's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_engine.model.loader import LoadedModel, load_model
from kernels.blocks import can_multiply_blocks
from tests.gpu_engine.harness import config


@pytest.fixture(scope="session")
def blocks(saved: Callable[[str], Path]) -> LoadedModel:
    """A tiny model with a native forward, whose prompts share the forwards of steps."""
    if not can_multiply_blocks():
        pytest.skip("products over blocks need AVX2")
    return load_model(config(model=str(saved("llama")), dtype="bfloat16", quantization="q4"))


@pytest.fixture(params=["float32", "q4"])
def either_forward(request: pytest.FixtureRequest, llama: LoadedModel) -> LoadedModel:
    """A model with a forward of torch, and one with a native one."""
    model: LoadedModel = llama if request.param == "float32" else request.getfixturevalue("blocks")
    return model
