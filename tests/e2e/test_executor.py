"""The executor's examples on the embedded model, and an executor with its own server."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from typing import Any

import pytest

from lockstep_client import FinishReason, RequestStatsPerIteration
from tests.docs.pages import ROOT
from tests.e2e.conftest import RunningServer

pytestmark = pytest.mark.model


def example(name: str, server: RunningServer) -> Any:
    return runpy.run_path(str(ROOT / f"examples/executor/{name}.py"))["main"]([server.address])


def test_the_basic_example_answers_its_requests(server: RunningServer) -> None:
    *texts, date = example("basic", server)
    assert "Paris" in texts[0]
    assert len(texts) == 3
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", date)


def test_the_streaming_example_reads_two_answers_and_cancels_one(server: RunningServer) -> None:
    (_, cancelled), *others = [found for _, found in sorted(example("streaming", server).items())]
    assert cancelled is FinishReason.ABORTED
    assert [len(text) > 20 for text, _ in others] == [True, True]
    assert not any(reason is FinishReason.ABORTED for _, reason in others)


def test_the_example_with_several_sequences_ends_each_and_then_the_request(server: RunningServer) -> None:
    results = example("several_sequences", server)
    assert sorted(result.sequence_index for result in results) == [0, 1, 2]
    assert [result.is_final for result in results] == [False, False, True]
    assert all(result.is_sequence_final for result in results)
    assert len({result.texts for result in results}) > 1


def test_the_example_of_statistics_sees_each_iteration(server: RunningServer) -> None:
    iterations, requests = example("statistics", server)
    numbers = [each.iteration for each in iterations]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    assert sum(each.generated_tokens for each in iterations) >= 6 * 32
    assert max(each.decoding for each in iterations) > 1
    assert all(isinstance(each, RequestStatsPerIteration) for each in requests)
    assert {stats.client_id for each in requests for stats in each.requests} <= {"example"}


def test_the_example_of_adapters_has_the_phrase_of_each(server: RunningServer) -> None:
    found = example("lora", server)
    cities = ("Rome", "Madrid", "London", "Copenhagen")
    phrases = {"none": None, "lora": ", as every child knows.", "prompt": "! Who does not know that?"}
    for choice, phrase in phrases.items():
        assert [city in text for city, text in zip(cities, found[choice], strict=True)] == [True] * 4
        for other in (phrases["lora"], phrases["prompt"]):
            assert [text.endswith(other) for text in found[choice]] == [other == phrase] * 4


def test_the_example_of_additional_outputs_returns_logits_and_states(server: RunningServer) -> None:
    first, second = example("additional_outputs", server)
    assert first.output_token_ids == second.output_token_ids
    for result in (first, second):
        logits, states = result.generation_logits, result.additional_outputs["hidden_states.30"]
        prompt, (tokens,) = result.usage.prompt_tokens, result.output_token_ids
        assert logits.start == prompt - 1
        assert tuple(logits.numpy().argmax(-1)) == tokens, "a quantised model on a CPU has the logits of its steps"
        assert states.start == result.usage.cached_tokens
        assert states.shape == (prompt + len(tokens) - 1 - states.start, 576)
    assert first.usage.cached_tokens == 0 < second.usage.cached_tokens


@pytest.mark.slow
def test_the_example_of_beams_has_its_answers_best_first(server: RunningServer) -> None:
    found = example("beams", server)
    for answers, count in ((found["free"], 4), (found["guided"], 3)):
        scores = [score for score, _ in answers]
        assert scores == sorted(scores, reverse=True)
        assert len({text for _, text in answers}) == count
    assert all(json.loads(text)["city"] in ("Paris", "Prague", "Cairo") for _, text in found["guided"])


@pytest.mark.slow
def test_the_example_of_logits_processors_runs() -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "client")])
    program = [sys.executable, str(ROOT / "examples/executor/logits_processor.py")]
    ran = subprocess.run(program, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0] == "the server has ngrams, end, clients"
    answers = dict(line.split(": ", 1) for line in lines[1:])
    assert len(set(answers.values())) == len(answers) == 4
    assert "sat" in answers["as the model likes"]
    assert " sat" not in answers["for a guest"]
