"""Logits processors over the wire, on the embedded model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep_client import CallError, Client, LogitsProcessor
from tests.e2e.conftest import RunningServer

pytestmark = pytest.mark.model

PROMPT = "The cat sat on the mat. The cat sat on the mat. The cat"
SCHEMA = {"type": "object", "properties": {"animals": {"type": "array", "items": {"type": "string"}, "maxItems": 4}}}


def repeats(ids: tuple[int, ...], size: int) -> int:
    grams = [ids[i : i + size] for i in range(len(ids) - size + 1)]
    return len(grams) - len(set(grams))


@pytest.mark.parametrize(
    ("temperature", "schema"),
    [
        pytest.param(0.0, None, id="greedy, free", marks=pytest.mark.slow),
        pytest.param(0.9, None, id="sampled, free"),
        pytest.param(0.0, json.dumps(SCHEMA), id="greedy, guided"),
        pytest.param(0.9, json.dumps(SCHEMA), id="sampled, guided", marks=pytest.mark.slow),
    ],
)
def test_drafts_change_no_processed_token(server: RunningServer, schema: str | None, temperature: float) -> None:
    processors = [
        LogitsProcessor("ngrams", {"size": 8 if schema else 3}),
        LogitsProcessor("end", {"start": 30, "factor": 1.1}),
    ]
    with Client(server.address) as client:
        prompt = client.tokenize(PROMPT).token_ids
        answers = [
            client.generate(
                PROMPT,
                schema=schema and json.loads(schema),
                max_tokens=40,
                temperature=temperature,
                seed=5,
                num_draft_tokens=drafts,
                logits_processors=processors,
            )
            for drafts in (0, 3, 7)
        ]
        plain = client.generate(PROMPT, max_tokens=40, temperature=0.0)
    assert len({answer.token_ids for answer in answers}) == 1
    if not schema:
        assert repeats(prompt + answers[0].token_ids, 3) == repeats(prompt, 3)
    assert repeats(prompt + plain.token_ids, 3) > repeats(prompt, 3) + 9


def test_the_server_names_its_processors(server: RunningServer) -> None:
    with Client(server.address) as client:
        assert client.model_info().logits_processors == ("ngrams", "end")
        with pytest.raises(CallError, match=r"logits_processors\[0\]\.name: 'x' is no .* this server has ngrams, end"):
            client.generate(PROMPT, logits_processors=["x"])


@pytest.mark.slow
def test_the_example_runs(root: Path) -> None:
    path = os.pathsep.join([str(root), str(root / "client")])
    example = [sys.executable, str(root / "examples/executor/logits_processor.py")]
    ran = subprocess.run(example, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0] == "the server has ngrams, end, clients"
    answers = dict(line.split(": ", 1) for line in lines[1:])
    assert len(set(answers.values())) == len(answers) == 4
    assert "sat" in answers["as the model likes"]
    assert " sat" not in answers["for a guest"]
