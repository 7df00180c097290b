"""The extension for page transfer: an engine with the role "prefill" or "decode".

Not responsible for: settings that contradict the role (api/capabilities.py), what the parts do (see
kv_transfer_servicer.py, remote_prefill.py and pages.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from prometheus_client import CollectorRegistry

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.api.ports import EngineCore, Model
from gpu_engine.core.hooks import EngineHooks
from gpu_engine.doors.found import Door
from gpu_engine.extensions.found import Extension
from gpu_engine.extensions.transfer.grpc_transport import open_transports
from gpu_engine.extensions.transfer.identity import identify
from gpu_engine.extensions.transfer.kv_transfer_servicer import SERVICE, KvTransferServicer
from gpu_engine.extensions.transfer.metrics import TransferMetrics
from gpu_engine.extensions.transfer.remote_prefill import RemotePrefill
from gpu_engine.front.calls import Calls
from gpu_engine.front.port.later_services import Services, add_servicer
from gpu_engine.front.port.listening import ServerError, is_local
from protos.transfer.v1 import transfer_pb2_grpc

log = logging.getLogger(__name__)

SETTING = "role"


def is_wanted(engine: EngineConfig, server: ServerConfig) -> bool:
    """See `ExtensionModule`."""
    return engine.transfer.moves_pages


def settings(engine: EngineConfig, server: ServerConfig) -> ServerConfig:
    """See `ExtensionModule`: an engine that only prefills has no grammars and no other doors."""
    return replace(server, grammar="none", services="") if engine.transfer.role == "prefill" else server


class Transfer(Extension):
    """The transfers of one engine."""

    _metrics: TransferMetrics
    _engine: EngineCore
    _model: Model
    prefills: RemotePrefill | None = None
    """The engines that prefill for this one; None unless role=decode."""

    def __init__(self, engine: EngineConfig, server: ServerConfig, doors: Sequence[Door]) -> None:
        """Raises ServerError with the setting at fault."""
        self._config = config = engine.transfer
        self._servicer: KvTransferServicer | None = None
        self.serves_engine = config.role == "decode"
        if config.role == "decode" and not config.prefill_tls_ca:
            for address in config.prefill_from:
                if not is_local(address):
                    log.warning("prefill_from: prompts cross the network to %s in clear text", address)

    def hook(self, hooks: EngineHooks) -> EngineHooks:
        """Let the engine read and import pages."""
        from gpu_engine.extensions.transfer.pages import PageTransfers

        return replace(hooks, transfers=PageTransfers.of)

    def attach(self, engine: EngineCore, model: Model, registry: CollectorRegistry) -> None:
        """Open the connections of role=decode. Raises ServerError with the setting at fault."""
        self._engine, self._model, self._metrics = engine, model, TransferMetrics(registry)
        if self._config.role != "decode":
            return
        try:
            transports = open_transports(self._config)
        except ValueError as error:
            raise ServerError(str(error)) from error
        least_tokens = self._config.prefill_tokens
        self.prefills = RemotePrefill(engine.pages, transports, self._metrics, least_tokens=least_tokens)

    def add_to(self, services: Services, calls: Calls) -> list[str]:
        """Add the service of role=prefill."""
        if self._config.role != "prefill":
            return []
        self._servicer = KvTransferServicer(calls, self._metrics, timeout_s=self._config.prefill_timeout_s)
        add_servicer(services, transfer_pb2_grpc.add_KvTransferServicer_to_server, self._servicer)
        return [SERVICE]

    async def warm(self) -> None:
        """Compute the fingerprint of the engine."""
        form = await identify(self._engine, self._model)
        if self._servicer is not None:
            self._servicer.form = form
        if self.prefills is not None:
            self.prefills.form = form
        role = self._config.role
        log.info("role: %s, %d bytes a KV page, fingerprint %s", role, form.page_bytes, form.fingerprint)

    async def aclose(self) -> None:
        """End the fetches."""
        if self.prefills is not None:
            await self.prefills.aclose()

    def __repr__(self) -> str:
        return f"<Transfer role={self._config.role} {self.prefills!r}>"


open = Transfer
