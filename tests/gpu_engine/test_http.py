"""The gateway process that a server starts next to itself (`http`)."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from gpu_engine.front.port.listening import ServerError
from gpu_engine.server import open_server
from tests.fakes import answers_with
from tests.gpu_engine.fake_servers import ENGINE, config, parts
from tests.gpu_engine.http_calls import ASK, get, until_healthy

TOKEN = "a-token-of-the-test"


def gateways() -> list[psutil.Process]:
    # A gateway that a test starts itself has an address, and no socket of its parent's.
    commands = {child: child.cmdline() for child in psutil.Process().children()}
    return [
        child for child, words in commands.items() if "http_gateway" in words and any(w[:3] == "fd:" for w in words)
    ]


async def test_a_server_serves_http_and_replaces_a_gateway_that_was_killed(tmp_path: Path) -> None:
    settings = config(tmp_path, http="127.0.0.1:0")
    async with open_server(ENGINE, settings, parts=parts(answers_with("yes"))) as server:
        assert server.http_address is not None
        await until_healthy(server.http_address)
        (gateway,) = gateways()
        status, answer = await get(server.http_address, "/v1/chat/completions", ASK)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "yes")
        os.kill(gateway.pid, signal.SIGKILL)
        # The listening socket is the server's: connections wait for the next gateway.
        await until_healthy(server.http_address)
        assert (await get(server.http_address, "/v1/chat/completions", ASK))[0] == 200
        (second,) = gateways()
        assert second.pid != gateway.pid
    assert not second.is_running()


async def test_the_gateway_asks_for_the_server_s_tokens(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{TOKEN}\nanother-token-of-the-test\n")
    settings = config(tmp_path, http="127.0.0.1:0", auth_token_file=str(tokens))
    async with open_server(ENGINE, settings, parts=parts(answers_with("yes"))) as server:
        assert server.http_address is not None
        await until_healthy(server.http_address)
        for token, status in ((None, 401), ("wrong-token-of-the-test", 401), ("another-token-of-the-test", 200)):
            assert (await get(server.http_address, "/v1/chat/completions", ASK, token))[0] == status


async def test_a_taken_http_port_is_reported_at_once(tmp_path: Path) -> None:
    taken = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    async with taken:
        port = taken.sockets[0].getsockname()[1]
        settings = config(tmp_path, http=f"127.0.0.1:{port}")
        with pytest.raises(ServerError, match=f"http: cannot bind '127.0.0.1:{port}': Address already in use"):
            async with open_server(ENGINE, settings, parts=parts(answers_with("yes"))):
                raise AssertionError("it started")
