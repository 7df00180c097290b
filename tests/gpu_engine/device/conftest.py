"""What the tests of a recorded device share: the model that is on it."""

from __future__ import annotations

import pytest

from gpu_engine.model.loader import LoadedModel, load_model
from tests.gpu_engine import tiny
from tests.gpu_engine.harness import config


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A tiny Llama in float32 on a CPU, unfused: on CPU tensors that would be native code, which no capture sees.

    Its name is its folder.
    """
    folder = tiny.save(tiny.FAMILIES["llama"](), tmp_path_factory.mktemp("rounds"), rounds=True)
    return load_model(config(model=str(folder), fuse=False))
