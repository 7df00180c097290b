"""Other systems as peers: the worker over small fake libraries in a process of its own, and llama.cpp's protocol."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.systems import Prompt, SystemFailed
from benchmarks.harness.workloads import Item
from benchmarks.peers import vllm_server
from benchmarks.peers.foreign import ForeignSystem, shortened, vllm_environment
from benchmarks.peers.llama_server import LlamaServer, read_answer, request_body
from benchmarks.peers.server_peer import events
from benchmarks.peers.vllm_server import VllmServer
from benchmarks.peers.worker import Update, run_job

FAKE_OPENVINO = """
__version__ = "1.2"


class Tensor:
    def __init__(self, array):
        assert array.dtype == "int64" and array.shape[0] == 1
        self.ids = array[0].tolist()
"""

FAKE_GENAI = """
from types import SimpleNamespace as Values

__version__ = "3.4"
NONE, STOP, LENGTH = (Values(name=name) for name in ("NONE", "STOP", "LENGTH"))


class SchedulerConfig:
    pass


class StructuredOutputConfig:
    def __init__(self, json_schema):
        if "nonsense" in json_schema:
            raise RuntimeError("Unsupported type nonsense")
        self.json_schema = json_schema


class Handle:
    def __init__(self, ids, config):
        self.config, self.left, self.ready, self.status = config, list(ids), [], "RUNNING"

    def can_read(self):
        return bool(self.ready)

    def read(self):
        return {0: self.ready.pop(0)}

    def get_status(self):
        return Values(name=self.status)

    def cancel(self):
        self.status = "CANCEL"

    def step(self, most):
        new, self.left = self.left[:most], self.left[most:]
        self.config.max_new_tokens -= len(new)
        done = STOP if not self.left else LENGTH if self.config.max_new_tokens <= 0 else NONE
        self.status = "RUNNING" if done is NONE else "FINISHED"
        self.ready.append(Values(generated_ids=new, finish_reason=done))


class ContinuousBatchingPipeline:
    # Echoes the prompt: one token a step, or with prompt lookup as many as it may draft, and one more.
    def __init__(self, model, scheduler, device, properties):
        assert model == "model.gguf" and device == "CPU" and properties["INFERENCE_NUM_THREADS"] == 2
        assert scheduler.enable_prefix_caching is False
        print("noise of the library on stdout")
        self.lookup, self.handles = properties.get("prompt_lookup", False), []

    def get_tokenizer(self):
        return Values(decode=lambda ids: " ".join(map(str, ids)))

    def get_config(self):
        return Values(structured_output_config=None)

    def add_request(self, key, tensor, config):
        assert config.do_sample is False
        self.handles.append(Handle(tensor.ids, config))
        return self.handles[-1]

    def step(self):
        self.handles = [handle for handle in self.handles if handle.status == "RUNNING"]
        assert len(self.handles) <= 2, "more at a time than asked for"
        for handle in self.handles:
            handle.step(handle.config.num_assistant_tokens + 1 if self.lookup else 1)

    def has_non_finished_requests(self):
        return any(handle.status == "RUNNING" for handle in self.handles)
"""

FAKE_VLLM = """
from types import SimpleNamespace as Values

__version__ = "5.6"
resets = 0


class SamplingParams(Values):
    pass


class LLM:
    def __init__(self, model, dtype, max_model_len, max_num_seqs, speculative_config, enable_prefix_caching):
        assert (model, dtype, max_num_seqs) == ("hf", "float32", 16)
        self.most = 1 + (speculative_config or {}).get("num_speculative_tokens", 0)
        self.running, self.llm_engine = {}, self
        self.cached = "with" if enable_prefix_caching else "without"

    def reset_prefix_cache(self):
        global resets
        resets += 1

    def add_request(self, request_id, prompt, params):
        if params.structured_outputs and "nonsense" in params.structured_outputs.json:
            raise ValueError("unsupported schema")
        self.running[request_id] = [prompt["prompt_token_ids"], 0, params]

    def abort_request(self, ids):
        for request_id in ids:
            self.running.pop(request_id, None)

    def step(self):
        outputs = []
        for request_id, state in list(self.running.items()):
            ids, seen, params = state
            state[1] = min(seen + self.most, len(ids), params.max_tokens)
            finished = state[1] in (len(ids), params.max_tokens)
            reason = ("stop" if state[1] == len(ids) else "length") if finished else None
            text = f"reset {resets}, {self.cached} cache"
            completion = Values(token_ids=ids[: state[1]], text=text, finish_reason=reason)
            outputs.append(Values(request_id=request_id + "-ab12", finished=finished, outputs=[completion]))
            if finished:
                del self.running[request_id]
        return outputs
"""

FAKE_VLLM_PARAMS = """
class StructuredOutputsParams:
    def __init__(self, json):
        self.json = json
