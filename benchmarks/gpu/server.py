"""The engine's server with two things more: models of benchmarks.gpu.models, and facts about its graphs in a file.

    python -m benchmarks.gpu.server FACTS.json serve --model random:llama-tiny ...

Everything after FACTS.json is `python -m gpu_engine`'s own command line. The file is there before the server is ready:
bytes of weights a step reads, what a token keeps in the cache, and nodes of each captured graph. Invariant: it ends
with its parent. Not responsible for: clients (see guided.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.models import PREFIX, random_model, streamed_bytes
from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.api.ports import GrammarPort
from gpu_engine.core.build_executor import build_executor
from gpu_engine.core.engine import Engine
from gpu_engine.core.executor import Executor
from gpu_engine.core.runner import LauncherRunner
from gpu_engine.model.loader import LoadedModel, load_model
from gpu_engine.server import Parts, Progress, Server, serve
from gpu_engine.step.device.cuda_stream import CudaGraph, CudaStream
from gpu_engine.step.device.graphs import StepGraphs
from kernels.cuda.nvrtc import check
from kernels.kv_pages import bytes_of_token
from service_runtime.parent_death import die_with_parent
from service_runtime.settings import Sources, add_flags
from shared_mem.channel import EngineEnd


class CountedGraph(CudaGraph):
    """A graph that keeps what was captured, so that its nodes can be counted; the first replay instantiates it."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)

    @property
    def num_nodes(self) -> int:
        """Nodes of the graph."""
        from cuda.bindings import driver

        return int(check(driver.cuGraphGetNodes(driver.CUgraph(self._graph.raw_cuda_graph())))[1])


class CountingStream(CudaStream):
    """A stream whose captures are counted."""

    @contextmanager
    def capture(self) -> Iterator[CountedGraph]:
        """Capture on this stream."""
        graph = CountedGraph()
        with graph.captured(self._stream, self._pool):
            yield graph


def _assemble(
    config: EngineConfig, model: LoadedModel, channel: EngineEnd | None, num_pages: int, max_inflight_steps: int
) -> Executor:
    if model.device.type == "cpu":
        return build_executor(config, model, channel, num_pages, max_inflight_steps)
    from gpu_engine.core.device_executor import cuda_executor  # imports Triton, which a CPU installation lacks

    return cuda_executor(config, model, channel, num_pages, max_inflight_steps, stream=CountingStream(model.device))


def facts_of(model: LoadedModel, executor: Executor) -> dict[str, Any]:
    """Return what the client cannot see: bytes of weights a step reads, of a token's keys and values, and nodes."""
    runner, nodes = executor.runner, dict[str, int]()
    if isinstance(runner, LauncherRunner) and isinstance(runner.launcher, StepGraphs):
        for (lanes, rows, guided), graph in runner.launcher.captured.items():
            if isinstance(graph, CountedGraph):
                nodes[f"{lanes} lanes, {rows} rows, {'guided' if guided else 'free'}"] = graph.num_nodes
    kept = bytes_of_token(model.kv_heads, model.dtype)
    return {"streamed_bytes": streamed_bytes(model), "token_bytes": kept, "dtype": model.dtype_name, "nodes": nodes}


def main() -> int:
    """Serve until a signal."""
    die_with_parent()
    parser = argparse.ArgumentParser("python -m benchmarks.gpu.server", description=__doc__)
    parser.add_argument("facts", type=Path, help="where to write what the client cannot see, as JSON")
    add_flags(parser, [EngineConfig, ServerConfig])
    flags = parser.parse_args()
    sources = Sources(flags, os.environ, [EngineConfig, ServerConfig])
    engine_config, server_config = sources.fill(EngineConfig), sources.fill(ServerConfig)
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)

    class Described(Engine):
        """Tells of itself when it is warm."""

        def start(self) -> None:
            super().start()
            flags.facts.write_text(json.dumps(facts_of(self.model, self._loop.executor)))

    def load(config: EngineConfig, progress: Progress | None) -> LoadedModel:
        return random_model(config) if config.model.startswith(PREFIX) else load_model(config, progress)

    def build(
        config: EngineConfig, model: LoadedModel, channel: EngineEnd | None, grammar: GrammarPort | None
    ) -> Engine:
        return Described(config, model, channel, grammar, build_executor=_assemble)

    def ready(server: Server) -> None:
        print(f"ready: {server}", file=sys.stderr, flush=True)

    asyncio.run(serve(engine_config, server_config, None, ready, Parts(load, build)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
