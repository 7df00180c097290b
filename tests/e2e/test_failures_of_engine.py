"""Engines that are killed while connected: the grammar process drops their matchers and mapping,
and serves the next."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil

from protos.grammar.v1 import grammar_pb2 as gpb
from protos.grammar.v1 import grammar_pb2_grpc

LONG_S = 30.0

ENGINE = """
import sys, time
import grpc
from protos.grammar.v1 import grammar_pb2 as gpb, grammar_pb2_grpc
from shared_mem.channel import EngineEnd
from shared_mem.handover import connect, send_segment
from shared_mem.layout import Layout
from shared_mem.segment import Segment
from tests.grammar_service.toy import PADDED, STOPS, spell, tokenizer_json

directory, generation = sys.argv[1], int(sys.argv[2])
with Segment.create(Layout(num_slots=4, num_rows=3, vocab_size=PADDED, generation=generation)) as segment:
    sock = connect(directory + "/segment.sock")
    send_segment(sock, segment)
    engine = EngineEnd(segment)
    stub = grammar_pb2_grpc.GrammarStub(grpc.insecure_channel("unix:" + directory + "/grammar.sock"))
    stub.Configure(
        gpb.ConfigureRequest(
            tokenizer_json=tokenizer_json(), vocab_size=PADDED, stop_token_ids=STOPS, generation=generation
        ),
        wait_for_ready=True,
    )
    source = "(abc)+d"
    compiled = stub.Compile(gpb.CompileRequest(kind=gpb.KIND_REGEX, source=source))
    for slot in range(4):
        stub.Bind(gpb.BindRequest(slot=slot, slot_gen=1, grammar_id=compiled.grammar_id))
    for step, token in enumerate(spell("abcabcabc")):
        seq = engine.post(range(4), [1] * 4, [step] * 4, [1] * 4, [0] * 4, [[token]] * 4)
        while (answer := engine.await_rows(seq, range(4), [1] * 4, timeout_s=30)).num_late:
            time.sleep(0.001)
        assert answer.num_missing == 0 and set(answer.kinds[:, 0].tolist()) <= {1, 2}, answer
    print("answered", flush=True)
    time.sleep(600)
"""


def mappings(process: psutil.Process) -> int:
    """Return how many segments a process has mapped."""
    return sum("memfd:" in line for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines())


def until(condition: Callable[[], object]) -> None:
    """Return when `condition()` is true."""
    give_up = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


@contextmanager
def sidecar(directory: Path, root: Path) -> Iterator[psutil.Process]:
    command = [sys.executable, "-m", "grammar_service", "--dir", str(directory)]
    with subprocess.Popen(command, cwd=root) as child:
        try:
            until((directory / "segment.sock").exists)
            yield psutil.Process(child.pid)
        finally:
            child.send_signal(signal.SIGTERM)
            child.wait(LONG_S)
    assert child.returncode == 0


def test_a_killed_engine_leaves_nothing_behind_and_the_next_one_is_served(root: Path, tmp_path: Path) -> None:
    directory = tmp_path / "g"
    with sidecar(directory, root) as process, grpc.insecure_channel(f"unix:{directory}/grammar.sock") as channel:
        stub = grammar_pb2_grpc.GrammarStub(channel)
        descriptors, threads = list[int](), list[int]()
        for generation in (1, 2, 3):
            command = [sys.executable, "-c", ENGINE, str(directory), str(generation)]
            with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE) as engine:
                assert engine.stdout is not None
                assert engine.stdout.readline() == b"answered\n"
                assert stub.GetStats(gpb.GetStatsRequest(), wait_for_ready=True).matchers == 4
                assert mappings(process) == 1
                engine.kill()
            until(lambda: mappings(process) == 0)
            stats = stub.GetStats(gpb.GetStatsRequest())
            assert (stats.matchers, stats.cached_grammars) == (0, 1)
            descriptors.append(process.num_fds())
            threads.append(process.num_threads())
        # The first engine started the compile workers; later engines add at most one idle thread of a pool.
        assert descriptors[2] <= descriptors[1] + 1
        assert threads[2] <= threads[1] + 1
