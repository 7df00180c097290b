"""Ends gRPC calls cleanly: an aborted call frees what it holds at once, and a broken connection cancels its call.

gRPC stores the error of an abort with the state of its call, and the error's traceback refers to the frames of the
method, which refer to the call: a cycle. It holds the request, such as a grammar of many megabytes that was refused,
until Python's next full collection, which in a process of many objects is minutes away.

Invariant: the client sees what it saw without this interceptor. Not responsible for: which errors abort a call; the
last message of a stream of requests, which gRPC's own iterator holds in another cycle.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import grpc


def forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error and of the errors after it. Called where it is handled, or logged, for good."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


async def send(context: grpc.aio.ServicerContext[Any, Any], message: Any) -> None:
    """Write one response of a stream. Raises CancelledError where the client left during the write.

    A write that waits for a slow reader when the connection breaks fails with an error of gRPC's own, before gRPC
    cancels the call and before `context.cancelled()` says so. The call ends as a cancelled one does.
    """
    try:
        await context.write(message)
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error


class AbortedCalls(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic only in the stub
    """The first interceptor of a server: its methods that are coroutines leave no cycle when they abort."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the method's handler; its aborts forget their frames."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:  # no such method
            return handler  # type: ignore[return-value]
        kind = "_".join(
            "stream" if streams else "unary" for streams in (handler.request_streaming, handler.response_streaming)
        )
        method = getattr(handler, kind)
        if not inspect.iscoroutinefunction(method):
            return handler  # type: ignore[no-any-return]

        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                return await method(request, context)
            except grpc.aio.AbortError as error:
                forget_frames(error)
                return None  # gRPC raises the error again by itself, after every method of an aborted call

        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(call, handler.request_deserializer, handler.response_serializer)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return "<AbortedCalls>"
