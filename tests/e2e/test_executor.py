"""The executor's examples on the embedded model, and an executor with its own server."""

from __future__ import annotations

import re
import runpy
import time
from typing import Any

import pytest

from lockstep_client import (
    NO_END,
    Executor,
    FinishReason,
    GuidedDecodingParams,
    GuideType,
    Request,
    RequestStatsPerIteration,
    SamplingConfig,
)
from tests.client.processes import gone
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


def test_the_beams_of_a_search_are_one_result(server: RunningServer) -> None:
    search = SamplingConfig(beam_width=3)
    with Executor(address=server.address) as executor:
        request = Request(text="The capital of France is", max_tokens=6, num_return_sequences=2, sampling_config=search)
        free = Request(text="Once upon a time", max_tokens=6, sampling_config=SamplingConfig(temperature=0))
        beams, other = executor.await_responses(executor.enqueue_requests([request, free]))
    (result,) = [response.result for response in beams]
    assert (result.sequence_index, result.is_final, result.is_sequence_final) == (0, True, True)
    assert len(result.output_token_ids) == len(result.texts) == 2
    assert result.output_token_ids[0] != result.output_token_ids[1]
    assert result.cum_log_probs[0] >= result.cum_log_probs[1]
    assert other[0].result.is_final


@pytest.mark.slow
def test_a_killed_grammar_process_changes_no_result(server: RunningServer) -> None:
    digits = GuidedDecodingParams(GuideType.REGEX, "([0-9]{3} ){16}")
    greedy = SamplingConfig(temperature=0)
    requests = [
        Request(text=f"{i} numbers: ", sampling_config=greedy, guided_decoding_params=digits, streaming=bool(i % 2))
        for i in range(4)
    ]
    requests.append(Request(text="Once upon a time", max_tokens=48, end_id=NO_END, sampling_config=greedy))

    def answers(executor: Executor, *, kill: bool) -> list[tuple[int, ...]]:
        ids = executor.enqueue_requests(requests)
        tokens: dict[int, tuple[int, ...]] = dict.fromkeys(ids, ())
        while responses := executor.await_responses():
            for response in responses:
                tokens[response.request_id] += response.result.output_token_ids[0]
            if kill and len(tokens[ids[1]]) > 4:
                server.grammar_process().kill()
                kill = False
        assert not kill
        return [tokens[each] for each in ids]

    with Executor(address=server.address) as executor:
        before = answers(executor, kill=False)
        starts = executor.client.stats().grammar_starts
        assert answers(executor, kill=True) == before
        while (stats := executor.client.stats()).grammar_starts == starts:
            time.sleep(0.05)  # the server may not have noticed the death yet
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.grammar_starts == starts + 1


@pytest.mark.slow
def test_an_executor_starts_a_server_of_its_own_and_ends_it() -> None:
    with Executor("embedded", num_threads=1, max_batch_size=2, max_model_len=128) as executor:
        process = executor.client._server
        assert process is not None
        pid = process.pid
        request_id = executor.enqueue_request(
            Request(text="The capital of France is", max_tokens=4, sampling_config=SamplingConfig(temperature=0))
        )
        (response,) = executor.await_responses(request_id)
        assert "Paris" in response.result.texts[0]
    assert pid is not None
    assert gone(pid)
