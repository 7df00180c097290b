"""Bytes that are no message: INVALID_ARGUMENT that names the type, not gRPC's UNKNOWN and a traceback in the log.

The invariant: a method is called with a parsed message or not at all. Not here: what a message may say
(`validation.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Stands for a message that could not be parsed."""

    problem: str


class ParsedRequests(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stub alone
    """Refuses what does not parse; methods with one request that are coroutines, as ours are."""

    def __init__(self) -> None:
        self.refused = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the method's handler, or the same with a look at its request first."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler  # type: ignore[no-any-return]
        method = handler.unary_stream if handler.response_streaming else handler.unary_unary
        if not inspect.iscoroutinefunction(method):
            return handler  # type: ignore[no-any-return]

        def parse(content: bytes) -> Any:
            try:
                return handler.request_deserializer(content)
            except DecodeError as error:
                return _Malformed(str(error))

        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            if isinstance(request, _Malformed):
                self.refused += 1
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the request is malformed: {request.problem}")
            return await method(request, context)

        make = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        return make(call, parse, handler.response_serializer)

    def __repr__(self) -> str:
        return f"<ParsedRequests refused={self.refused}>"
