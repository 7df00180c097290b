"""The map from vLLM's flags names settings that exist."""

from __future__ import annotations

import re

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.api.transfer_config import TransferConfig
from http_gateway.config import GatewayConfig
from http_gateway.wire.chat import ChatRequest
from service_runtime.settings import settings_of
from tests.docs.pages import ROOT


def test_what_stands_beside_a_flag_is_a_setting_or_a_field() -> None:
    section = (ROOT / "docs/coming.md").read_text().partition("## From vLLM")[2]
    flags = section.partition("Request fields have")[0]
    rows = [line.split("|")[1:3] for line in flags.splitlines() if line.startswith("| `")]
    assert len(rows) > 15
    known = {
        setting.name
        for kind in (EngineConfig, ServerConfig, TransferConfig, GatewayConfig)
        for setting in settings_of(kind)
    }
    known |= ChatRequest.model_fields.keys()
    for theirs, ours in rows:
        names = re.findall(r"`([a-z_]+)(?:\.[a-z_]+)?`", ours)
        assert names or "nothing: " in ours or "`lockstep " in ours, theirs
        assert set(names) <= known, (theirs, set(names) - known)
