"""The calls of the service as messages: one channel to one server, without retries and with gRPC's own errors.

Generated from async_rpc.py: `python -m tools.client_twins --write`. For programs that build messages
themselves, such as the command line, the benchmarks and the tests; others use `Client`.

The invariant: every call carries the metadata of `Access`, with the token of the moment.

Not responsible for: building messages (see calls.py), reading answers (see joining.py), retries (see client.py).
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import grpc
from google.protobuf.message import Message

from lockstep_client.access import Access
from lockstep_client.calls import GENERATE_MANY, Method, Q, R
from lockstep_client.concurrency import Actions


class Rpc:
    """A channel to one server. A context manager; closing it cancels the calls that run."""

    def __init__(self, access: Access) -> None:
        """Nothing is sent before the first call."""
        self._access = access
        self._channel = (
            grpc.insecure_channel(access.address, options=access.options)
            if access.credentials is None
            else grpc.secure_channel(access.address, access.credentials, options=access.options)
        )
        self._calls: dict[Method[Any, Any], Any] = {}
        """By method, what opens a call of it."""

    @property
    def address(self) -> str:
        """The server's address."""
        return self._access.address

    def unary(self, method: Method[Q, R], request: Q, timeout_s: float | None = None) -> R:
        """Return the response of a unary call. Raises grpc.RpcError."""
        call = self._opener(method, self._channel.unary_unary)
        response: R = call(request, timeout=timeout_s, metadata=self._access.metadata())
        return response

    def stream(self, method: Method[Any, Any], request: Message, timeout_s: float | None = None) -> Any:
        """Open a call with many responses, and return it: gRPC's call object, which is iterated and cancelled."""
        call = self._opener(method, self._channel.unary_stream)
        return call(request, timeout=timeout_s, metadata=self._access.metadata())

    def generate_many(self) -> Actions:
        """Open a call of GenerateMany."""
        return Actions(self._opener(GENERATE_MANY, self._channel.stream_stream), self._access.metadata())

    def close(self) -> None:
        """Close the channel, and cancel the calls that run."""
        self._channel.close()

    def __enter__(self) -> Rpc:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Rpc {self._access.address}>"

    def _opener(self, method: Method[Any, Any], kind: Any) -> Any:
        if method not in self._calls:
            self._calls[method] = kind(method.path, method.request.SerializeToString, method.response.FromString)
        return self._calls[method]
