"""Refuses bytes that are not a protobuf message: INVALID_ARGUMENT, not gRPC's UNKNOWN and a logged traceback.

Invariant: a method is called with a parsed message or not at all; a method that reads a stream of messages meets
InvalidRequest in place of one that does not parse.

Not responsible for: the contents of a message (see front/validation.py).
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from gpu_engine.api.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Replaces a message that could not be parsed."""

    problem: str


class ParsedRequests(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic only in the stub
    """Refuses messages that do not parse, for methods that are coroutines."""

    def __init__(self) -> None:
        self.refused = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the method's handler, wrapped in a check of its requests."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler  # type: ignore[no-any-return]
        one = handler.unary_stream if handler.response_streaming else handler.unary_unary
        method = handler.stream_stream if handler.request_streaming else one
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

        async def parsed(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
            async for request in requests:
                if isinstance(request, _Malformed):
                    self.refused += 1
                    raise InvalidRequest("request", f"is malformed: {request.problem}")
                yield request

        async def call_stream(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            return await method(parsed(requests), context)

        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(call_stream, parse, handler.response_serializer)
        make = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        return make(call, parse, handler.response_serializer)

    def __repr__(self) -> str:
        return f"<ParsedRequests refused={self.refused}>"
