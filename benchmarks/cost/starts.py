"""`python -m benchmarks starts`: the time and the memory of a start, for models of random weights in common shapes.

Each model is written to a folder, started from the page cache, asked for a free and for a guided answer, and removed.
llama.cpp and OpenVINO load the same file, if an interpreter that has them is named. Invariant: one model is on the disk
at a time, and a time is from the start of a process to its readiness. Not responsible for: what answers say.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from benchmarks.harness.flags import harness_parser, whole
from benchmarks.harness.server import EngineServer, ServerFailed, ServerOptions
from benchmarks.harness.tables import Progress, number, table
from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc
from tools.shapes import ALL_KINDS, SAFETENSORS, SHAPES, write

PROMPT = "The history of the sea, told by a fisherman. " * 50
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
GB = 1e9
PEER_TIMEOUT_S = 900

_PEAK = """
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
"""
LLAMA = f"""
import sys, time
{_PEAK}
from llama_cpp import Llama
model = Llama(sys.argv[1], n_ctx=2048, n_threads=int(sys.argv[2]), verbose=False)
model([1, 2, 3], max_tokens=1)
print(peak(), flush=True)
"""
OPENVINO = f"""
import sys
{_PEAK}
import openvino_genai
scheduler = openvino_genai.SchedulerConfig()
scheduler.cache_size = 1
threads = {{"INFERENCE_NUM_THREADS": int(sys.argv[2])}}
pipe = openvino_genai.ContinuousBatchingPipeline(sys.argv[1], scheduler, "CPU", threads)
print(peak(), flush=True)
"""

EXAMPLES = """
examples:
  python -m benchmarks starts --shapes 0.6b 1b --kinds q4_k_m q4_0 q8_0 safetensors
  python -m benchmarks starts --llama-python ~/peers/bin/python --openvino-python ~/peers/bin/python

The first column of seconds is the time until the server is ready. Peaks are of the engine process (VmHWM). A model of
8B in q8_0 needs 9 GB of disk and as much memory. Run it on a machine without other work.

exit code: 0, 1 a server failed or an answer did not fit its schema
"""


@dataclass(frozen=True, slots=True)
class Start:
    """A start of this engine. Memory in bytes."""

    ready_s: float
    peak: int
    prefill: float
    """Tokens of a prompt per second."""
    decode: float
    """Tokens of an answer per second, without drafts."""
    guided: bool
    """The guided answer fits its schema."""


def peak_of(pid: int) -> int:
    """Return the most memory that a process has held."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def start(model: Path, threads: int) -> Start:
    """Start a server with a model; ask it. Raises ServerFailed, and RpcError for an answer that it refuses."""
    options = ServerOptions(model=str(model), num_threads=threads, max_batch_size=4, prefix_cache=False)
    begun_s = time.perf_counter()
    with EngineServer(options) as server, grpc.insecure_channel(server.address) as channel:
        ready_s, stub = time.perf_counter() - begun_s, engine_pb2_grpc.EngineStub(channel)
        prompt = pb.GenerateRequest(text=PROMPT, sampling=pb.SamplingParams(max_tokens=32, ignore_eos=True))
        prompt.speculation.num_draft_tokens = 0
        begun_s, arrived, tokens = time.perf_counter(), list[float](), list[int]()
        usage = pb.Usage()
        for response in stub.Generate(prompt, timeout=600):
            if response.token_ids:
                arrived.append(time.perf_counter())
                tokens.append(len(response.token_ids))
            usage = response.usage if response.finish_reason else usage
        guided = pb.GenerateRequest(text=PROMPT[:44], sampling=pb.SamplingParams(max_tokens=64))
        guided.grammar.json_schema = json.dumps(SCHEMA)
        text = "".join(response.text for response in stub.Generate(guided, timeout=600))
        assert server.pid is not None
        return Start(
            ready_s,
            peak_of(server.pid),
            usage.prompt_tokens / (arrived[0] - begun_s),
            sum(tokens[1:]) / (arrived[-1] - arrived[0]),
            fits(text),
        )


