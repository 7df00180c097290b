"""What only an engine with the role "prefill" or "decode" has; the server opens and closes it.

Invariant: settings that contradict the role are an error at the start that names them.

Not responsible for: what the parts do (see kv_transfer_servicer.py and remote_prefill.py).
"""

from __future__ import annotations

import logging
from dataclasses import replace

import grpc
from prometheus_client import CollectorRegistry

from gpu_engine.api.capabilities import OF_START, Start, refuse
from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.api.ports import EngineCore, Model
from gpu_engine.front.calls import Calls
from gpu_engine.front.port.listening import ServerError, is_local
from gpu_engine.front.transfer.grpc_transport import open_transports
from gpu_engine.front.transfer.identity import identify
from gpu_engine.front.transfer.kv_transfer_servicer import SERVICE, KvTransferServicer
from gpu_engine.front.transfer.remote_prefill import RemotePrefill
from gpu_engine.ops.metrics_transfer import TransferMetrics
from protos.transfer.v1 import transfer_pb2_grpc

log = logging.getLogger(__name__)


def for_role(engine: EngineConfig, server: ServerConfig) -> ServerConfig:
    """Return the settings of a server with the engine's role. Raises ServerError with the setting that contradicts."""
    refuse(OF_START, Start(engine, server), ServerError)
    return replace(server, grammar="none", services="") if engine.transfer.role == "prefill" else server


class Transfer:
    """The transfers of one engine, none with the role "both". Made and used on the event loop."""

    def __init__(self, engine: EngineCore, model: Model, registry: CollectorRegistry) -> None:
        """Raises ServerError with the setting at fault."""
        self._engine, self._model, self._config = engine, model, engine.config.transfer
        config = self._config
        self._servicer: KvTransferServicer | None = None
        self.prefills: RemotePrefill | None = None
        """The engines that prefill for this one; None unless role=decode."""
        if config.role == "both":
            return
        self._metrics = TransferMetrics(registry)
        if config.role == "decode":
            try:
                transports = open_transports(config)
            except ValueError as error:
                raise ServerError(str(error)) from error
            if not config.prefill_tls_ca:
                for address in config.prefill_from:
                    if not is_local(address):
                        log.warning("prefill_from: prompts cross the network to %s in clear text", address)
            self.prefills = RemotePrefill(engine.pages, transports, self._metrics, least_tokens=config.prefill_tokens)

    def add_to(self, server: grpc.aio.Server, calls: Calls) -> list[str]:
        """Add the service of role=prefill, which has its own health status; return its name."""
        if self._config.role != "prefill":
            return []
        self._servicer = KvTransferServicer(calls, self._metrics, timeout_s=self._config.prefill_timeout_s)
        transfer_pb2_grpc.add_KvTransferServicer_to_server(self._servicer, server)
        return [SERVICE]

    async def identify(self) -> None:
        """Compute the fingerprint of the warm engine. Before the first request."""
        if self._config.role == "both":
            return
        form = await identify(self._engine, self._model)
        if self._servicer is not None:
            self._servicer.form = form
        if self.prefills is not None:
            self.prefills.form = form
        log.info(
            "role: %s, %d bytes a KV page, fingerprint %s",
            self._config.role,
            form.page_bytes,
            form.fingerprint,
        )

    async def aclose(self) -> None:
        """End what runs."""
        if self.prefills is not None:
            await self.prefills.aclose()

    def __repr__(self) -> str:
        return f"<Transfer role={self._config.role} {self.prefills!r}>"
