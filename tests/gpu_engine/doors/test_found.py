"""Doors are found by their packages, cost nothing until they are wanted, and may be missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.doors.found import GROUP, Door, found_doors, wanted_doors
from gpu_engine.front.port.listening import ServerError
from gpu_engine.server import Parts, open_server
from tests.fakes import FakeEngine, FakeModel
from tests.gpu_engine.distributions import install

UNUSED = """
import sys
from gpu_engine.doors.found import found_doors
import gpu_engine.server
assert {name for door in found_doors() for name in door.NAMES} == {"kserve", "vllm", "kv_events"}
loaded = [name for name in sys.modules if name.startswith(("smg_grpc_proto", "protos.kserve"))]
assert not loaded, loaded
"""


def test_finding_the_doors_imports_no_service() -> None:
    subprocess.run([sys.executable, "-c", UNUSED], check=True, timeout=120)


def test_a_door_that_is_left_out_is_named_if_it_is_wanted() -> None:
    kserve: Any = next(door for door in found_doors() if "kserve" in door.NAMES)
    assert wanted_doors(ServerConfig(services="kserve"), [kserve]) == [kserve]
    assert wanted_doors(ServerConfig(services="auto"), []) == []
    assert wanted_doors(ServerConfig(services=""), [kserve]) == []
    with pytest.raises(ServerError, match=r"^services: kserve is not installed$"):
        wanted_doors(ServerConfig(services="kserve"), [])


OTHER = """
from gpu_engine.doors.found import Methods

NAMES = frozenset({"other"})
METHODS = Methods("other.Service", tenants=frozenset(), requests=frozenset())
served = []


def is_wanted(names):
    return "auto" in names


def add_to(server, calls, config):
    served.append(config.listen)
    return METHODS.service
"""


async def test_a_server_serves_the_door_of_another_distribution_and_starts_without_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "door_of_tests", GROUP, OTHER)
    other: Any = next(door for door in found_doors() if "other" in door.NAMES)
    for doors in ([other], []):
        parts = Parts(lambda config, progress: FakeModel(), lambda config, *rest: FakeEngine(config), doors=doors)
        config = ServerConfig(listen=f"unix:{tmp_path}/s{len(doors)}", grammar="none")
        async with open_server(EngineConfig(max_model_len=256), config, parts=parts) as server:
            assert server.calls.serving
    assert other.served == [f"unix:{tmp_path}/s1"]


def test_every_door_says_what_it_serves() -> None:
    doors: list[Door] = found_doors()
    assert len(doors) == 2
    assert all(door.NAMES and door.METHODS.requests <= door.METHODS.tenants for door in doors)
