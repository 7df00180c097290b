"""Addresses and files that a server cannot use are refused before anything heavy is imported."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from gpu_engine.api.config import ServerConfig
from gpu_engine.front.port.early import check_port
from gpu_engine.front.port.listening import ServerError


@pytest.mark.parametrize("setting", ["listen", "health_listen", "metrics_listen"])
def test_a_taken_port_is_named(setting: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        config = ServerConfig(**{"listen": "127.0.0.1:0"} | {setting: address})
        with pytest.raises(ServerError, match=f"{setting}: cannot bind '{address}': Address already in use"):
            check_port(config)


def test_what_is_free_stays_free(tmp_path: Path) -> None:
    config = ServerConfig(listen=f"unix:{tmp_path}/s", health_listen="[::1]:0", metrics_listen="localhost:0")
    check_port(config)
    check_port(config)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"listen": "unix:/nowhere/s"}, "listen: /nowhere is no directory"),
        ({"listen": "no.such.host.invalid:1"}, "listen: no.such.host.invalid has no address"),
        ({"listen": "192.0.2.1:1"}, "listen: cannot bind '192.0.2.1:1': Cannot assign requested address"),
        ({"auth_token_file": "/nowhere/tokens"}, "auth_token_file: cannot read /nowhere/tokens"),
        ({"tls_cert": "/nowhere/a", "tls_key": "/nowhere/b"}, "tls_cert: cannot read /nowhere/a"),
    ],
)
def test_what_cannot_be_used_is_named(fields: dict[str, str], message: str) -> None:
    with pytest.raises(ServerError, match=message):
        check_port(ServerConfig(**{"listen": "127.0.0.1:0"} | fields))
