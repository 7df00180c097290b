"""The extensions that are installed, and the hooks by which each of them is a part of a server.

Invariant: an extension that no setting asks for is not opened, and its hooks cost nothing.

Not responsible for: services that hang on calls only (see doors/), the order of a start (see gpu_engine/server.py).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Protocol

import grpc
from prometheus_client import CollectorRegistry

from gpu_engine import extensions
from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.api.page_transfer import PrefillElsewhere
from gpu_engine.api.ports import EngineCore, Model
from gpu_engine.core.hooks import NO_HOOKS, EngineHooks
from gpu_engine.doors.found import Door
from gpu_engine.front.caller import Accounts
from gpu_engine.front.calls import Calls
from gpu_engine.front.port.later_services import Services
from gpu_engine.front.port.listening import ServerError
from gpu_engine.front.receipts import Receipts
from gpu_engine.ops.access import CallRecord

GROUP = "lockstep.extensions"
"""The group of entry points with the extensions of other distributions; each names an `ExtensionModule`."""


class Extension:
    """An opened extension: hooks in the order in which a server calls them. Each of them does nothing here.

    Used on the event loop, except `hook`.
    """

    interceptor: grpc.aio.ServerInterceptor | None = None  # type: ignore[type-arg]  # generic only in the stub
    """Lets the calls of the public port in, in place of the server's own check of tokens."""
    gateway_token: str = ""
    """The token of the server's own gateway process; "": it uses the server's first one."""
    serves_engine: bool = True
    """The service Engine reports SERVING to the health service."""
    accounts: Accounts | None = None
    """The accounts of callers, after `attach`; None: all callers are alike."""
    prefills: PrefillElsewhere | None = None
    """Other engines that prefill prompts, after `attach`; None: this engine does."""
    receipts: Receipts | None = None
    """Makes the receipts of answers, after `attach`; None: there are none."""

    def hook(self, hooks: EngineHooks) -> EngineHooks:
        """Return the hooks of the engine with the extension's own. On the thread that builds the engine."""
        return hooks

    def attach(self, engine: EngineCore, model: Model, registry: CollectorRegistry) -> None:
        """Take the engine, which is not started, and register metrics. Raises ServerError."""

    def ended(self, record: CallRecord) -> None:
        """Note a request that has ended. Raises nothing."""

    def add_to(self, services: Services, calls: Calls) -> list[str]:
        """Add services to the public port; return their names, each of which has its own health status."""
        return []

    async def warm(self) -> None:
        """Use the warm engine, before the first request."""

    async def aclose(self) -> None:
        """End what runs, and close what is open. No call runs any more."""


class Extensions(Extension):
    """The opened extensions of one server, as one; the server closes each by itself. Of two that bring the same part,
    the first has it."""

    def __init__(self, opened: Sequence[Extension] = ()) -> None:
        self.opened = tuple(opened)
        self.interceptor = next((each.interceptor for each in opened if each.interceptor is not None), None)
        self.gateway_token = next((each.gateway_token for each in opened if each.gateway_token), "")
        self.serves_engine = all(each.serves_engine for each in opened)

    def engine_hooks(self) -> EngineHooks | None:
        """Return what the extensions add to the engine; None: there are no extensions."""
        if not self.opened:
            return None
        return self.hook(NO_HOOKS)

    def hook(self, hooks: EngineHooks) -> EngineHooks:
        """See `Extension`."""
        for each in self.opened:
            hooks = each.hook(hooks)
        return hooks

    def attach(self, engine: EngineCore, model: Model, registry: CollectorRegistry) -> None:
        """See `Extension`."""
        for each in self.opened:
            each.attach(engine, model, registry)
        self.accounts = next((each.accounts for each in self.opened if each.accounts is not None), None)
        self.prefills = next((each.prefills for each in self.opened if each.prefills is not None), None)
        self.receipts = next((each.receipts for each in self.opened if each.receipts is not None), None)

    def ended(self, record: CallRecord) -> None:
        """See `Extension`."""
        for each in self.opened:
            each.ended(record)

    def add_to(self, services: Services, calls: Calls) -> list[str]:
        """See `Extension`."""
        return [name for each in self.opened for name in each.add_to(services, calls)]

    async def warm(self) -> None:
        """See `Extension`."""
        for each in self.opened:
            await each.warm()

    def __repr__(self) -> str:
        return f"<Extensions {list(self.opened)}>"


class ExtensionModule(Protocol):
    """An extension; a module implements it."""

    SETTING: str
    """The setting that asks for it, for messages."""

    def is_wanted(self, engine: EngineConfig, server: ServerConfig) -> bool:
        """Return whether the settings ask for it."""

    def settings(self, engine: EngineConfig, server: ServerConfig) -> ServerConfig:
        """Return the settings of a server with the extension."""

    def open(self, engine: EngineConfig, server: ServerConfig, doors: Sequence[Door]) -> Extension:
        """Return the opened extension of a server with these doors. On the event loop. Raises ServerError."""


def found_extensions() -> list[ExtensionModule]:
    """Return every extension: the packages next to this module, then the extensions of other distributions."""
    own = [each.name for each in pkgutil.iter_modules(extensions.__path__) if each.ispkg]
    modules: list[ExtensionModule] = [
        importlib.import_module(f"{extensions.__name__}.{name}.extension") for name in own
    ]
    return [*modules, *(entry.load() for entry in entry_points(group=GROUP))]


def wanted_extensions(
    engine: EngineConfig, server: ServerConfig, installed: Sequence[ExtensionModule] | None = None
) -> list[ExtensionModule]:
    """Return the extensions that the settings ask for. Raises ServerError for one that is not there.

    `installed`: the extensions to choose from; None: every one that is found.
    """
    modules = found_extensions() if installed is None else installed
    asked = {
        "tenant_file": bool(server.tenant_file),
        "receipt_key": bool(server.receipt_key),
        "role": engine.transfer.moves_pages,
    }
    for setting, is_set in asked.items():
        if is_set and not any(setting == module.SETTING for module in modules):
            raise ServerError(f"{setting}: its extension is not installed")
    return [module for module in modules if module.is_wanted(engine, server)]
