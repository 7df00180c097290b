"""The far side of a peer that lives in another Python: OpenVINO GenAI or vLLM, driven by JSON lines.

Stdin: one job per line, {"concurrency": c, "prompts": [{"name", "token_ids", "schema", "max_tokens"}]}. Stdout: first
the line {"ready": versions}, then per job {"answers": [...], "wall_s": seconds}. A failure is {"error": words}.
Invariant: the original stdout carries only the protocol; the engine's own output goes to stderr. The module imports
nothing of this project, because it runs in another environment.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass
class Update:
    """What an engine step brought for one request. `finish` is None while the request goes on."""

    key: int
    token_ids: list[int]
    """The tokens that are new since the last update."""
    finish: str | None = None
    text: str = ""
    """The whole answer, once it is finished."""


class Engine(Protocol):
    """A continuous batching engine whose steps the caller drives."""

    versions: dict[str, str]

    def begin_job(self) -> None:
        """Forget cached prompts: jobs repeat them, and a hit from an earlier job would be the harness's doing."""

    def add(self, key: int, prompt: dict[str, Any]) -> None:
        """Take a request in. Its grammar, if any, is compiled here or in a later step."""

    def step(self) -> list[Update]:
        """Run one step; return what is new."""

    def abandon(self) -> None:
        """Drop all requests after a failure."""


def run_job(engine: Engine, job: dict[str, Any]) -> dict[str, Any]:
    """Run one job in a closed loop of `concurrency` requests; return answers with their times in seconds."""
    engine.begin_job()
    waiting = deque(enumerate(job["prompts"]))
    running: dict[int, dict[str, Any]] = {}
    answers: list[dict[str, Any] | None] = [None] * len(job["prompts"])
    started_s = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < job["concurrency"]:
            key, prompt = waiting.popleft()
            running[key] = {"name": prompt["name"], "started_s": time.perf_counter(), "token_ids": [], "steps": 0}
            engine.add(key, prompt)
        for update in engine.step():
            now_s = time.perf_counter()
            answer = running[update.key]
            if update.token_ids:
                answer.setdefault("first_s", now_s)
                answer["last_s"] = now_s
                answer["token_ids"] += update.token_ids
                answer["steps"] += 1
            if update.finish is not None:
                answer.setdefault("first_s", now_s)
                answer.setdefault("last_s", now_s)
                answers[update.key] = answer | {"text": update.text, "finish": update.finish}
                del running[update.key]
    return {"answers": answers, "wall_s": time.perf_counter() - started_s}


class OpenVino:
    """OpenVINO GenAI's continuous batching pipeline over a GGUF file; `lookup` > 0 adds its prompt lookup.

    The GGUF's weights stay as they are, and every property that is not named here keeps the library's default.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        import openvino  # type: ignore[import-not-found,unused-ignore]
        import openvino_genai  # type: ignore[import-not-found,unused-ignore]

        self._openvino = openvino
        self._genai = openvino_genai
        self._lookup: int = args.lookup
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = args.batch
        scheduler.cache_size = 1  # GiB; without it the cache grows while answers are measured
        scheduler.enable_prefix_caching = False
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": args.threads}
        if self._lookup:
            properties["prompt_lookup"] = True
        self._pipe = openvino_genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU", properties)
        self._tokenizer = self._pipe.get_tokenizer()
        self._handles: dict[int, Any] = {}
        self._token_ids: dict[int, list[int]] = {}
        self.versions = {"openvino_genai": openvino_genai.__version__, "openvino": openvino.__version__}

    def begin_job(self) -> None:
        """Do nothing: prefix caching is off."""

    def add(self, key: int, prompt: dict[str, Any]) -> None:
        """See `Engine.add`."""
        config = self._pipe.get_config()
        config.do_sample = False
        config.max_new_tokens = prompt["max_tokens"]
        if prompt["schema"] is not None:
            config.structured_output_config = self._genai.StructuredOutputConfig(json_schema=prompt["schema"])
        if self._lookup:
            config.num_assistant_tokens = self._lookup
            config.max_ngram_size = 3  # the value of OpenVINO's own sample
        ids = self._openvino.Tensor(_row(prompt["token_ids"]))
        self._token_ids[key] = []
        self._handles[key] = self._pipe.add_request(key, ids, config)

    def step(self) -> list[Update]:
        """See `Engine.step`."""
        self._pipe.step()
        updates = []
        for key, handle in list(self._handles.items()):
            new: list[int] = []
            finish = None
            while handle.can_read():
                for output in handle.read().values():
                    new += output.generated_ids
                    finish = _openvino_finish(output.finish_reason.name) or finish
            status = handle.get_status().name
            if status not in ("RUNNING", "FINISHED"):
                raise RuntimeError(f"request {key} ended as {status}")
            self._token_ids[key] += new
            if status == "FINISHED":
                del self._handles[key]
                text = self._tokenizer.decode(self._token_ids.pop(key))
                updates.append(Update(key, new, finish or "stop", text))
            elif new:
                updates.append(Update(key, new))
        return updates

    def abandon(self) -> None:
        """See `Engine.abandon`."""
        for handle in self._handles.values():
            handle.cancel()
        self._handles.clear()
        while self._pipe.has_non_finished_requests():
            self._pipe.step()


def _row(token_ids: list[int]) -> Any:
    """Return `token_ids` as int64[1, n], which is what OpenVINO's tensors are made from."""
    import numpy as np

    return np.array([token_ids], dtype=np.int64)


