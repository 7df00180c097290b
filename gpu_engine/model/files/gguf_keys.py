"""What the makers of configurations ask a GGUF file's header. Not responsible for: which keys a family has (see
gguf_configs.py, gguf_dense.py)."""

from __future__ import annotations

from typing import Any

from gpu_engine.model.files.gguf_header import GGUFHeader


def number(header: GGUFHeader, key: str) -> Any:
    """Return a value of the architecture's metadata. Raises KeyError where the file lacks it."""
    value = header.get(f"{{arch}}.{key}")
    if value is None:
        raise KeyError(f"{header.architecture}.{key}")
    return value


def has(header: GGUFHeader, end: str) -> bool:
    """Return whether a file has a tensor whose name ends so."""
    return any(name.endswith(end) for name in header.tensors)
