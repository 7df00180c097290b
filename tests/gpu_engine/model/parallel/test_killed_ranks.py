"""A rank is killed at a random moment under load, twenty times each: the engine ends, leaves nothing, starts again."""

from __future__ import annotations

import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from gpu_engine.model.loader import LoadedModel
from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc
from tests.gpu_engine.model.parallel.forked_servers import ForkedServer, short_folder

pytestmark = pytest.mark.slow

ROUNDS = 8
"""For each rank; runs of twenty have passed (docs/log/)."""
LANES = 2
"""Rounds beside each other: most of a round is the start of the processes."""
LIMIT_S = 5.0
"""The longest time from the kill to the end of every process and of every call."""


def request(text: str, max_tokens: int, *, guided: bool, drafts: int) -> pb.GenerateRequest:
    made = pb.GenerateRequest(
        text=text,
        sampling=pb.SamplingParams(max_tokens=max_tokens, seed=3, temperature=0.7, ignore_eos=not guided),
        speculation=pb.Speculation(num_draft_tokens=drafts),
    )
    if guided:
        made.grammar.regex = f"[a-f]{{{max_tokens}}}"
    return made


def answer(server: ForkedServer, *, guided: bool) -> list[int]:
    with grpc.insecure_channel(server.address) as channel:
        call = engine_pb2_grpc.EngineStub(channel).Generate(request("abc", 12, guided=guided, drafts=3), timeout=60)
        return [token for response in call for token in response.token_ids]


class Load:
    """Answers that are read while the test does something else."""

    def __init__(self, server: ForkedServer, *, guided: bool) -> None:
        self._channel = grpc.insecure_channel(server.address)
        stub = engine_pb2_grpc.EngineStub(self._channel)
        self.begun, self.codes = threading.Event(), list[grpc.StatusCode]()
        requests = [request("ab" * n, 440, guided=guided and n % 2 == 0, drafts=n % 8) for n in range(4, 9)]
        self.threads = [
            threading.Thread(target=self._read, args=(stub.Generate(each, timeout=60),)) for each in requests
        ]
        for thread in self.threads:
            thread.start()

    def _read(self, call: grpc.Call) -> None:
        try:
            for _ in call:
                self.begun.set()
            self.codes.append(grpc.StatusCode.OK)
        except grpc.RpcError as error:
            self.codes.append(error.code())

    def end(self, within_s: float) -> list[grpc.StatusCode]:
        """Wait for the end of every call; return their codes."""
        deadline_s = time.monotonic() + within_s
        for thread in self.threads:
            thread.join(max(deadline_s - time.monotonic(), 0.0))
        assert not any(thread.is_alive() for thread in self.threads), "a call hangs"
        self._channel.close()
        return self.codes


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


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_engine_at_any_moment_and_it_starts_again(llama: LoadedModel, rank: int) -> None:
    def lane(folder: Path) -> list[list[int]]:
        chance, found = random.Random(), []
        for at in range(ROUNDS // LANES):
            guided = at % 2 == 0
            flags = ("--model", llama.name, "--dtype", "float32", "--num-threads", "1", "--max-model-len", "512")
            flags += ("--tensor-parallel-size", "2", *(() if guided else ("--grammar", "none")))
            server = ForkedServer.start(folder, *flags)
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
