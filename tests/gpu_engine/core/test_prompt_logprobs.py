"""Log-probabilities of a prompt: those of the same tokens as an answer, bit for bit, and no token changes by them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_engine.api.request import FinishReason, Logprobs, PromptLogprobs
from gpu_engine.core.engine import Engine
from gpu_engine.model.loader import LoadedModel, load_model
from gpu_engine.step.prompt_scorer import SCORED_ROWS
from kernels.blocks import can_multiply_blocks
from kernels.logprobs import RowLogprobs, row_logprobs
from tests.gpu_engine.harness import (
    Answer,
    Hold,
    answer_all,
    answer_each,
    ask,
    config,
    executor_of,
    settle,
    tokens,
    unguided_engine,
    with_drafts,
)

LONG = tokens(2 * SCORED_ROWS + 30, 4, repeat=40)


@pytest.fixture(scope="module", params=["float32", "q4"])
def model(request: pytest.FixtureRequest, llama: LoadedModel, saved: Callable[[str], Path]) -> LoadedModel:
    """A forward through transformers, and a native one whose prompts share the forwards of steps."""
    if request.param == "float32":
        return llama
    if not can_multiply_blocks():
        pytest.skip("products over blocks need AVX2")
    return load_model(config(model=str(saved("llama")), dtype="bfloat16", quantization="q4"))


def scored(prompt: list[int], wanted: int = 3, **fields: Any) -> Answer:
    answer = ask(prompt, **{"max_tokens": 4, "ignore_eos": True, **fields})
    answer.change(prompt_logprobs=wanted)
    return answer


def scores_of(answer: Answer) -> PromptLogprobs:
    """Return the log-probabilities of an answer, which are in its first event alone."""
    found = [event.prompt_logprobs for event in answer.events]
    assert found[0] is not None
    assert found[1:] == [None] * (len(found) - 1)
    assert answer.events[0].token_ids
    assert len(found[0].logprob_N) == len(answer.request.prompt_ids) - 1
    return found[0]


def as_entries(scores: PromptLogprobs) -> list[Logprobs]:
    rows = zip(scores.logprob_N.tolist(), scores.top_ids_NM.tolist(), scores.top_logprobs_NM.tolist(), strict=True)
    return [Logprobs(logprob, tuple(zip(ids, values, strict=True))) for logprob, ids, values in rows]


@pytest.mark.parametrize("drafts", [0, 3])
def test_they_are_those_of_the_same_tokens_as_an_answer(model: LoadedModel, drafts: int, overlap: bool) -> None:
    with unguided_engine(model, with_drafts(drafts, overlap=overlap)) as engine:
        answers = [
            ask(LONG[:n], max_tokens=100, temperature=0.7, seed=n, ignore_eos=True, logprobs=3) for n in (5, 70, 128)
        ]
        answer_all(engine, answers)
        # All at once, next to each other and next to prompts without: the second turns.
        seconds = [scored([*answer.request.prompt_ids, *answer.tokens]) for answer in answers]
        answer_all(engine, [seconds[0], ask(LONG, max_tokens=30), *seconds[1:]])
    for answer, second in zip(answers, seconds, strict=True):
        begin = len(answer.request.prompt_ids) - 1
        assert as_entries(scores_of(second))[begin:] == answer.logprobs


def test_they_are_those_of_the_model_itself(llama: LoadedModel) -> None:
    with unguided_engine(llama, config()) as engine:
        answer = scored(LONG, wanted=20)
        answer_all(engine, [answer])
    (expected,) = torch.from_numpy(np.array(_logits(llama, LONG)))[None].log_softmax(-1)
    scores = scores_of(answer)
    behind = torch.tensor(LONG[1:])
    torch.testing.assert_close(
        torch.from_numpy(scores.logprob_N), expected[:-1].gather(1, behind[:, None])[:, 0], atol=1e-4, rtol=0
    )
    torch.testing.assert_close(
        torch.from_numpy(scores.top_logprobs_NM), expected[:-1].topk(20).values, atol=1e-4, rtol=0
    )


def _logits(model: LoadedModel, prompt: list[int]) -> Any:
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(model.name, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return net(torch.tensor([prompt])).logits[0].numpy()


@pytest.mark.parametrize("length", [1, 2, SCORED_ROWS, SCORED_ROWS + 1, SCORED_ROWS + 2, len(LONG)])
def test_they_change_no_token_at_any_length(model: LoadedModel, length: int) -> None:
    fields: dict[str, Any] = {"max_tokens": 20, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    with unguided_engine(model, with_drafts(3)) as engine:
        (expected,) = answer_all(engine, [ask(LONG[:length], **fields)])
        again = scored(LONG[:length], **fields)
        assert answer_all(engine, [again, ask(tokens(50, 8), max_tokens=9)])[0] == expected
    scores_of(again)


def test_they_need_every_row_so_cached_pages_are_not_reused_but_made(llama: LoadedModel) -> None:
    with unguided_engine(llama, with_drafts(3)) as engine:
        answers = [ask(LONG, max_tokens=3), scored(LONG, 0), scored(LONG, 0), ask(LONG, max_tokens=3)]
        answer_each(engine, answers)
    assert [answer.telemetry.cached_tokens > 0 for answer in answers] == [False, False, False, True]
    assert np.array_equal(scores_of(answers[1]).logprob_N, scores_of(answers[2]).logprob_N)
    assert scores_of(answers[1]).top_ids_NM.shape == (len(LONG) - 1, 0)
    with unguided_engine(llama, with_drafts(3)) as engine:
        answers = [scored(LONG), ask(LONG, max_tokens=3)]
        answer_each(engine, answers)
    assert answers[1].telemetry.cached_tokens > 0, "its own pages are found by others"


def test_preempted_prompts_have_all_of_them_once(model: LoadedModel, overlap: bool) -> None:
    def run(**fields: Any) -> tuple[list[Answer], int]:
        with unguided_engine(model, with_drafts(3, overlap=overlap, **fields)) as engine:
            answers = [scored(tokens(60 + 20 * n, n), max_tokens=60, seed=n) for n in range(5)]
            answer_all(engine, answers)
            return answers, engine.stats().preemptions

    undisturbed, never = run()
    tight, preemptions = run(kv_cache_tokens=256)
    assert never == 0 < preemptions
    assert [answer.tokens for answer in tight] == [answer.tokens for answer in undisturbed]
    for one, other in zip(tight, undisturbed, strict=True):
        assert as_entries(scores_of(one)) == as_entries(scores_of(other))


def test_a_request_that_ends_between_two_chunks_leaves_nothing(llama: LoadedModel, overlap: bool) -> None:
    with unguided_engine(llama, config(overlap=overlap, max_batch_size=2)) as engine:
        other = ask(tokens(5, 1), max_tokens=200, ignore_eos=True)
        other.submit(engine)
        aborted = [scored(tokens(200, seed)) for seed in range(8)]
        for answer in aborted:
            hold = Hold(engine, lambda: bool(_parts(engine)))
            answer.submit(engine)
            with hold.reached():
                engine.abort(answer.request.request_id)
            answer.wait()
        last = scored(LONG)
        answer_all(engine, [last])
        scores_of(last)
        other.wait()
        settle(engine)
        assert not _parts(engine)
        assert {answer.finish for answer in aborted} == {FinishReason.ABORTED}


def _parts(engine: Engine) -> dict[Any, Any]:
    return executor_of(engine).scorer._parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "V"), [(1, 50), (3, 64), (64, 1031)])
def test_the_native_kernel_has_the_log_softmax(dtype: torch.dtype, n: int, V: int) -> None:
    g = torch.Generator().manual_seed(n)
    logits = (torch.randn(n, V, generator=g) * 4).to(dtype)
    rows = RowLogprobs.allocate(64, V)
    rows.tokens_N[:n] = torch.randint(V, (n,), generator=g)
    rows.wanted_1.fill_(7)
    row_logprobs(logits, rows)
    expected = logits.float().log_softmax(-1)
    chosen = expected.gather(1, rows.tokens_N[:n, None].long())[:, 0]
    torch.testing.assert_close(rows.logprob_N[:n], chosen, atol=1e-5, rtol=0)
    top = expected.gather(1, rows.top_ids_NM[:n, :7].long())
    torch.testing.assert_close(rows.top_logprobs_NM[:n, :7], top, atol=1e-5, rtol=0)
    torch.testing.assert_close(top, expected.topk(7).values, atol=0, rtol=0)
