"""The name of a model's numerics: what decides the bits of its logits, apart from its weights.

Invariant: two servers with equal weights and equal names have logits with equal bits, so equal seeds give equal tokens.
Where one native call runs the whole forward over blocks, the units of x86-64 and of aarch64 have the same bits, and the
name has no unit. Elsewhere the name has all that is known to matter.

Not responsible for: the proof (`assert_same_bits_on_every_unit` in the tests of each family,
tests/kernels/test_tiles.py, tests/kernels/test_aarch64.py).
"""

from __future__ import annotations

import torch

from gpu_engine.model.loaded_model import LoadedModel
from gpu_engine.model.quantised.native import NativeForward
from kernels.float_tiles import FloatTiles
from kernels.vector_unit import unit_name

BLOCKS = "blocks-1"
"""The contract of forwards over blocks. Its number changes when a release changes their bits."""


def numerics_of(model: LoadedModel, kv_cache_dtype: str) -> str:
    """Return the name of a loaded model's numerics. `kv_cache_dtype`: as the setting."""
    return _of_forward(model) + ("" if kv_cache_dtype == "auto" else f", {kv_cache_dtype} keys and values")


def _of_forward(model: LoadedModel) -> str:
    if model.device.type == "cuda":
        device, (major, minor) = (
            torch.cuda.get_device_name(model.device),
            torch.cuda.get_device_capability(model.device),
        )
        return f"cuda {device} {major}.{minor}, {model.weights}, {model.dtype_name}, torch {torch.__version__}"
    if isinstance(model.fused.forward, NativeForward):
        return f"cpu {BLOCKS}, {model.weights}, {model.dtype_name}"
    unit = unit_name() + (" and AMX" if FloatTiles.usable else "")
    library = f"torch {torch.__version__} with {torch.backends.cpu.get_cpu_capability()}"
    return f"cpu {unit}, {model.weights}, {model.dtype_name}, {library}"
