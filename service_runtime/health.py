"""The health service of gRPC (grpc.health.v1), whose watchers never wait for each other.

`grpc_health.v1.health.aio` writes to a watcher while it holds the lock that every other watcher and `set` need, so one
client that reads nothing stops all of them. Invariant: a watcher's write keeps nobody else waiting, and a watcher that
reads late gets the newest status.

Not responsible for: which services there are, and when their status changes.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service_runtime.aborted_calls import send

UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # untyped base
    """The statuses of a server's services. Used on the event loop. The server itself, "", is SERVING at first."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {"": health_pb2.HealthCheckResponse.SERVING}
        self.of_others: int = UNKNOWN
        """The status of a service that is not known; a server that does not know its services yet says NOT_SERVING."""
        self._watchers: set[asyncio.Event] = set()
        """One for each Watch, set when any status has changed."""

    def set(self, service: str, status: int) -> None:
        """Set the status of a service, "" for the server; `status` is one of HealthCheckResponse.ServingStatus."""
        self._statuses[service] = status
        for changed in self._watchers:
            changed.set()

    def stop(self) -> None:
        """Set every service to NOT_SERVING."""
        for service in self._statuses:
            self.set(service, health_pb2.HealthCheckResponse.NOT_SERVING)

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        """Return the status of a service; NOT_FOUND for a service that is not known."""
        status = self._statuses.get(request.service, self.of_others)
        if status == UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"service: there is no {request.service!r}")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Stream the status of a service, now and after each change; SERVICE_UNKNOWN for one that is not known."""
        changed, sent = asyncio.Event(), -1
        self._watchers.add(changed)
        try:
            while True:
                changed.clear()
                status = self._statuses.get(request.service, self.of_others)
                if status != sent:
                    await send(context, health_pb2.HealthCheckResponse(status=status))
                    sent = status
                await changed.wait()
        finally:
            self._watchers.discard(changed)

    def __repr__(self) -> str:
        names = {name: health_pb2.HealthCheckResponse.ServingStatus.Name(each) for name, each in self._statuses.items()}
        return f"<HealthServicer {names} watchers={len(self._watchers)}>"
