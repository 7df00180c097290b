"""Steady requests to a server whose processes are killed."""

from __future__ import annotations

import threading
import time

import grpc

from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc
from tests.gpu_engine.model.parallel.forked_servers import ForkedServer

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
