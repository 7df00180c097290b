"""What this installation is: its version, whether another distribution has overwritten a part of it, and whether its
torch may use a GPU.

Not responsible for: whether the optional dependencies are there (each importer says what is missing).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

DISTRIBUTION = "lockstep-engine"
"""Name on PyPI; the command is `lockstep`."""

KERNELS_MARK = "Lockstep's device code"
"""Part of the docstring of our `kernels/__init__.py`."""


def installed_version() -> str:
    """Return the version of this distribution, or "not installed" for a checkout on the path."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def overwritten_kernels(find: Callable[[str], ModuleSpec | None] = importlib.util.find_spec) -> str | None:
    """Return what is wrong with the package `kernels` and how to put it right, in one line; None if it is ours.

    Hugging Face's distribution `kernels` installs a package of the same name over ours, and pip does not say so.
    `find` looks a package up without importing it.
    """
    spec = find("kernels")
    place = spec.origin if spec else None
    text = Path(place).read_text(encoding="utf-8", errors="replace") if place else ""
    if KERNELS_MARK in text:
        return None
    return (
        f"kernels: {place or 'no file'} is not the package of {DISTRIBUTION}; Hugging Face's `kernels` replaces it. "
        f"Give the server its own environment: pipx install {DISTRIBUTION}, uv tool install {DISTRIBUTION}, "
        "or the container image"
    )


def torch_has_cuda(find: Callable[[str], ModuleSpec | None] = importlib.util.find_spec) -> bool:
    """Return whether the installed torch may use a GPU, without importing it, which takes seconds.

    `find` looks a package up without importing it.
    """
    spec = find("torch")
    version = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if version is None or not version.is_file():
        return True
    text = version.read_text(encoding="utf-8", errors="replace")
    return not all(re.search(rf"^{name}\b.*= None$", text, re.MULTILINE) for name in ("cuda", "hip"))
