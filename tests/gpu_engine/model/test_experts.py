"""Experts on a CPU: their numbers are transformers', and a row has the same bits alone and with others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpu_engine.model.experts import Experts, replace_experts
from gpu_engine.model.linear import pack_linears
from gpu_engine.model.recording import distance
from tests.gpu_engine.model.recurrent.families import tiny

ROWS = 37


@pytest.mark.parametrize("family", ["granite", "jamba", "nemotron_h", "qwen3_next"])
def test_mixtures(family: str) -> None:
    """Nemotron-H's experts have no gate; Qwen 3 Next's shared expert has one of a single number a row."""
    own, net = tiny(family), tiny(family)
    count = replace_experts(net)
    pack_linears(net)
    mixtures = [name for name, module in net.named_modules() if isinstance(getattr(module, "experts", None), Experts)]
    assert len(mixtures) == count > 0
    x_BPH = torch.randn(1, ROWS, net.config.hidden_size, generator=torch.Generator().manual_seed(2))
    for name in mixtures:
        block: Any = net.get_submodule(name)
        with torch.inference_mode():
            together = block(x_BPH)
            assert distance(together, own.get_submodule(name)(x_BPH)) < 1e-5
            for row in range(ROWS):
                assert torch.equal(block(x_BPH[:, row : row + 1])[0, 0], together[0, row])
