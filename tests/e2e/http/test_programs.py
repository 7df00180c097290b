"""Programs that load a server or judge its model, unmodified, to their end: guidellm and lm-eval.

Need the extra `clients`; skipped, with the reason, where it is missing. Their tokenizer is the embedded model's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.harness.systems import hf_directory

pytestmark = [pytest.mark.model, pytest.mark.slow]

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
REQUESTS, OUTPUT_TOKENS = 6, 16


def run(program: str, *arguments: str, folder: Path) -> str:
    """Run a program of this environment in `folder`; return what it prints."""
    path = Path(sys.executable).parent / program
    if not path.exists():
        pytest.skip(f"needs {program}, of the extra `clients`")
    environment = os.environ | OFFLINE | {"HF_HOME": str(folder / "hf")}
    done = subprocess.run(
        [str(path), *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.mark.parametrize(
    "path",
    [
        pytest.param("/v1/chat/completions", marks=pytest.mark.client("guidellm", "chat, streamed, with usage")),
        pytest.param("/v1/completions", marks=pytest.mark.client("guidellm", "completions, streamed")),
        pytest.param("/v1/responses", marks=pytest.mark.client("guidellm", "`responses.stream`")),
    ],
)
def test_guidellm_measures_every_request(gateway: str, tmp_path: Path, path: str) -> None:
    run(
        "guidellm",
        "run",
        *("--backend", f"kind=openai_http,target=http://{gateway},request_format={path}"),
        *("--tokenizer", f"kind=huggingface_auto,model={hf_directory('embedded', None)}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={OUTPUT_TOKENS}"),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--output", "kind=json,path=out.json"),
        "--disable-console-interactive",
        folder=tmp_path,
    )
    (measured,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    totals = measured["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (REQUESTS, 0, 0)
    for one in measured["requests"]["successful"]:
        assert one["output"]
        assert one["output_metrics"]["text_tokens"] == OUTPUT_TOKENS
        assert one["info"]["timings"]["token_iterations"] > 1


ROWS = [
    {"start": "One, two, three, four,", "ends": [" five", " banana"], "right": 0},
    {"start": "Monday, Tuesday, Wednesday,", "ends": [" chair", " Thursday"], "right": 1},
    {"start": "The capital of France is", "ends": [" Paris", " seven"], "right": 0},
    {"start": "red, green, blue, yellow, red, green, blue,", "ends": [" of", " yellow"], "right": 1},
]
CHOICES = {
    "task": "choices",
    "output_type": "multiple_choice",
    "doc_to_choice": "{{ends}}",
    "doc_to_target": "{{right}}",
    "metric_list": [{"metric": "acc"}],
}
SCORES = {
    "task": "scores",
    "output_type": "loglikelihood_rolling",
    "doc_to_target": "{{start}}",
    "metric_list": [{"metric": "byte_perplexity"}],
}
ANSWERS = {
    "task": "answers",
    "output_type": "generate_until",
    "doc_to_target": "{{ends[right]}}",
    "generation_kwargs": {"until": [",", "."], "max_gen_toks": 8},
    "metric_list": [{"metric": "exact_match"}],
}


@pytest.mark.client("lm-eval", "completions, `echo` with `logprobs`")
@pytest.mark.client("lm-eval", "completions of several prompts")
@pytest.mark.parametrize("tokens", [True, False], ids=["token ids", "texts"])
def test_lm_eval_scores_and_generates(gateway: str, model: str, tmp_path: Path, tokens: bool) -> None:
    """Its tasks over a file of this folder: choices by log-likelihood, perplexity, and generated answers."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    for task in (CHOICES, SCORES, ANSWERS):
        made: dict[str, Any] = {"doc_to_text": "" if task is SCORES else "{{start}}"} | source | task
        made |= {"target_delimiter": ""}
        (tmp_path / f"{task['task']}.yaml").write_text(yaml.safe_dump(made))
    run(
        "lm-eval",
        "run",
        *("--model", "local-completions"),
        "--model_args",
        f"model={model},base_url=http://{gateway}/v1/completions,tokenizer={hf_directory('embedded', None)},"
        f"tokenized_requests={tokens},num_concurrent=2,max_length=512",
        *("--batch_size", "2" if tokens else "1"),
        *("--tasks", "choices,scores,answers", "--include_path", str(tmp_path)),
        *("--output_path", str(tmp_path / "out"), "--log_samples"),
        folder=tmp_path,
    )
    (results,) = (tmp_path / "out").rglob("results_*.json")
    figures = json.loads(results.read_text())["results"]
    assert figures["choices"]["acc,none"] == 1.0
    assert 1 < figures["scores"]["byte_perplexity,none"] < 10
    (samples,) = (tmp_path / "out").rglob("samples_answers_*.jsonl")
    answers = [json.loads(line)["resps"][0][0] for line in samples.read_text().splitlines()]
    assert len(answers) == len(ROWS)
    assert all(answer and "," not in answer for answer in answers)
