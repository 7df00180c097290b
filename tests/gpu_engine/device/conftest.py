"""The model of the tests on a recorded device.

Triton's interpreter runs each program of a launch in Python, so the model has one layer, two heads and one KV head: a
step needs a quarter of the programs that the CPU tests' model needs. Layers and head groups are covered by the tests of
the attention kernel.
"""

from __future__ import annotations

import pytest

from gpu_engine.model.loader import LoadedModel, load_model
from tests.gpu_engine import tiny
from tests.gpu_engine.harness import config


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A tiny Llama in float32 on a CPU, unfused: fused layers are native code on a CPU, which no capture records.

    Its name is its folder.
    """
    family = tiny.FAMILIES["llama"]()
    family.num_hidden_layers, family.num_attention_heads, family.num_key_value_heads = 1, 2, 1
    family.head_dim = family.hidden_size // family.num_attention_heads
    folder = tiny.save(family, tmp_path_factory.mktemp("rounds"), rounds=True)
    return load_model(config(model=str(folder), fuse_parts=False))
