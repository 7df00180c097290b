"""Builds a transformers model without memory for its weights, and gives it each weight in the form in which it is used.

transformers' own loader makes a model of full tensors, and what quantises it comes after. Here the model is made on the
device that has no memory, and then filled, module by module, by threads: a product over blocks takes the place of its
linear layer before that has a weight. Invariant: the model has the weights and the computed tables that transformers'
loader gives it, or an error names what is missing. Not responsible for: what lies in the files (see gguf_weights.py,
safetensors_weights.py), which products are quantised (see quantised/choice.py).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig


class Weights(Protocol):
    """The tensors of a model's files, by the names that the model gives its parameters. For several threads."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a parameter; None: the files have none of that name."""

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a parameter in memory of its own."""

    def rows(self, name: str, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the number of a row of a matrix, a multiple of 32, and the next rows from it on, [n, K]."""


_MAX_LOADERS = 8
"""More threads wait for the disk and for memory, and each has slabs of its own."""
_REPORTS = 6
"""How often `fill` says how far it is: a log has a line each time."""

MakeProduct = Callable[[str, str, torch.Tensor | None], nn.Module]
"""Returns the product that takes the place of a linear layer: by the layer's name, the name of its weight in the files,
and its bias."""


def unfilled(config: PreTrainedConfig, dtype: torch.dtype, attention: str) -> Any:
    """Return the model of a configuration with the attention of that name, on the device that has no memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )


def refuse_misfits(net: nn.Module, weights: Weights) -> None:
    """Raise ValueError where the files lack a weight of the model, or have it in another shape."""
    missing = []
    for names, shape in _tensors_of(net):
        found = next((name for name in names if weights.shape(name) is not None), None)
        if found is None:
            missing.append(names[0])
        elif (have := weights.shape(found)) != shape:
            raise ValueError(f"{found} is {list(have or ())}, and the model's is {list(shape)}")
    if missing:
        rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"it has no weights for {missing[0]}{rest}")


def fill(
    net: Any,
    weights: Weights,
    dtype: torch.dtype,
    product_of: Callable[[str, nn.Module, nn.Linear], MakeProduct | None],
    report: Callable[[float], None],
) -> int:
    """Give a model that is `unfilled` its weights; return how many products took the place of linear layers.

    `product_of` returns None for a layer that stays as it is. `report` is called with the finished share, now and then.
    """
    sources = sources_of(net, weights)
    wide = {source for name, source in sources.items() if _stays_float32(net, name)}
    once = {
        source: _Once(weights, source, torch.float32 if source in wide else dtype) for source in set(sources.values())
    }
    jobs: list[_Job] = []

    def parameter(name: str) -> nn.Parameter:
        return once[sources[name]].parameter()

    def take(module: nn.Module, prefix: str) -> None:
        for name, tensor in list(module._parameters.items()):
            if tensor is not None:
                module._parameters[name] = parameter(f"{prefix}{name}")
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and name not in module._non_persistent_buffers_set:
                source = sources[f"{prefix}{name}"]
                of = torch.float32 if source in wide else dtype
                loaded = weights.tensor(source, of if buffer.is_floating_point() else buffer.dtype)
                loaded._is_hf_initialized = True  # type: ignore[attr-defined]
                module._buffers[name] = loaded

    def replace(parent: nn.Module, name: str, path: str, child: nn.Linear, make: MakeProduct) -> None:
        bias = None if child.bias is None else parameter(f"{path}.bias").detach()
        setattr(parent, name, make(path, sources[f"{path}.weight"], bias))

    replaced = set[nn.Module]()
    for prefix, parent in list(net.named_modules()):
        for name, child in list(parent.named_children()):
            path = f"{prefix}.{name}" if prefix else name
            if type(child) is nn.Linear and (make := product_of(path, parent, child)) is not None:
                replaced.add(child)
                if not parent._non_persistent_buffers_set:
                    # It has no tables of its own, and may initialise the weight of the layer that it is about to lose.
                    parent._is_hf_initialized = True
                jobs.append((child.weight.numel(), partial(replace, parent, name, path, child, make)))
    for prefix, module in list(net.named_modules()):
        if module not in replaced and (module._parameters or module._buffers):
            size = sum(tensor.numel() for tensor in module.parameters(recurse=False))
            jobs.append((size, partial(take, module, f"{prefix}." if prefix else "")))
    count = len(replaced)
    replaced.clear()
    jobs.sort(key=lambda job: -job[0])  # the largest first, so that no thread is left with it at the end
    progress = _Progress(sum(size for size, _ in jobs), report)
    threads, of_pool = torch.get_num_threads(), loaders()
    torch.set_num_threads(1)  # of each loader; a thread that has computed before keeps its number
    try:
        with ThreadPoolExecutor(of_pool, "load") as pool:
            for _ in pool.map(progress.run, jobs):
                pass
    finally:
        torch.set_num_threads(threads)
    _compute_tables(net)
    return count


def _stays_float32(net: Any, name: str) -> bool:
    """Return whether transformers keeps a tensor of this name in float32, whatever the model's dtype is."""
    kept = getattr(net, "_keep_in_fp32_modules_strict", None) or ()
    return any(re.search(rf"(^|\.){part}($|\.)", name) for part in kept)


