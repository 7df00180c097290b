"""One server for all end-to-end tests: the embedded model, a grammar process, gRPC.

Invariant: a test leaves the server idle, with a grammar process that is ready; counters are compared with their values
at the beginning of the test.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest

from benchmarks.harness.server import EngineServer, ServerOptions
from tests.docs.pages import ROOT


@dataclass(frozen=True, slots=True)
class RunningServer:
    """The address of the server, and its processes."""

    address: str
    process: psutil.Process

    def grammar_process(self) -> psutil.Process:
        """Return the grammar process that runs now."""
        found = [child for child in self.process.children() if "grammar_service" in child.cmdline()]
        assert len(found) == 1, found
        return found[0]

    def kill_grammar_process(self) -> None:
        os.kill(self.grammar_process().pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """One thread: other tests use the other core, and no end-to-end test measures speed."""
    extra = ("--max-model-len", "512", "--max-queue-size", "64")
    # xgrammar takes some seconds for a random schema, and longer next to another test.
    extra += ("--compile-timeout-s", "20")
    # A killed grammar process starts again next to other tests, and loads xgrammar with torch.
    extra += ("--grammar-wait-s", "120")
    extra += ("--services", "vllm,kv_events,kserve")
    extra += ("--logits-processor", "ngrams=gpu_engine.processors.ngrams:NoRepeatedNgrams")
    extra += ("--logits-processor", "end=gpu_engine.processors.long_answers:LengthPenalty")
    extra += ("--adapter-dir", str(ROOT / "examples/executor/adapters"))
    options = ServerOptions(
        dtype="auto", num_threads=1, max_batch_size=8, extra=extra, internal={"grammar_silence_s": 4.0}
    )
    with EngineServer(options) as engine:
        assert engine.pid is not None
        yield RunningServer(engine.address, psutil.Process(engine.pid))
