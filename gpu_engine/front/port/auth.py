"""Bearer tokens for the public port.

Invariant: without a token that the file has, no method runs and no message is read. The health service is the
exception: load balancers call it without a token. Reflection needs a token.

Not responsible for: the file of tokens (see service_runtime/tokens.py), tokens of tenants (see
extensions/tenants/access.py), and encryption (see tls.py): without TLS, an observer of the network can read tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health

from service_runtime.from_files import FromFiles
from service_runtime.tokens import Digests, known

log = logging.getLogger(__name__)

HEADER = "authorization"
SCHEME = "bearer"
_EXEMPT = f"/{health.SERVICE_NAME}/"


class BearerTokens(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic only in the stub
    """Passes calls with `authorization: Bearer TOKEN` on; every other call is UNAUTHENTICATED."""

    def __init__(self, tokens: FromFiles[Digests]) -> None:
        self._tokens = tokens
        self.refused = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the method's handler, or a handler that refuses the call."""
        details: Any = handler_call_details
        if details.method.startswith(_EXEMPT):
            return await continuation(handler_call_details)
        problem = self._problem([value for key, value in details.invocation_metadata if key == HEADER])
        if problem is None:
            return await continuation(handler_call_details)
        self.refused += 1
        log.info("refused", extra={"fields": {"status": "UNAUTHENTICATED", "method": details.method, "why": problem}})
        return refusal(problem)

    def _problem(self, values: list[str | bytes]) -> str | None:
        token = bearer(values)
        if isinstance(token, str):
            return token
        return None if known(token, self._tokens.get()) else "holds an unknown token"

    def __repr__(self) -> str:
        return f"<BearerTokens {self._tokens!r} refused={self.refused}>"


def bearer(values: Sequence[str | bytes]) -> bytes | str:
    """Return the token of a call, given its values of HEADER, or as text what is wrong with them."""
    if not values:
        return "is missing; send `authorization: Bearer TOKEN`"
    if len(values) > 1:
        return "was sent more than once"
    value = values[0].encode() if isinstance(values[0], str) else values[0]
    scheme, _, token = value.partition(b" ")
    if scheme.lower() != SCHEME.encode() or not token:
        return "is not of the form `Bearer TOKEN`"
    return token.strip()


def refusal(problem: str) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a handler that refuses any call as UNAUTHENTICATED."""

    async def refuse(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{HEADER}: {problem}")

    # On the wire every method is a pair of streams; a handler of this kind answers before it reads a message.
    handler: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(refuse)
    return handler
