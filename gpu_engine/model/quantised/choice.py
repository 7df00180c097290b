"""Chooses how the products of a model are quantised, and replaces them.

Invariant: a quantisation that was asked for by name is used or refused in one line that names the setting. Not
responsible for: the formats (see kernels/blocks.py), reading a file's blocks (see gguf_blocks.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from gpu_engine.api.config import EngineConfig
from gpu_engine.model.loaded_model import ModelNotSupported
from gpu_engine.model.quantised.gguf_blocks import GGUFBlocks
from gpu_engine.model.quantised.linear import BlocksOf, quantise_linears
from kernels.blocks import BlockKind, Blocks, can_multiply_blocks, quantised

log = logging.getLogger(__name__)


def quantise(
    config: EngineConfig,
    net: Any,
    gguf_file: Path | None,
    *,
    can_multiply: Callable[[], bool] = can_multiply_blocks,
) -> bool:
    """Replace the products of a loaded model as `config.quantization` says; return whether they were replaced.

    `gguf_file` is the file that the model came from, or None. Raises ModelNotSupported.
    """
    wanted, possible = config.quantization, config.on_cpu and can_multiply()
    if wanted == "none" or (wanted == "auto" and not (possible and gguf_file and config.dtype == "auto")):
        return False
    if not possible:
        raise ModelNotSupported(f"quantization: {wanted} needs a CPU with AVX2, and this one has none")
    file = None if gguf_file is None else GGUFBlocks(gguf_file)
    if wanted == "auto" and not (file and file.quantised):
        return False
    count = quantise_linears(net, _blocks_of(wanted, file))
    log.info("quantised %d products: %s", count, file if file and wanted != "int8" else wanted)
    return True


def _blocks_of(wanted: str, file: GGUFBlocks | None) -> BlocksOf:
    """A file's own blocks, unless 8 bits are wanted; else rounding to nearest, with 8 bits for the output head."""

    def blocks(name: str, linear: nn.Linear) -> Blocks:
        if file is not None and wanted != "int8":
            return file.of(name, linear)
        return quantised(linear.weight, BlockKind.Q4 if wanted == "q4" and name != "lm_head" else BlockKind.Q8)

    return blocks