"""


def prompt(name: str, ids: tuple[int, ...], max_tokens: int = 100, schema: str | None = None) -> Prompt:
    return Prompt(Item(name, (("user", name),), schema, max_tokens), ids)


PROMPTS = [prompt("a", (1, 2, 3)), prompt("b", (4, 5, 6, 7), schema='{"type":"object"}'), prompt("c", (8, 9, 10), 2)]

Start = Callable[..., ForeignSystem]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a worker over the fake libraries, in this Python; all end with the test."""
    files = {
        "openvino/__init__.py": FAKE_OPENVINO,
        "openvino_genai/__init__.py": FAKE_GENAI,
        "torch/__init__.py": "__version__ = '7.8'",
        "vllm/__init__.py": FAKE_VLLM,
        "vllm/sampling_params.py": FAKE_VLLM_PARAMS,
    }
    for name, source in files.items():
        path = tmp_path / "libraries" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    started: list[ForeignSystem] = []

    def make(engine: str, lookup: int = 0, *flags: str) -> ForeignSystem:
        model = {"openvino": "model.gguf", "vllm": "hf"}[engine]
        arguments = ["--engine", engine, "--model", model, "--threads", "2", "--batch", "16", "--dtype", "float32"]
        arguments += ["--lookup", str(lookup), *flags]
        environment = {"PYTHONPATH": str(tmp_path / "libraries")}
        started.append(ForeignSystem(engine, Path(sys.executable), arguments, settings="fake", environment=environment))
        return started[-1]

    yield make
    for system in started:
        system.close()
        system.log.unlink()


@pytest.mark.parametrize("engine", ["openvino", "vllm"])
@pytest.mark.parametrize(("lookup", "steps"), [(0, [3, 4, 2]), (3, [1, 1, 1])])
def test_a_worker_answers_in_order_with_tokens_finish_and_steps(
    start: Start, engine: str, lookup: int, steps: list[int]
) -> None:
    system = start(engine, lookup)
    answered: list[None] = []
    run = system.run(PROMPTS, 2, lambda: answered.append(None))
    assert [answer.name for answer in run.answers] == ["a", "b", "c"]
    assert [answer.finish for answer in run.answers][:2] == ["stop", "stop"]
    assert [answer.token_ids for answer in run.answers][:2] == [(1, 2, 3), (4, 5, 6, 7)]
    if not lookup:
        assert (run.answers[2].token_ids, run.answers[2].finish) == ((8, 9), "length")
    assert [answer.steps for answer in run.answers] == steps
    assert all(a.started_s <= a.first_s <= a.last_s <= a.started_s + run.wall_s for a in run.answers)
    assert len(answered) == 3


@pytest.mark.parametrize("engine", ["openvino", "vllm"])
def test_a_failed_job_is_one_line_and_the_next_one_starts_afresh(start: Start, engine: str) -> None:
    system = start(engine)
    bad = prompt("bad", (1,), schema='{"type":"nonsense"}')
    with pytest.raises(SystemFailed, match="nsupported"):
        system.run([prompt("long", tuple(range(50))), bad], 2, lambda: None)
    run = system.run(PROMPTS, 2, lambda: None)
    assert [answer.token_ids for answer in run.answers] == [(1, 2, 3), (4, 5, 6, 7), (8, 9)]


def test_every_job_of_vllm_starts_without_cached_prompts(start: Start) -> None:
    system = start("vllm")
    texts = [system.run(PROMPTS[:1], 1, lambda: None).answers[0].text for _ in range(2)]
    assert texts == ["reset 1, without cache", "reset 2, without cache"]


def test_vllm_caches_prompts_only_where_all_systems_do(start: Start) -> None:
    answers = start("vllm", 0, "--prefix-cache").run(PROMPTS[:1], 1, lambda: None).answers
    assert answers[0].text == "reset 1, with cache"


def test_a_worker_says_which_versions_run(start: Start) -> None:
    assert start("openvino").describe() == "openvino_genai 3.4, openvino 1.2: fake"
    assert start("vllm").describe() == "vllm 5.6, torch 7.8: fake"


def test_a_python_without_the_library_is_a_reason() -> None:
    arguments = ["--engine", "openvino", "--model", "m", "--threads", "1", "--batch", "1"]
    with pytest.raises(SystemFailed, match="has no openvino: No module named 'openvino'"):
        ForeignSystem("openvino", Path(sys.executable), arguments, settings="", environment={})


def test_a_worker_that_ended_is_reported_and_not_waited_for(start: Start) -> None:
    system = start("openvino")
    system._process.kill()
    with pytest.raises(SystemFailed, match="the worker ended with -9"):
        system.run(PROMPTS, 1, lambda: None)


