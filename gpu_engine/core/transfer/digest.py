"""A digest of a model's weights, from a sample of every tensor, so that large models take no longer than small ones.

Invariant: two loads of the same files give the same digest. Not responsible for: kernels and their rounding, which the
keys and values of a fixed prompt show (see front/transfer/identity.py).
"""

from __future__ import annotations

import hashlib
import itertools
import json

import torch

from gpu_engine.model.loaded_model import LoadedModel

_SAMPLE = 64
"""Numbers of each tensor."""
_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "_attn_implementation")


def weights_digest(model: LoadedModel) -> str:
    """Return 64 hexadecimal digits: of the configuration, and of name, shape, dtype and a sample of each tensor."""
    digest = hashlib.sha256(f"{model.model_type} {model.quantised}".encode())
    config = {name: value for name, value in model.net.config.to_dict().items() if name not in _NOT_THE_MODEL}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    tensors = itertools.chain(model.net.named_parameters(), model.net.named_buffers())
    for name, tensor in sorted(tensors, key=lambda named: str(named[0])):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(_sample(tensor))
    return digest.hexdigest()


@torch.no_grad()
def _sample(tensor: torch.Tensor) -> bytes:
    """Return the bytes of up to `_SAMPLE` numbers, evenly spaced."""
    count = tensor.numel()
    if not count:
        return b""
    chosen = torch.linspace(0, count - 1, min(count, _SAMPLE), dtype=torch.float64).long().tolist()
    # Indices a dimension: a tensor that is not contiguous is not copied.
    places = [torch.unravel_index(torch.tensor(at), tensor.shape) for at in chosen] if tensor.dim() else [()]
    return b"".join(tensor[place].reshape(1).cpu().view(torch.uint8).numpy().tobytes() for place in places)
