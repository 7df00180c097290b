"""The backends by name: which exist, which are installed, and how one is loaded.

Invariant: importing this module imports no matcher library, and loading one backend never imports the other's library.
So the llguidance sidecar never loads torch. The two imports inside `_backend_class` are function-level for that reason,
and because a backend's library may not be installed.
Not responsible for: the protocols that a backend implements (see backend.py).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from importlib.metadata import version

from grammar_service.backends.backend import Backend
from grammar_service.backends.composed import ComposingBackend
from grammar_service.errors import NotSupported
from grammar_service.grammar.vocabulary import Vocabulary

NAMES = ("llguidance", "xgrammar")
"""The backends that exist. `installed` says which of them this environment has."""

_MODULES = {"llguidance": ("llguidance",), "xgrammar": ("xgrammar", "torch")}
"""The third-party modules that each backend imports."""


def installed(name: str) -> bool:
    """Return whether the libraries of a backend are installed. Imports nothing."""
    return all(importlib.util.find_spec(module) is not None for module in _MODULES[name])


@cache
def installed_version(name: str) -> str:
    """Return the version of an installed library."""
    return version(name)


def import_library(name: str) -> None:
    """Import the libraries of a backend ahead of its first use. Does nothing for a backend that is not installed."""
    if installed(name):
        _backend_class(name)


def load_backend(name: str, vocabulary: Vocabulary) -> Backend:
    """Return the backend `name` over a vocabulary.

    Raises NotSupported (the name is not in NAMES, or its library is not installed) and InvalidField (the library cannot
    read the tokenizer).
    """
    if name not in NAMES:
        raise NotSupported(f"backend {name!r} is unknown; there are {', '.join(NAMES)}")
    if not installed(name):
        raise NotSupported(f"backend {name} is not installed in this sidecar")
    return ComposingBackend(_backend_class(name), vocabulary)


def _backend_class(name: str) -> Callable[[Vocabulary], Backend]:
    if name == "llguidance":
        from grammar_service.backends.llguidance.backend import LlguidanceBackend

        return LlguidanceBackend
    from grammar_service.backends.xgrammar.backend import XgrammarBackend

    return XgrammarBackend
