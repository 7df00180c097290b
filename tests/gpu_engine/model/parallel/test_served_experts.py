"""Two servers share the experts of a model: they serve, die together, and start again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.gpu_engine import tiny
from tests.gpu_engine.model.parallel.forked_servers import ForkedServer, short_folder
from tests.gpu_engine.model.parallel.loads import LIMIT_S, Load, answer

pytestmark = pytest.mark.slow


def start(folder: Path, *extra: str) -> ForkedServer:
    folder.mkdir(exist_ok=True)
    flags = ("--dtype", "float32", "--num-threads", "1", "--max-model-len", "512")
    return ForkedServer.start(folder, *flags, *extra)


def start_both(model: Path, folder: Path) -> list[ForkedServer]:
    shared = ("--model", str(model), "--data-parallel-attention", "2", "--data-parallel-dir", str(folder / "experts"))
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda r: start(folder / str(r), *shared, "--data-parallel-rank", str(r)), range(2)))


def answers(server: ForkedServer) -> list[list[int]]:
    return [answer(server, guided=guided) for guided in (False, True)]


def lose(server: ForkedServer, other: ForkedServer, number: signal.Signals) -> str:
    """Send the signal to `other` under load; return the line with which `server` ends."""
    load, own, theirs = Load(server, guided=True), server.processes(), other.processes()
    assert load.begun.wait(30)
    begun_s = time.monotonic()
    os.kill(theirs[0].pid, number)
    code = server.ended(own, LIMIT_S)
    load.end(LIMIT_S)
    assert time.monotonic() - begun_s < LIMIT_S
    assert code == 1
    if number != signal.SIGKILL:
        theirs[0].kill()
    other.ended(theirs, LIMIT_S)
    lines = [line for line in server.text().splitlines() if "the engine ends: " in line]
    assert len(lines) == 1, server.text()
    assert "Traceback" not in server.text()
    return lines[0].partition("the engine ends: ")[2]


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


def test_two_servers_have_the_tokens_of_one_and_die_and_start_together(folder: Path) -> None:
    model = tiny.save(tiny.OWN_FORWARD["mixtral"](), folder / "model", rounds=True)
    whole = start(folder / "whole", "--model", str(model))
    processes = whole.processes()
    expected = answers(whole)
    whole.process.terminate()
    assert whole.ended(processes, 20) == 0
    for victim, number, reason in (
        (1, signal.SIGKILL, "has ended"),
        (0, signal.SIGSTOP, "has sent no heartbeat for 2.5 s"),
    ):
        both = start_both(model, folder)
        assert [answers(server) for server in both] == [expected] * 2
        other = both[victim]
        line = lose(both[1 - victim], other, number)
        assert line == f"rank {victim} of 2 (process {other.process.pid}) {reason}"
    both = start_both(model, folder)
    processes = [server.processes() for server in both]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(answers, both)) == [expected] * 2
    for server in both:
        server.process.terminate()
    assert [server.ended(each, 20) for server, each in zip(both, processes, strict=True)] == [0, 0]
