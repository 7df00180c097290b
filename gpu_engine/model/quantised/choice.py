"""Chooses how the products of a model are quantised, and replaces them.

Invariant: a quantisation that was asked for by name is used or refused in one line that names the setting. Not
responsible for: the formats (see kernels/blocks.py), reading a file's blocks (see gguf_blocks.py, checkpoint.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from gpu_engine.api.config import EngineConfig
from gpu_engine.model.loaded_model import ModelNotSupported
from gpu_engine.model.quantised.checkpoint import QuantisedCheckpoint
from gpu_engine.model.quantised.linear import BlocksOf, quantise_linears
from kernels.blocks import BlockKind, Blocks, can_multiply_blocks, quantised

log = logging.getLogger(__name__)


def quantise(
    config: EngineConfig,
    net: Any,
    gguf_file: Path | None,
    checkpoint: QuantisedCheckpoint | None = None,
    *,
    can_multiply: Callable[[], bool] = can_multiply_blocks,
) -> bool:
    """Replace the products of a loaded model as `config.quantization` says; return whether they were replaced.

    `gguf_file` is the file that the model came from, and `checkpoint` the quantised checkpoint, or None. Raises
    ModelNotSupported.
    """
    wanted, possible = config.quantization, config.on_cpu and can_multiply()
    if wanted not in ("none", "auto") and not possible:
        raise ModelNotSupported(f"quantization: {wanted} needs a CPU with AVX2, and this one has none")
    if checkpoint is not None:
        why = _why_dequantised(config, possible, net, checkpoint)
        if why is not None:
            log.info("dequantised the weights to %s: %s: %s", _dtype_of(net), checkpoint, why)
            if wanted in ("none", "auto"):
                return False
        count = quantise_linears(net, _rounded(wanted, checkpoint))
        log.info("quantised %d products: %s, %s", count, wanted, checkpoint.usage)
        return True
    if wanted == "none" or (wanted == "auto" and not (possible and gguf_file and config.dtype == "auto")):
        return False
    file = None
    if gguf_file is not None:
        from gpu_engine.model.quantised.gguf_blocks import GGUFBlocks  # its library is installed for GGUF files alone

        file = GGUFBlocks(gguf_file)
    if wanted == "auto" and not (file and file.quantised):
        return False
    count = quantise_linears(net, file.of if file is not None and wanted != "int8" else _rounded(wanted, None))
    log.info("quantised %d products: %s", count, file if file and wanted != "int8" else wanted)
    return True


def _dtype_of(net: nn.Module) -> str:
    return str(next(net.parameters()).dtype).removeprefix("torch.")


def _why_dequantised(
    config: EngineConfig, possible: bool, net: nn.Module, checkpoint: QuantisedCheckpoint
) -> str | None:
    """Return why the products do not run from the checkpoint's own integers, or None where they do."""
    if config.quantization == "none":
        return "quantization is none"
    if not possible:
        return "its integers are multiplied on CPUs with AVX2 alone"
    if config.quantization == "auto" and config.dtype != "auto":
        return f"dtype is {config.dtype}"
    return checkpoint.why_no_blocks(net)


def _rounded(wanted: str, checkpoint: QuantisedCheckpoint | None) -> BlocksOf:
    """The checkpoint's own blocks, where it has them; else rounding to nearest, with 8 bits for the output head."""

    def blocks(name: str, linear: nn.Linear) -> Blocks:
        kind = BlockKind.Q4 if wanted == "q4" and name != "lm_head" else BlockKind.Q8
        own = None if checkpoint is None else checkpoint.of(name, linear, only=kind if wanted == "int8" else None)
        return quantised(linear.weight, kind) if own is None else own

    return blocks
