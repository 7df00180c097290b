"""Extensions are found by their packages, cost nothing until a setting asks for one, and may be missing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.api.transfer_config import TransferConfig
from gpu_engine.extensions.found import GROUP, Extension, found_extensions, wanted_extensions
from gpu_engine.front.port.listening import ServerError
from gpu_engine.server import Parts, open_server
from tests.fakes import FakeEngine, FakeModel
from tests.gpu_engine.distributions import install

PLAIN = ServerConfig(grammar="none")
ASKING = {
    "tenant_file": (EngineConfig(), ServerConfig(tenant_file="/tenants.toml")),
    "receipt_key": (EngineConfig(), ServerConfig(receipt_key="/key.pem")),
    "role": (EngineConfig(transfer=TransferConfig(role="prefill")), PLAIN),
}


@pytest.mark.parametrize("setting", ASKING)
def test_a_setting_asks_for_its_extension_which_is_named_if_it_is_left_out(setting: str) -> None:
    (wanted,) = wanted_extensions(*ASKING[setting])
    assert setting == wanted.SETTING
    others = [module for module in found_extensions() if module is not wanted]
    with pytest.raises(ServerError, match=f"^{setting}: its extension is not installed$"):
        wanted_extensions(*ASKING[setting], others)
    assert wanted_extensions(EngineConfig(), PLAIN) == []


OTHER = """
from dataclasses import replace

from gpu_engine.core.hooks import EngineHooks
from gpu_engine.extensions.found import Extension

SETTING = "request_log"
seen = []


def is_wanted(engine, server):
    return True


def settings(engine, server):
    return replace(server, drain_timeout_s=0.25)


class open(Extension):
    def __init__(self, engine, server, doors):
        seen.append(("open", server.drain_timeout_s))

    def attach(self, engine, model, registry):
        seen.append(("attach", engine.hooks))

    def add_to(self, server, calls):
        seen.append(("add_to", calls.serving))
        return ["other.Extension"]

    async def warm(self):
        seen.append(("warm", None))

    async def aclose(self):
        seen.append(("aclose", None))
"""


async def test_a_server_calls_the_hooks_of_another_distribution_and_starts_without_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "extension_of_tests", GROUP, OTHER)
    other: Any = next(module for module in found_extensions() if module.SETTING == "request_log")

    def build(config: EngineConfig, *rest: object, hooks: object = None) -> FakeEngine:
        engine: Any = FakeEngine(config)
        engine.hooks = hooks
        return engine

    for extensions in ([other], []):
        parts = Parts(lambda config, progress: FakeModel(), build, extensions=extensions)
        config = ServerConfig(listen=f"unix:{tmp_path}/s{len(extensions)}", grammar="none")
        async with open_server(EngineConfig(max_model_len=256), config, parts=parts) as server:
            assert server.calls.serving
    from gpu_engine.core.hooks import NO_HOOKS

    assert other.seen == [
        *(("open", 0.25), ("attach", NO_HOOKS), ("add_to", False)),
        *(("warm", None), ("aclose", None)),
    ]


async def test_an_extension_is_closed_when_a_later_one_cannot_be_opened(tmp_path: Path) -> None:
    closed: list[str] = []

    class Opened(Extension):
        async def aclose(self) -> None:
            closed.append("first")
            raise OSError("the disk is full")

    def fail(*_: object) -> Extension:
        raise ServerError("second: cannot be opened")

    def module(open: Any) -> Any:
        return SimpleNamespace(SETTING="", is_wanted=lambda *_: True, settings=lambda _, server: server, open=open)

    modules = [module(lambda *_: Opened()), module(fail)]
    parts = Parts(lambda config, progress: FakeModel(), lambda *_: None, extensions=modules)  # type: ignore[arg-type,return-value]
    with pytest.raises(OSError, match="disk") as raised:
        async with open_server(EngineConfig(), ServerConfig(listen=f"unix:{tmp_path}/s", grammar="none"), parts=parts):
            pytest.fail("it must not start")
    assert closed == ["first"]
    assert "second: cannot be opened" in str(raised.value.__context__)