def loaders() -> int:
    """Return how many threads read a model's files."""
    return max(1, min(_MAX_LOADERS, torch.get_num_threads()))


_Job = tuple[int, Callable[[], None]]
"""The number of weights, and what reads them."""


class _Progress:
    """Runs jobs, and reports the finished share now and then. For several threads."""

    def __init__(self, total: int, report: Callable[[float], None]) -> None:
        self._total, self._report = max(total, 1), report
        self._lock, self._done = threading.Lock(), 0

    def run(self, job: _Job) -> None:
        """Run a job."""
        size, work = job
        work()
        with self._lock:
            before, self._done = self._done, self._done + size
            if self._done * _REPORTS // self._total > before * _REPORTS // self._total:
                self._report(self._done / self._total)


class _Once:
    """A parameter that is read by whoever asks first: tied ones are one."""

    def __init__(self, weights: Weights, source: str, dtype: torch.dtype) -> None:
        self._weights, self._source, self._dtype = weights, source, dtype
        self._lock = threading.Lock()
        self._made: nn.Parameter | None = None

    def parameter(self) -> nn.Parameter:
        """Return it."""
        with self._lock:
            if self._made is None:
                self._made = nn.Parameter(self._weights.tensor(self._source, self._dtype), requires_grad=False)
                self._made._is_hf_initialized = True  # type: ignore[attr-defined]
            return self._made


def tied_names(net: nn.Module) -> list[list[str]]:
    """Return the names of each parameter and stored buffer: several where it is tied."""
    return [names for names, _ in _tensors_of(net)]


def _tensors_of(net: nn.Module) -> Iterator[tuple[list[str], tuple[int, ...]]]:
    """Yield the names of each parameter and stored buffer, several where it is tied, with its shape."""
    stored = set(net.state_dict(keep_vars=True))
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for source in (net.named_parameters(remove_duplicate=False), net.named_buffers(remove_duplicate=False)):
        for name, tensor in source:
            if name in stored:
                names.setdefault(id(tensor), []).append(name)
                tensors[id(tensor)] = tensor
    for key, found in names.items():
        yield found, tuple(tensors[key].shape)


def sources_of(net: nn.Module, weights: Weights) -> dict[str, str]:
    """Return by the name of each parameter the one under which the files have it."""
    found = {}
    for names, _ in _tensors_of(net):
        source = next(name for name in names if weights.shape(name) is not None)
        found.update(dict.fromkeys(names, source))
    return found


def _compute_tables(net: Any) -> None:
    """Give the buffers that no file has their memory and their numbers, as transformers does after it has loaded."""
    for module in net.modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.device.type == "meta":
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    net.initialize_weights()
