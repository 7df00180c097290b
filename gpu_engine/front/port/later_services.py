"""The services that need the model: their calls wait for it, on connections that are made at once.

A client's connection has its time limit, 20 s by default in gRPC, and a large model takes longer to load. So the port
answers from the start, with its health and what doors answer while the model is loaded, and holds a call of any other
method until the services are there.

Invariant: a call is held before its message is read, and after its token was checked, where it has one; a client that
gives up ends it. Not responsible for: who is let in (see auth.py), and what health says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

import grpc

_Servicer = TypeVar("_Servicer")


class Services(Protocol):
    """The services of the public port, to which doors and extensions add theirs. It has the two methods of a server
    that generated code calls, and no others."""

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler[Any, Any]], /) -> None:
        """As `grpc.aio.Server`."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, object], /) -> None:
        """As `grpc.aio.Server`."""


def add_servicer(services: Services, add: Callable[[_Servicer, Any], None], servicer: _Servicer) -> None:
    """Add a servicer by `add`, the function that is generated for its service: its type names only gRPC's servers."""
    add(servicer, services)


class LaterServices(grpc.GenericRpcHandler, grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic only in the stub
    """Takes services as a server does, also after that server has started. Its handler and its last interceptor."""

    def __init__(self) -> None:
        self._handlers: list[grpc.GenericRpcHandler[Any, Any]] = []
        self._complete = asyncio.Event()
        self._early: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        """Handlers of methods, "/SERVICE/METHOD", until those of their services are there."""

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler[Any, Any]], /) -> None:
        """See `Services`."""
        self._handlers.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, object], /) -> None:
        """See `Services`; generated code adds the same methods in both ways, and one is enough."""

    def answer_early(self, method: str, answer: bytes) -> None:
        """Answer a method, "/SERVICE/METHOD", with a serialised message until its service is there."""

        async def call(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            return answer

        self._early[method] = grpc.unary_unary_rpc_method_handler(call)

    def complete(self) -> None:
        """Let the calls go on; methods that are not there now are UNIMPLEMENTED."""
        self._complete.set()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the handler of a method; None: there is none, or none yet."""
        found = (each.service(handler_call_details) for each in self._handlers)
        early = self._early.get(handler_call_details.method)
        return next((handler for handler in found if handler is not None), early)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the method's handler, once there is one, or once every service is there."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            await self._complete.wait()
            handler = await continuation(handler_call_details)
        return handler  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"<LaterServices {len(self._handlers)} handlers{'' if self._complete.is_set() else ', more to come'}>"