def _openvino_finish(reason: str) -> str | None:
    return {"STOP": "stop", "LENGTH": "length", "NONE": None}[reason]


class Vllm:
    """vLLM's offline engine over a Hugging Face directory; `lookup` > 0 adds its n-gram drafts."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        import vllm  # type: ignore[import-not-found,unused-ignore]

        speculative = {
            "method": "ngram",
            "num_speculative_tokens": args.lookup,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        }
        llm = vllm.LLM(
            model=args.model,
            dtype=args.dtype,
            max_model_len=args.max_model_len,
            max_num_seqs=args.batch,
            speculative_config=speculative if args.lookup else None,
            enable_prefix_caching=args.prefix_cache,
        )
        self._vllm = vllm
        self._engine = llm.llm_engine
        self._job = 0
        self._seen: dict[str, tuple[int, int]] = {}
        """Request id -> (key, tokens seen)."""
        self.versions = {"vllm": vllm.__version__, "torch": torch.__version__}

    def begin_job(self) -> None:
        """See `Engine.begin_job`."""
        self._job += 1
        self._engine.reset_prefix_cache()

    def add(self, key: int, prompt: dict[str, Any]) -> None:
        """See `Engine.add`."""
        from vllm.sampling_params import StructuredOutputsParams  # type: ignore[import-not-found,unused-ignore]

        schema = prompt["schema"]
        params = self._vllm.SamplingParams(
            temperature=0.0,
            max_tokens=prompt["max_tokens"],
            structured_outputs=None if schema is None else StructuredOutputsParams(json=schema),
        )
        request_id = f"{self._job}-{key}"
        self._seen[request_id] = key, 0
        self._engine.add_request(request_id, {"prompt_token_ids": prompt["token_ids"]}, params)

    def step(self) -> list[Update]:
        """See `Engine.step`."""
        updates = []
        for output in self._engine.step():
            # Some versions append their own suffix to the id.
            request_id = "-".join(output.request_id.split("-")[:2])
            if request_id not in self._seen:
                continue
            key, seen = self._seen[request_id]
            completion = output.outputs[0]
            new = list(completion.token_ids[seen:])
            self._seen[request_id] = key, seen + len(new)
            if output.finished:
                del self._seen[request_id]
            updates.append(Update(key, new, completion.finish_reason if output.finished else None, completion.text))
        return updates

    def abandon(self) -> None:
        """See `Engine.abandon`."""
        self._engine.abort_request(list(self._seen))
        self._seen.clear()


ENGINES: dict[str, Callable[[argparse.Namespace], Engine]] = {"openvino": OpenVino, "vllm": Vllm}


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--engine", required=True, choices=sorted(ENGINES))
    add("--model", required=True, help="a GGUF file (openvino) or a Hugging Face directory (vllm)")
    add("--threads", type=int, required=True, help="threads of openvino; vllm takes its from the environment")
    add("--batch", type=int, required=True, help="most sequences of one step")
    add("--lookup", type=int, default=0, help="draft tokens per step; 0: no speculation")
    add("--dtype", default="auto", help="dtype of vllm")
    add("--prefix-cache", action="store_true", help="let vllm find the prompts of one job in its prefix cache")
    add("--max-model-len", type=int, default=2048, help="longest sequence of vllm")
    return parser


def main() -> None:
    """Load the model, say "ready", answer jobs until stdin closes."""
    args = build_parser().parse_args()
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        engine: Engine = ENGINES[args.engine](args)
    except ImportError as error:
        print(json.dumps({"error": f"{sys.executable} has no {args.engine}: {error}"}), file=channel)
        return
    print(json.dumps({"ready": engine.versions}), file=channel)
    for line in sys.stdin:
        try:
            reply = run_job(engine, json.loads(line))
        except Exception as error:
            engine.abandon()
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=channel)


if __name__ == "__main__":
    main()
