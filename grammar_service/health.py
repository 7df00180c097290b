"""Asks a running sidecar for its health, once: what a container's health check runs.

The invariant: it loads nothing but gRPC, since it is started every few seconds. Not here: the answer (`server.py`).
"""

from __future__ import annotations

from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 5.0


def check(socket: Path, timeout_s: float = TIMEOUT_S) -> str:
    """Return "SERVING", "NOT_SERVING", or why there is no answer."""
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))
