"""The doors "vllm" and "kv_events" of the setting services: the service of vLLM, and the package that it needs.

Invariant: a server that does not serve it does not import that package.

Not responsible for: the service (see vllm_servicer.py).
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Collection
from types import ModuleType

from gpu_engine.api.config import ServerConfig
from gpu_engine.doors.found import Methods
from gpu_engine.front.calls import Calls
from gpu_engine.front.port.later_services import Services
from gpu_engine.front.port.listening import ServerError
from gpu_engine.ops.installation import installed_version

log = logging.getLogger(__name__)

NAMES = frozenset({"vllm", "kv_events"})
METHODS = Methods(
    "vllm.grpc.engine.VllmEngine",
    tenants=frozenset({"Generate", "Abort", "HealthCheck", "GetModelInfo", "GetTokenizer", "Embed"}),
    requests=frozenset({"Generate"}),
    loading={"HealthCheck": b""},  # the field `healthy` is absent, which is false
)
PACKAGE = "smg_grpc_proto"
_MISSING = "needs the package smg-grpc-proto: pip install 'lockstep-engine[vllm-wire]'"

Load = Callable[[str], ModuleType]
"""Imports a module."""


def is_wanted(names: Collection[str], load: Load = importlib.import_module) -> bool:
    """Return whether to serve it, by the names in the setting services.

    Raises ServerError, in one line, if they ask for the service and the package is missing or unusable. With "auto", an
    installed package that cannot be used is logged.
    """
    required = "vllm" in names or ("kv_events" in names and "auto" not in names)
    if not required and "auto" not in names:
        return False
    problem = _problem(load)
    if required and problem is not None:
        raise ServerError(f"services: vllm {problem}")
    if problem not in (None, _MISSING):
        log.warning("services: vllm is not served: %s", problem)
    return problem is None


def add_to(services: Services, calls: Calls, config: ServerConfig) -> str:
    """Add the service; return its name."""
    from gpu_engine.doors.vllm_wire.vllm_servicer import SERVICE, add_to

    add_to(services, calls, installed_version(), kv_events="kv_events" in config.service_names)
    return str(SERVICE)


def _problem(load: Load) -> str | None:
    try:
        load(f"{PACKAGE}.generated.vllm_engine_pb2_grpc")
    except ModuleNotFoundError as error:
        if error.name != PACKAGE:
            raise
        return _MISSING
    except Exception as error:  # a runtime of protobuf or grpcio that its code does not accept
        return f"smg-grpc-proto cannot be used: {' '.join(str(error).split())}"
    return None
