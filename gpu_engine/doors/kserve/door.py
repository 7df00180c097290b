"""The door "kserve" of the setting services: the service of KServe and Triton. It needs nothing more than the engine.

Not responsible for: the service (see inference_servicer.py).
"""

from __future__ import annotations

from collections.abc import Collection

from gpu_engine.api.config import ServerConfig
from gpu_engine.doors.found import Methods
from gpu_engine.front.calls import Calls
from gpu_engine.front.port.later_services import Services
from gpu_engine.ops.installation import installed_version

NAMES = frozenset({"kserve"})
METHODS = Methods(
    "inference.GRPCInferenceService",
    tenants=frozenset(
        {
            *("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelConfig"),
            *("RepositoryIndex", "ModelInfer", "ModelStreamInfer"),
        }
    ),
    requests=frozenset({"ModelInfer", "ModelStreamInfer"}),
    # The field `live` is true, and `ready` is absent, which is false.
    loading={"ServerLive": b"\x08\x01", "ServerReady": b"", "ModelReady": b""},
)


def is_wanted(names: Collection[str]) -> bool:
    """Return whether the setting names it."""
    return "kserve" in names


def add_to(services: Services, calls: Calls, config: ServerConfig) -> str:
    """Add the service; return its name."""
    from gpu_engine.doors.kserve.inference_servicer import SERVICE, add_to

    add_to(services, calls, installed_version())
    return SERVICE