def test_a_python_that_is_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemFailed, match="none is not a file"):
        ForeignSystem("x", tmp_path / "none", [], settings="")


class OneTokenEngine:
    """Answers a request with one token per step, `steps` of them; notes how many ran at once."""

    def __init__(self, steps: int) -> None:
        self.versions: dict[str, str] = {}
        self._steps = steps
        self._left: dict[int, int] = {}
        self.most_running = 0

    def begin_job(self) -> None:
        pass

    def add(self, key: int, prompt: dict[str, Any]) -> None:
        self._left[key] = self._steps
        self.most_running = max(self.most_running, len(self._left))

    def step(self) -> list[Update]:
        updates = []
        for key in list(self._left):
            self._left[key] -= 1
            finish = None if self._left[key] else "stop"
            updates.append(Update(key, [key], finish, f"text {key}"))
            if finish:
                del self._left[key]
        return updates

    def abandon(self) -> None:
        pass


def test_the_loop_is_closed_at_the_concurrency_asked_for() -> None:
    engine = OneTokenEngine(3)
    job = {"concurrency": 4, "prompts": [{"name": f"p{i}"} for i in range(10)]}
    reply = run_job(engine, job)
    assert engine.most_running == 4
    assert [answer["name"] for answer in reply["answers"]] == [f"p{i}" for i in range(10)]
    assert [answer["text"] for answer in reply["answers"]] == [f"text {i}" for i in range(10)]
    assert all(answer["token_ids"] == [i] * 3 for i, answer in enumerate(reply["answers"]))


def test_a_long_reason_keeps_its_end() -> None:
    assert shortened("short\nsecond line") == "short"
    words = shortened("RuntimeError: " + "/a/path" * 80 + ": Unsupported type")
    assert len(words) == 200
    assert words.startswith("RuntimeError: ")
    assert words.endswith(": Unsupported type")


def test_vllm_uses_as_many_cores_as_it_has_threads() -> None:
    environment = vllm_environment(Path(sys.executable), 1)
    assert len(environment["VLLM_CPU_OMP_THREADS_BIND"].split(",")) == 1


def sse(*pieces: dict[str, Any]) -> list[bytes]:
    return [line for piece in pieces for line in (f"data: {json.dumps(piece)}\n".encode(), b"\n")]


def last(**fields: Any) -> dict[str, Any]:
    return {"content": "", "tokens": [], "stop": True, "stop_type": "eos", "tokens_predicted": 4, **fields}


def test_a_stream_of_llama_server_becomes_an_answer() -> None:
    begin = {"content": "", "tokens": [], "stop": False}
    pieces = [begin, *({"content": f"{i} ", "tokens": [i], "stop": False} for i in (5, 6, 7))]
    answer = read_answer("a", 0.0, events([b": ping\n", *sse(*pieces, last())]))
    assert (answer.text, answer.token_ids, answer.finish, answer.steps) == ("5 6 7 ", (5, 6, 7, -1), "stop", 4)
    assert 0.0 < answer.first_s <= answer.last_s


def test_accepted_drafts_of_llama_server_are_not_steps() -> None:
    final = last(stop_type="limit", timings={"draft_n": 6, "draft_n_accepted": 3})
    answer = read_answer("a", 0.0, [{"content": "x", "tokens": [1, 2, 3, 4], "stop": False}, final])
    assert (answer.token_ids, answer.finish, answer.steps) == ((1, 2, 3, 4), "length", 1)


def test_an_error_in_a_stream_and_its_early_end_are_failures() -> None:
    with pytest.raises(SystemFailed, match=r"^context is full$"):
        list(events([b'data: {"error": {"code": 400, "message": "context is full"}}\n']))
    with pytest.raises(SystemFailed, match="a: the stream ended early"):
        read_answer("a", 0.0, [])


def test_a_request_to_llama_server_is_greedy_and_uses_no_cached_prompt() -> None:
    body = request_body(PROMPTS[1])
    assert body["prompt"] == [4, 5, 6, 7]
    assert body["json_schema"] == {"type": "object"}
    assert (body["temperature"], body["cache_prompt"], body["n_predict"]) == (0, False, 100)
    assert "json_schema" not in request_body(PROMPTS[0])


FAKE_SERVER = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

