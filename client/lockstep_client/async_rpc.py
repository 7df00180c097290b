"""The calls of the service as messages: one channel to one server, without retries and with gRPC's own errors.

`rpc.py` is generated from this file: `python -m tools.client_twins --write`. For programs that build messages
themselves, such as the command line, the benchmarks and the tests; others use `AsyncClient`.

The invariant: every call carries the metadata of `Access`, with the token of the moment.

Not responsible for: building messages (see calls.py), reading answers (see joining.py), retries (see async_client.py).
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import grpc
from google.protobuf.message import Message

from lockstep_client.access import Access
from lockstep_client.calls import GENERATE_MANY, Method, Q, R
from lockstep_client.concurrency import AsyncActions


class AsyncRpc:
    """A channel to one server. An asynchronous context manager; closing it cancels the calls that run."""

    def __init__(self, access: Access) -> None:
        """Nothing is sent before the first call."""
        self._access = access
        self._channel = (
            grpc.aio.insecure_channel(access.address, options=access.options)
            if access.credentials is None
            else grpc.aio.secure_channel(access.address, access.credentials, options=access.options)
        )
        self._calls: dict[Method[Any, Any], Any] = {}
        """By method, what opens a call of it."""

    @property
    def address(self) -> str:
        """The server's address."""
        return self._access.address

    async def unary(self, method: Method[Q, R], request: Q, timeout_s: float | None = None) -> R:
        """Return the response of a unary call. Raises grpc.RpcError."""
        call = self._opener(method, self._channel.unary_unary)
        response: R = await call(request, timeout=timeout_s, metadata=self._access.metadata())
        return response

    def stream(self, method: Method[Any, Any], request: Message, timeout_s: float | None = None) -> Any:
        """Open a call with many responses, and return it: gRPC's call object, which is iterated and cancelled."""
        call = self._opener(method, self._channel.unary_stream)
        return call(request, timeout=timeout_s, metadata=self._access.metadata())

    def generate_many(self) -> AsyncActions:
        """Open a call of GenerateMany."""
        return AsyncActions(self._opener(GENERATE_MANY, self._channel.stream_stream), self._access.metadata())

    async def aclose(self) -> None:
        """Close the channel, and cancel the calls that run."""
        await self._channel.close(None)

    async def __aenter__(self) -> AsyncRpc:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<AsyncRpc {self._access.address}>"

    def _opener(self, method: Method[Any, Any], kind: Any) -> Any:
        if method not in self._calls:
            self._calls[method] = kind(method.path, method.request.SerializeToString, method.response.FromString)
        return self._calls[method]
