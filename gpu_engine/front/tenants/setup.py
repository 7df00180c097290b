"""What only a server with tenants has: accounts, the interceptor that lets calls in, and the audit log.

Not responsible for: when it is opened and closed (see gpu_engine/server.py).
"""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import AsyncExitStack
from pathlib import Path

from gpu_engine.api.admission import EngineAdmission
from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.front.port.listening import ServerError
from gpu_engine.front.tenants.access import TenantAccess
from gpu_engine.front.tenants.accounts import Tenants
from gpu_engine.front.tenants.audit import AuditLog
from gpu_engine.ops.access import CallRecord
from service_runtime.tenants import tenant_file


class Tenancy:
    """The accounts of a server with tenants, and the interceptor that lets their calls in. Made on the event loop."""

    def __init__(self, engine: EngineConfig, server: ServerConfig) -> None:
        """Raises ServerError for a file that is missing or wrong."""
        try:
            file = tenant_file(Path(server.tenant_file))
        except ValueError as error:
            raise ServerError(str(error)) from error
        self._gateway_token = secrets.token_hex(32)
        self.tenants = Tenants(
            file,
            admission=EngineAdmission.of(engine),
            gateway_digest=hashlib.sha256(self._gateway_token.encode()).digest() if server.http else b"",
        )
        try:
            self.audit = AuditLog(Path(server.audit_log)) if server.audit_log else None
        except OSError as error:
            raise ServerError(f"audit_log: cannot open {server.audit_log}: {error.strerror}") from error
        self.access = TenantAccess(self.tenants, self.audit)

    def ended(self, record: CallRecord) -> None:
        """Count a request that has ended, and write its line."""
        self.tenants.ended(record.tenant, record.status)
        if self.audit is not None:
            self.audit.requested(record)

    def close(self) -> None:
        """Close the audit log. No call runs any more."""
        if self.audit is not None:
            self.audit.close()

    def write_gateway_token(self, path: Path) -> None:
        """Write the token of this server's own gateway into a new file, which only its user can read."""
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(self._gateway_token)

    def __repr__(self) -> str:
        return f"<Tenancy {self.tenants!r}>"


def open_tenancy(stack: AsyncExitStack, engine: EngineConfig, server: ServerConfig) -> Tenancy | None:
    """Return what `tenant_file` asks for, which `stack` closes; None: the server has no tenants. Raises ServerError."""
    if not server.tenant_file:
        return None
    tenancy = Tenancy(engine, server)
    stack.callback(tenancy.close)
    return tenancy
