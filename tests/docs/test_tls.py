"""The part of docs/access.md on TLS: certificates are made, servers ask for them, clients connect."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.cli import commands as cli
from gpu_engine.server import Parts, open_server
from service_runtime.settings import Sources
from tests.docs.commands import commands
from tests.docs.pages import ROOT, Snippet, snippets
from tests.fakes import FakeEngine, FakeModel, answers_with

PAGE = ROOT / "docs/access.md"
BLOCKS = [block for block in snippets("bash", "python") if block.page == PAGE and "tls" in block.marks]
ADDRESS = "gpu1:50051"

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl on PATH")


def parts_of_the_page() -> Iterator[tuple[list[str], list[Snippet]]]:
    """Yield each command line of a server with the blocks between it and the next one."""
    clients: list[Snippet] = []
    serving: list[str] = []
    for block in BLOCKS:
        servers = [words for words in commands(block.text) if words[:2] == ["lockstep", "serve"]]
        if servers:
            if serving:
                yield serving, clients
            (serving,), clients = servers, []
        clients.append(block)
    yield serving, clients


def server_config(words: list[str]) -> ServerConfig:
    flags = cli._parser().parse_args(words[1:])
    return replace(Sources(flags, {}, [EngineConfig, ServerConfig]).fill(ServerConfig), listen="127.0.0.1:0")


def run(block: Snippet, address: str) -> None:
    """Run a block's clients; a server's command line is skipped."""
    if block.language == "python":
        exec(compile(block.text.replace(ADDRESS, address), str(block), "exec", dont_inherit=True), {})
        return
    for words in commands(block.text):
        if words[0] == "lockstep" and words[1] != "serve":
            assert cli.main([address if word == ADDRESS else word for word in words[1:]]) == cli.OK, words


@pytest.fixture
def certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that the page makes, in the working directory."""
    monkeypatch.chdir(tmp_path)
    for block in BLOCKS:
        lines = block.text.replace("\\\n", "").splitlines()
        made = [line for line in lines if line.startswith(("openssl", "echo", "chmod"))]
        if block.language == "bash" and made:
            script = "set -e\n" + "\n".join(made)
            subprocess.run(["bash", "-c", script], check=True, capture_output=True, env=os.environ)


@pytest.mark.usefixtures("certificates")
async def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    served = list(parts_of_the_page())
    assert len(served) == 2
    for words, blocks in served:
        parts = Parts(
            lambda config, progress: FakeModel(), lambda config, *more: FakeEngine(config, answers_with("hm"))
        )
        config = replace(server_config(words), grammar="none")
        async with open_server(EngineConfig(max_model_len=256), config, parts=parts) as server:
            address = f"localhost:{server.address.rpartition(':')[2]}"
            for block in blocks:
                await asyncio.to_thread(run, block, address)
    assert capsys.readouterr().out.count("hm") == 5


def test_the_page_has_a_client_of_each_kind() -> None:
    assert [block.language for block in BLOCKS].count("python") == 3