flags = dict(zip(sys.argv[1:], sys.argv[2:]))


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *words):
        pass

    def reply(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        body = {{"build_info": "b1-fake", "status": "ok"}}
        self.reply(200, json.dumps(body).encode())

    def do_POST(self):
        job = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "nonsense" in json.dumps(job):
            error = {{"error": {{"message": "failed to parse the schema:\\n unknown type"}}}}
            return self.reply(400, json.dumps(error).encode())
        self.send_response(200)
        self.end_headers()
        for token in job["prompt"]:
            piece = {{"content": f"{{token}} ", "tokens": [token], "stop": False}}
            self.wfile.write(b"data: " + json.dumps(piece).encode() + b"\\n\\n")
        final = {{"content": "", "tokens": [], "stop": True, "stop_type": "eos"}}
        final["tokens_predicted"] = len(job["prompt"]) + 1
        self.wfile.write(b"data: " + json.dumps(final).encode() + b"\\n\\n")


assert flags["--threads"] == flags["--threads-batch"] == "2" and flags["--parallel"] == "4"
ThreadingHTTPServer(("127.0.0.1", int(flags["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def llama(tmp_path: Path) -> Iterator[LlamaServer]:
    binary = tmp_path / "llama-server"
    binary.write_text(FAKE_SERVER.format(python=sys.executable))
    binary.chmod(0o755)
    server = LlamaServer(binary, Path("model.gguf"), num_threads=2, batch=4)
    yield server
    server.close()
    server.log.unlink()


def test_llama_server_is_driven_over_http(llama: LlamaServer) -> None:
    answered: list[None] = []
    run = llama.run(PROMPTS * 4, 4, lambda: answered.append(None))
    assert [answer.name for answer in run.answers] == ["a", "b", "c"] * 4
    assert run.answers[1].token_ids == (4, 5, 6, 7, -1)
    assert len(answered) == 12
    assert llama.describe().startswith("llama.cpp b1-fake: model.gguf as it is, 2 threads, 4 slots")


def test_a_schema_that_llama_server_refuses_is_a_failure_with_its_words(llama: LlamaServer) -> None:
    with pytest.raises(SystemFailed, match="bad: failed to parse the schema: unknown type"):
        llama.run([*PROMPTS, prompt("bad", (1,), schema='{"type":"nonsense"}')], 2, lambda: None)


def test_a_server_that_exits_is_a_reason(tmp_path: Path) -> None:
    binary = tmp_path / "llama-server"
    binary.write_text("#!/bin/sh\necho unknown argument\nexit 3\n")
    binary.chmod(0o755)
    with pytest.raises(SystemFailed, match="llama-server ended with 3: unknown argument"):
        LlamaServer(binary, Path("model.gguf"), num_threads=2, batch=4)


def test_a_stream_of_vllm_becomes_an_answer() -> None:
    pieces: list[dict[str, Any]] = [
        {"choices": [{"text": "5 6 ", "token_ids": [5, 6], "finish_reason": None}]},
        {"choices": [{"text": "7", "token_ids": [7], "finish_reason": None}]},
        {"choices": [{"text": "", "token_ids": [], "finish_reason": "stop"}]},
        {"choices": [], "usage": {"completion_tokens": 3}},
    ]
    answer = vllm_server.read_answer("a", 0.0, events(sse(*pieces)))
    assert (answer.text, answer.token_ids, answer.finish, answer.steps) == ("5 6 7", (5, 6, 7), "stop", 2)
    assert 0.0 < answer.first_s <= answer.last_s
    with pytest.raises(SystemFailed, match="a: the stream ended early"):
        vllm_server.read_answer("a", 0.0, pieces[:2])


FAKE_VLLM_SERVER = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

flags = dict(zip(sys.argv[1:], sys.argv[2:]))


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *words):
        pass

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{{"version": "1.2"}}')

    def do_POST(self):
        job = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert job["model"] == flags["--served-model-name"] and job["temperature"] == 0
        told = [job["max_tokens"], *job["prompt"], len(job.get("structured_outputs", {{}}).get("json", []))]
        self.send_response(200)
        self.end_headers()
        piece = {{"choices": [{{"text": self.path, "token_ids": told, "finish_reason": "length"}}]}}
        self.wfile.write(b"data: " + json.dumps(piece).encode() + b"\\n\\ndata: [DONE]\\n\\n")


assert flags["-m"].startswith("vllm.") and flags["--max-num-seqs"] == "4" and flags["--dtype"] == "bfloat16"
ThreadingHTTPServer(("127.0.0.1", int(flags["--port"])), Handler).serve_forever()
"""


def test_the_server_of_vllm_is_driven_over_http(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(FAKE_VLLM_SERVER.format(python=sys.executable))
    python.chmod(0o755)
    server = VllmServer(python, Path("model"), dtype="bfloat16", num_threads=2, batch=4)
    try:
        run = server.run(PROMPTS[:2], 2, lambda: None)
        assert server.describe().startswith("vllm 1.2: bfloat16, 2 threads")
    finally:
        server.close()
        server.log.unlink()
    assert [answer.text for answer in run.answers] == ["/v1/completions"] * 2
    assert run.answers[1].token_ids == (100, 4, 5, 6, 7, 1)
    assert (run.answers[0].token_ids[-1], run.answers[0].finish) == (0, "length")
