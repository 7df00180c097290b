"""The extension for tenants: accounts, the interceptor that lets calls in, shares of the slots, and the audit log.

Not responsible for: when it is opened and closed (see gpu_engine/server.py).
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from prometheus_client import CollectorRegistry

from gpu_engine.api.admission import EngineAdmission
from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.api.ports import EngineCore, Model
from gpu_engine.core.hooks import EngineHooks
from gpu_engine.doors.found import Door, methods_of
from gpu_engine.extensions.found import Extension
from gpu_engine.extensions.tenants.access import TenantAccess
from gpu_engine.extensions.tenants.accounts import Tenants
from gpu_engine.extensions.tenants.audit import AuditLog
from gpu_engine.extensions.tenants.fair_shares import FairShares
from gpu_engine.extensions.tenants.metrics import TenantCollector
from gpu_engine.front.port.listening import ServerError
from gpu_engine.ops.access import CallRecord
from service_runtime.tenants import tenant_file

SETTING = "tenant_file"


def is_wanted(engine: EngineConfig, server: ServerConfig) -> bool:
    """See `ExtensionModule`."""
    return bool(server.tenant_file)


def settings(engine: EngineConfig, server: ServerConfig) -> ServerConfig:
    """See `ExtensionModule`: tenants change no setting."""
    return server


class Tenancy(Extension):
    """The accounts of a server with tenants, and the interceptor that lets their calls in."""

    def __init__(self, engine: EngineConfig, server: ServerConfig, doors: Sequence[Door]) -> None:
        """Raises ServerError for a file that is missing or wrong."""
        try:
            file = tenant_file(Path(server.tenant_file))
        except ValueError as error:
            raise ServerError(str(error)) from error
        methods = methods_of(doors)
        self.gateway_token = secrets.token_hex(32)
        self.accounts = self.tenants = Tenants(
            file,
            admission=EngineAdmission.of(engine),
            gateway_digest=hashlib.sha256(self.gateway_token.encode()).digest() if server.http else b"",
        )
        try:
            self.audit = AuditLog(Path(server.audit_log)) if server.audit_log else None
        except OSError as error:
            raise ServerError(f"audit_log: cannot open {server.audit_log}: {error.strerror}") from error
        self.interceptor = TenantAccess(self.tenants, methods, self.audit)

    def hook(self, hooks: EngineHooks) -> EngineHooks:
        """Give the next slot to the tenant that has had least."""
        return replace(hooks, slot_order=FairShares)

    def attach(self, engine: EngineCore, model: Model, registry: CollectorRegistry) -> None:
        """Register the accounts' metrics."""
        registry.register(TenantCollector(lambda: self.tenants.accounts))

    def ended(self, record: CallRecord) -> None:
        """Count a request that has ended, and write its line."""
        self.tenants.ended(record.tenant, record.status)
        if self.audit is not None:
            self.audit.requested(record)

    async def aclose(self) -> None:
        """Close the audit log."""
        if self.audit is not None:
            self.audit.close()

    def __repr__(self) -> str:
        return f"<Tenancy {self.tenants!r}>"


open = Tenancy
