"""Lets the calls of tenants in: authentication, and which methods are only for operators.

Invariant: only the methods of the health service run without a tenant. A method that no `Methods` names is for
operators: one that is added is closed until it is named.

Not responsible for: limits (see accounts.py), servers without tenants (see front/port/auth.py).
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health

from gpu_engine.doors.found import Methods
from gpu_engine.extensions.tenants.accounts import Tenants
from gpu_engine.extensions.tenants.audit import AuditLog
from gpu_engine.front.port.auth import HEADER, refusal
from service_runtime.tenants import Tenant

log = logging.getLogger(__name__)

_EXEMPT = f"/{health.SERVICE_NAME}/"
ENGINE = Methods(
    "lockstep.engine.v1.Engine",
    tenants=frozenset(
        {
            *("Generate", "GenerateMany", "Abort", "Compile", "GetModelInfo", "Tokenize", "Detokenize"),
            *("GetTokenizerInfo", "ListAdapters"),
        }
    ),
    requests=frozenset({"Generate", "GenerateMany"}),
)
REFLECTION = Methods(
    "grpc.reflection.v1alpha.ServerReflection", tenants=frozenset({"ServerReflectionInfo"}), requests=frozenset()
)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class TenantAccess(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic only in the stub
    """Passes the calls of tenants on; a stranger's is UNAUTHENTICATED, and an operator's method PERMISSION_DENIED."""

    def __init__(self, tenants: Tenants, doors: Sequence[Methods] = (), audit: AuditLog | None = None) -> None:
        """Args: see below.

        doors: the methods of the doors that are served.
        audit: gets a line for each call of a method that does not generate; None: there is no audit log.
        """
        self._tenants, self._audit = tenants, audit
        services = (ENGINE, REFLECTION, *doors)
        self._for_tenants = {f"/{each.service}/{method}" for each in services for method in each.tenants}
        self._generate = {f"/{each.service}/{method}" for each in services for method in each.requests}
        self.refused = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Return the method's handler, which first looks for the caller, or a handler that refuses the call."""
        details: Any = handler_call_details
        method = str(details.method)
        if method.startswith(_EXEMPT):
            return await continuation(handler_call_details)
        by_token = any(key == HEADER for key, _ in details.invocation_metadata)
        if by_token or not self._tenants.table.by_certificate:
            # Without a certificate to look at, a stranger's message is never read.
            found = self._tenants.find(details.invocation_metadata, None)
            if isinstance(found, str):
                self._refused("", method, grpc.StatusCode.UNAUTHENTICATED, found)
                return refusal(found)
        handler = await continuation(handler_call_details)
        return handler if handler is None else _checked(handler, lambda context: self._call(method, context))

    @asynccontextmanager
    async def _call(self, method: str, context: Any) -> AsyncIterator[None]:
        """End a call that may not run, else write its line when it has ended."""
        found = self._tenants.find(context.invocation_metadata() or (), context.peer_identities())
        if not isinstance(found, Tenant):
            self._refused("", method, grpc.StatusCode.UNAUTHENTICATED, found)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{HEADER}: {found}")
        elif method not in self._for_tenants and not found.operator:
            self._refused(found.name, method, grpc.StatusCode.PERMISSION_DENIED, "its tenant is no operator")
            problem = f"{method.rpartition('/')[2]}: is for operators (operator = true of a tenant)"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, problem)
        elif self._audit is None or method in self._generate:
            yield
        else:
            began_s, status = time.monotonic(), "CANCELLED"
            try:
                yield
                status = "OK"
            except Exception:
                status = grpc.StatusCode.UNKNOWN.name
                raise
            finally:
                # A call that `abort` ended has a code, and one that has returned has none.
                code = context.code()
                status = code.name if isinstance(code, grpc.StatusCode) else status
                self._audit.called(found.name, method, status, time.monotonic() - began_s)

    def _refused(self, tenant: str, method: str, status: grpc.StatusCode, why: str) -> None:
        self.refused += 1
        log.info("refused", extra={"fields": {"status": status.name, "method": method, "tenant": tenant, "why": why}})
        if self._audit is not None:
            self._audit.called(tenant, method, status.name, 0.0)

    def __repr__(self) -> str:
        return f"<TenantAccess {self._tenants!r} refused={self.refused}>"


def _checked(handler: Any, around: Callable[[Any], AbstractAsyncContextManager[None]]) -> Handler:
    """Return a handler that runs the method within `around`, which ends a call by raising."""
    ways = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
    way = ways[2 * bool(handler.request_streaming) + bool(handler.response_streaming)]
    method = getattr(handler, way)

    async def call(request: Any, context: Any) -> Any:
        async with around(context):
            return await method(request, context)

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        async with around(context):
            async for response in method(request, context):
                yield response

    checked: Any = call if inspect.iscoroutinefunction(method) else stream
    make = getattr(grpc, f"{way}_rpc_method_handler")
    made: Handler = make(checked, handler.request_deserializer, handler.response_serializer)
    return made
