"""The vLLM side of the peer `vllm`: vLLM's own Python runs it, and it exchanges JSON lines with the harness.

Stdin: one job per line, {"concurrency": c, "prompts": [{"name", "token_ids", "schema", "max_tokens"}]}. Stdout: first
the line {"ready": versions}, then one line per job.
Invariant: the original stdout carries the protocol alone; vLLM's own output goes to stderr. The module imports nothing
of this project, because it runs in another environment.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import deque
from typing import Any


def run_job(engine: Any, job: dict[str, Any], number: int) -> dict[str, Any]:
    """Run one job in a closed loop of `concurrency` requests; return answers with their times in seconds."""
    from vllm import SamplingParams  # type: ignore[import-not-found,unused-ignore]
    from vllm.sampling_params import StructuredOutputsParams  # type: ignore[import-not-found,unused-ignore]

    engine.reset_prefix_cache()  # jobs repeat prompts; a hit from an earlier job would be the harness's doing
    waiting = deque(enumerate(job["prompts"]))
    running: dict[str, dict[str, Any]] = {}
    answers: list[dict[str, Any] | None] = [None] * len(job["prompts"])
    started_s = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < job["concurrency"]:
            index, prompt = waiting.popleft()
            schema = prompt["schema"]
            params = SamplingParams(
                temperature=0.0,
                max_tokens=prompt["max_tokens"],
                structured_outputs=None if schema is None else StructuredOutputsParams(json=schema),
            )
            key = f"{number}-{index}"
            running[key] = {
                "index": index,
                "name": prompt["name"],
                "started_s": time.perf_counter(),
                "tokens": 0,
                "steps": 0,
            }
            engine.add_request(key, {"prompt_token_ids": prompt["token_ids"]}, params)
        for output in engine.step():
            now_s = time.perf_counter()
            state = next((state for key, state in running.items() if output.request_id.startswith(key)), None)
            if state is None:
                continue
            completion = output.outputs[0]
            if len(completion.token_ids) > state["tokens"]:
                state.setdefault("first_s", now_s)
                state["tokens"] = len(completion.token_ids)
                state["steps"] += 1
                state["last_s"] = now_s
            if output.finished:
                state.update(
                    text=completion.text, token_ids=list(completion.token_ids), finish=completion.finish_reason
                )
                answers[state["index"]] = state
                running = {key: kept for key, kept in running.items() if kept is not state}
    return {"answers": answers, "wall_s": time.perf_counter() - started_s}


def main() -> None:
    """Load the model, say "ready", answer jobs until stdin closes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, required=True)
    parser.add_argument("--ngram", type=int, default=0, help="draft tokens per step; 0: no speculation")
    args = parser.parse_args()
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    import torch
    import vllm

    speculative = {
        "method": "ngram",
        "num_speculative_tokens": args.ngram,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    }
    llm = vllm.LLM(
        model=args.model,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        speculative_config=speculative if args.ngram else None,
    )
    print(json.dumps({"ready": {"vllm": vllm.__version__, "torch": torch.__version__}}), file=channel)
    for number, line in enumerate(sys.stdin):
        try:
            answer = run_job(llm.llm_engine, json.loads(line), number)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=channel)


if __name__ == "__main__":
    main()
