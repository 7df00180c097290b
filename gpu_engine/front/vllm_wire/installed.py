"""Whether the service of this room is served: the setting `services`, and the package that it needs.

Invariant: a server that does not serve it does not import that package.

Not responsible for: the service (see servicer.py).
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Collection
from types import ModuleType

from gpu_engine.front.port.listening import ServerError

log = logging.getLogger(__name__)

PACKAGE = "smg_grpc_proto"
_MISSING = "needs the package smg-grpc-proto: pip install 'lockstep-engine[vllm-wire]'"

Load = Callable[[str], ModuleType]
"""Imports a module."""


def refuse_missing(names: Collection[str], load: Load = importlib.import_module) -> None:
    """Raise ServerError, in one line, if `names` ask for the service and the package is missing or unusable."""
    if _is_required(names) and (problem := _problem(load)) is not None:
        raise ServerError(f"services: vllm {problem}")


def wanted(names: Collection[str], load: Load = importlib.import_module) -> bool:
    """Return whether to serve it, by the names in the setting services.

    With "auto", an installed package that cannot be used is logged.
    """
    refuse_missing(names, load)
    if _is_required(names):
        return True
    if "auto" not in names:
        return False
    problem = _problem(load)
    if problem not in (None, _MISSING):
        log.warning("services: vllm is not served: %s", problem)
    return problem is None


def _is_required(names: Collection[str]) -> bool:
    return "vllm" in names or ("kv_events" in names and "auto" not in names)


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
