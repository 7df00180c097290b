"""Asks a running grammar process for its health, once. A container's health check runs this.

Invariant: imports nothing of the project, because a container starts it every few seconds.

Not responsible for: the answer (see server.py).
"""

from __future__ import annotations

from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 5.0


def check(socket: Path, timeout_s: float = TIMEOUT_S) -> str:
    """Return "SERVING" or "NOT_SERVING"; without an answer, the gRPC error."""
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))