def fits(text: str) -> bool:
    """Return whether an answer has what SCHEMA asks for."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and isinstance(value.get("name"), str) and isinstance(value.get("age"), int)


def peer(python: str, code: str, model: Path, threads: int) -> tuple[float, int] | None:
    """Return the seconds and the peak memory of another system's start; None: it failed, and stderr says why."""
    begun_s = time.perf_counter()
    command = [python, "-P", "-c", code, str(model), str(threads)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PEER_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        print(error, file=sys.stderr)
        return None
    took_s = time.perf_counter() - begun_s
    if done.returncode == 0:
        return took_s, int(done.stdout.split()[-1])
    print(f"{python} exited with {done.returncode}:", *done.stderr.splitlines()[-1:], file=sys.stderr)
    return None


def size_of(model: Path) -> int:
    """Return the bytes of a file, or of the files of a folder."""
    return sum(path.stat().st_size for path in (model.rglob("*") if model.is_dir() else [model]))


def row_of(cells: Sequence[str], peers: Sequence[tuple[float, int] | None]) -> list[str]:
    """Return a row of the table: this engine's cells, and two of each peer."""
    made = [*cells]
    for seconds, peak in (each or (math.nan, math.nan) for each in peers):
        made += [number(seconds, 1, " s"), number(peak / GB, 2, " GB")]
    return made


def row(name: str, kind: str, model: Path, options: argparse.Namespace) -> tuple[list[str], bool]:
    """Return a row of the table, and whether the guided answer fits."""
    own = start(model, options.threads)
    made = [f"{name} {kind}", number(size_of(model) / GB, 2, " GB"), number(own.ready_s, 1, " s")]
    made += [
        number(own.peak / GB, 2, " GB"),
        number(own.prefill, 0),
        number(own.decode, 1),
        "yes" if own.guided else "no",
    ]
    peers = []
    for python, code in ((options.llama_python, LLAMA), (options.openvino_python, OPENVINO)):
        if python:
            peers.append(peer(python, code, model, options.threads) if kind != SAFETENSORS else None)
    return row_of(made, peers), own.guided


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = harness_parser(__doc__, EXAMPLES)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.6b", "1b"])
    parser.add_argument("--kinds", nargs="+", choices=ALL_KINDS, default=["q4_k_m", "q4_0", "q8_0", SAFETENSORS])
    parser.add_argument("--threads", type=whole(1), default=2)
    parser.add_argument("--folder", help="where models are written; default: a temporary folder")
    parser.add_argument("--llama-python", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--openvino-python", help="an interpreter that has openvino-genai")
    options = parser.parse_args(arguments)
    header = ["model", "size", "ready", "peak", "prefill tok/s", "decode tok/s", "guided"]
    header += ["llama.cpp", "peak"] if options.llama_python else []
    header += ["OpenVINO", "peak"] if options.openvino_python else []
    rows, all_fit, progress = list[list[str]](), True, Progress(2 * len(options.shapes) * len(options.kinds))
    with tempfile.TemporaryDirectory(prefix="lockstep-starts-", dir=options.folder) as folder:
        for name in options.shapes:
            for kind in options.kinds:
                model = Path(folder, f"{name}-{kind}" + ("" if kind == SAFETENSORS else ".gguf"))
                write(name, kind, model)
                progress.step(f"{model.name} is written")
                try:
                    cells_of, guided = row(name, kind, model, options)
                except (ServerFailed, grpc.RpcError) as error:
                    cells_of, guided = [f"{name} {kind}", "failed"], False
                    print(error, file=sys.stderr)
                rows.append(cells_of)
                all_fit &= guided
                progress.step(" ".join(cells_of))
                shutil.rmtree(model) if model.is_dir() else model.unlink()
    progress.close()
    print(table(header, rows))
    return 0 if all_fit else 1
