"""What a GGUF file's model needs, computed as a start computes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gpu_engine.api.config import EngineConfig
from gpu_engine.model import attention
from gpu_engine.model.experts import split_experts
from gpu_engine.model.files.filled import unfilled
from gpu_engine.model.files.gguf_header import GGUFHeader
from gpu_engine.model.files.gguf_weights import GGUFWeights
from gpu_engine.model.files.need import Need, need_of
from gpu_engine.model.files.reading import configuration_of
from gpu_engine.model.quantised.choice import products_while_reading


def need_of_file(settings: EngineConfig) -> tuple[Any, Need]:
    """Return the model of a file without its weights, and its need in bfloat16."""
    file = Path(settings.model)
    header = GGUFHeader(file)
    attention.register()
    with GGUFWeights(header) as weights:
        net = unfilled(configuration_of(file, header), torch.bfloat16, attention.NAME)
        split_experts(net)
        products = products_while_reading(settings, net, weights, weights, torch.bfloat16, of_gguf=True)
        return net, need_of(net, weights, products, torch.bfloat16)
