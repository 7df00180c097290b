"""How CUDA loads kernels in this process.

Invariant: the setting is made before CUDA is initialised. Not responsible for: compiling our own kernels
(see kernels/cuda/nvrtc.py).
"""

from __future__ import annotations

import os

import torch


def load_kernels_eagerly() -> None:
    """Make CUDA load a module's kernels at once. Call before CUDA is initialised.

    A lazily loaded kernel is loaded at its first launch, which may wait for the device. The device may be inside a wait
    of a step at that time, and that wait may end only after a later launch posts to the grammar process. Raises
    RuntimeError when CUDA is initialised already without the setting.
    """
    if os.environ.get("CUDA_MODULE_LOADING") != "EAGER":
        if torch.cuda.is_initialized():
            raise RuntimeError("CUDA_MODULE_LOADING=EAGER must be set before CUDA is initialised in this process")
        os.environ["CUDA_MODULE_LOADING"] = "EAGER"
