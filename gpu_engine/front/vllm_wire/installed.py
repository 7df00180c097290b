"""Whether the service of this room is served: the setting `vllm_wire`, and the package that it needs.

Invariant: a server that does not serve it does not import that package.

Not responsible for: the service (see servicer.py).
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from types import ModuleType

from gpu_engine.front.port.listening import ServerError

log = logging.getLogger(__name__)

PACKAGE = "smg_grpc_proto"
_MISSING = "needs the package smg-grpc-proto: pip install 'lockstep-engine[vllm-wire]'"

Load = Callable[[str], ModuleType]
"""Imports a module."""


def refuse_missing(setting: str, load: Load = importlib.import_module) -> None:
    """Raise ServerError, in one line, if `setting` is "on" and the package is missing or cannot be used."""
    if setting == "on" and (problem := _problem(load)) is not None:
        raise ServerError(f"vllm_wire: {problem}")


def wanted(setting: str, load: Load = importlib.import_module) -> bool:
    """Return whether to serve it. With "auto", a package that is installed and cannot be used is logged."""
    refuse_missing(setting, load)
    if setting == "auto" and (problem := _problem(load)) is not None:
        if problem != _MISSING:
            log.warning("vllm_wire: %s", problem)
        return False
    return setting != "off"


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
