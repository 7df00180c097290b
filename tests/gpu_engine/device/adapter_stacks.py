"""A recorded device whose model takes adapters."""

from __future__ import annotations

from gpu_engine.api.adapters import AdapterLimits
from gpu_engine.model.adapters.device_pool import DeviceAdapterPool
from gpu_engine.model.loader import LoadedModel


def over_stacks(model: LoadedModel, limits: AdapterLimits) -> LoadedModel:
    """Return a model with the adapters of a GPU, on CPU tensors."""
    from kernels.cuda.low_rank import add_low_rank

    model.adapters = DeviceAdapterPool(model.net, model.vocab_size, limits, add_low_rank)
    return model
