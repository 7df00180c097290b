"""Servers of two ranks: one that is killed at any moment under load or hangs ends the other, and leaves nothing."""

from __future__ import annotations

import random
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from gpu_engine.model.loader import LoadedModel
from tests.gpu_engine.model.parallel.forked_servers import ForkedServer, short_folder
from tests.gpu_engine.model.parallel.loads import LIMIT_S, Load, answer

pytestmark = pytest.mark.slow

ROUNDS = 4
"""For each rank; runs of twenty have passed (docs/log/)."""
LANES = 2
"""Rounds next to each other: most of a round is the start of the processes."""


def run_round(server: ForkedServer, rank: int, pause_s: float, *, guided: bool) -> None:
    load = Load(server, guided=guided)
    assert load.begun.wait(30)
    processes, victim = server.processes(), server.rank()
    time.sleep(pause_s)
    begun_s = time.monotonic()
    (victim if rank else processes[0]).send_signal(signal.SIGKILL)
    code = server.ended(processes, LIMIT_S)
    codes = load.end(LIMIT_S)
    assert time.monotonic() - begun_s < LIMIT_S, server.text()
    assert any(each is not grpc.StatusCode.OK for each in codes), "the answers ended before the kill"
    assert not list(server.directory.glob("lockstep-ranks-*"))
    if not rank:
        assert code == -signal.SIGKILL
        return
    assert code == 1, server.text()
    reason = f"rank 1 of 2 (process {victim.pid}) was ended by SIGKILL"
    lines = [line for line in server.text().splitlines() if "the engine ends: " in line]
    assert len(lines) == 1, server.text()
    assert lines[0].endswith(reason)
    assert "Traceback" not in server.text()
    assert not list(server.directory.iterdir())


FLAGS = ("--dtype", "float32", "--num-threads", "1", "--max-model-len", "512", "--tensor-parallel-size", "2")


def test_a_rank_that_hangs_ends_its_server_and_one_that_is_stopped_ends_with_it(llama: LoadedModel) -> None:
    """In order: rank 1 hangs; rank 0 is killed while rank 1 is stopped; the server drains."""
    with short_folder() as folder:
        for case in ("hangs", "killed", "drains"):
            server = ForkedServer.start(folder, "--model", llama.name, "--grammar", "none", *FLAGS)
            try:
                processes, rank, begun_s = server.processes(), server.rank(), time.monotonic()
                if case != "drains":
                    rank.send_signal(signal.SIGSTOP)
                if case != "hangs":
                    processes[0].send_signal(signal.SIGKILL if case == "killed" else signal.SIGTERM)
                code = server.ended(processes, 30 if case == "drains" else LIMIT_S)
            finally:
                server.process.kill()
            assert code == {"hangs": 1, "killed": -signal.SIGKILL, "drains": 0}[case], server.text()
            assert time.monotonic() - begun_s < 30
            assert "Traceback" not in server.text()
            if case == "hangs":
                reason = rf"error: the engine lost a rank: rank 1 of 2 \(process {rank.pid}\) .*\n"
                assert re.search(reason, server.text())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_engine_at_any_moment_and_it_starts_again(llama: LoadedModel, rank: int) -> None:
    def lane(folder: Path) -> list[list[int]]:
        chance, found = random.Random(), []
        for at in range(ROUNDS // LANES):
            guided = at % 2 == 0
            grammar = () if guided else ("--grammar", "none")
            server = ForkedServer.start(folder, "--model", llama.name, *FLAGS, *grammar)
            try:
                found.append(answer(server, guided=False))
                run_round(server, rank, chance.uniform(0.0, 0.15), guided=guided)
            finally:
                server.process.kill()
        return found

    with ExitStack() as stack:
        folders = [stack.enter_context(short_folder()) for _ in range(LANES)]
        pool = stack.enter_context(ThreadPoolExecutor(LANES))
        answers = [tokens for found in pool.map(lane, folders) for tokens in found]
    assert len(answers) == ROUNDS
    assert len(answers[0]) == 12
    assert all(tokens == answers[0] for tokens in answers)
