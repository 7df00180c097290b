"""The doors that are installed, and what each of them is to the server.

Invariant: finding a door imports neither its messages nor its servicer.

Not responsible for: the setting's syntax (api/config.py), the engine's own service (front/servicer.py).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Protocol

from gpu_engine import doors
from gpu_engine.api.config import ServerConfig
from gpu_engine.front.calls import Calls
from gpu_engine.front.port.later_services import Services
from gpu_engine.front.port.listening import ServerError

GROUP = "lockstep.doors"
"""The group of entry points with the doors of other distributions; each names a `Door`."""
AUTO = "auto"
"""In the setting services: every door that can be served and asks for nothing."""


@dataclass(frozen=True, slots=True)
class Methods:
    """The methods of a service that tenants may call. Only operators may call its other methods."""

    service: str
    """Its full name."""
    tenants: frozenset[str]
    """What every tenant may call: it concerns only the caller."""
    requests: frozenset[str]
    """The methods that generate; each of their requests is in the audit log."""
    loading: Mapping[str, bytes] = field(default_factory=dict)
    """The methods that answer while the model is loaded, with the bytes of their answers; the others wait for it."""


class Door(Protocol):
    """A service of the public port; a module implements it."""

    METHODS: Methods
    """Its methods. Made without the messages of the service."""

    NAMES: frozenset[str]
    """The names of the setting services that this door serves."""

    def is_wanted(self, names: Collection[str]) -> bool:
        """Return whether to serve it, given the names in the setting services.

        Raises ServerError, in one line, when it is asked for by name and something that it needs is missing.
        """

    def add_to(self, services: Services, calls: Calls, config: ServerConfig) -> str:
        """Add a service that serves `calls`; return its full name."""


def found_doors() -> list[Door]:
    """Return every door: the packages next to this module, then the doors of other distributions."""
    own = [each.name for each in pkgutil.iter_modules(doors.__path__) if each.ispkg]
    modules: list[Door] = [importlib.import_module(f"{doors.__name__}.{name}.door") for name in own]
    return [*modules, *(entry.load() for entry in entry_points(group=GROUP))]


def methods_of(doors: Sequence[Door]) -> list[Methods]:
    """Return the methods of doors. Another distribution's door may be older than `METHODS`: it has none here."""
    return [door.METHODS for door in doors if hasattr(door, "METHODS")]


def wanted_doors(config: ServerConfig, doors: Sequence[Door] | None = None) -> list[Door]:
    """Return the doors that the setting services asks for; `doors` are the installed ones. Raises ServerError."""
    installed = found_doors() if doors is None else doors
    for name in config.service_names:
        if name != AUTO and not any(name in door.NAMES for door in installed):
            raise ServerError(f"services: {name} is not installed")
    return [door for door in installed if door.is_wanted(config.service_names)]
