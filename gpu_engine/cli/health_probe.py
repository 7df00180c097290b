"""Asks a server for its health, once: what a container's health check runs.

The invariant: it loads nothing but gRPC, since it is started every few seconds. Not here: the answer (`server.py`).
"""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gpu_engine.cli.client_access import Access


def check(address: str, access: Access, timeout_s: float) -> str:
    """Return "SERVING", "NOT_SERVING", or why there is no answer."""
    with grpc.secure_channel(address, access.tls) if access.tls else grpc.insecure_channel(address) as channel:
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_s, metadata=access.metadata
            )
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))
