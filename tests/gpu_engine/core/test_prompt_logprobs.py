"""Log-probabilities of a prompt: those of the same tokens as an answer, bit for bit, and no token changes by them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from gpu_engine.api.request import FinishReason, Logprobs, PromptLogprobs
from gpu_engine.core.engine import Engine
from gpu_engine.model.loader import LoadedModel
from gpu_engine.step.prompt_scorer import SCORED_ROWS
from kernels.logprobs import RowLogprobs, row_logprobs
from tests.gpu_engine.harness import (
    Answer,
    Hold,
    answer_all,
    answer_each,
    ask,
    config,
    settle,
    tokens,
    unguided_engine,
    with_drafts,
)

LONG = tokens(2 * SCORED_ROWS + 30, 4, repeat=40)


def scored(prompt: list[int], wanted: int = 3, **fields: Any) -> Answer:
    return ask(prompt, **{"max_tokens": 4, "ignore_eos": True, "prompt_logprobs": wanted, **fields})


def scores_of(answer: Answer) -> PromptLogprobs:
    """Return the log-probabilities of an answer, which are only in its first event."""
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
def test_they_are_those_of_the_same_tokens_as_an_answer(either_forward: LoadedModel, drafts: int) -> None:
    with unguided_engine(either_forward, with_drafts(drafts, overlap=drafts > 0)) as engine:
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
    net = AutoModelForCausalLM.from_pretrained(llama.name, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = net(torch.tensor([LONG])).logits[0, :-1].log_softmax(-1)
    scores = scores_of(answer)
    of_prompt = expected.gather(1, torch.tensor(LONG[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.from_numpy(scores.logprob_N), of_prompt, atol=1e-4, rtol=0)
    top = torch.from_numpy(scores.top_logprobs_NM)
    torch.testing.assert_close(top, expected.topk(20).values, atol=1e-4, rtol=0)


@pytest.mark.parametrize("length", [1, 2, SCORED_ROWS, SCORED_ROWS + 1, SCORED_ROWS + 2, len(LONG)])
def test_they_change_no_token_at_any_length(either_forward: LoadedModel, length: int) -> None:
    fields: dict[str, Any] = {"max_tokens": 20, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    with unguided_engine(either_forward, with_drafts(3)) as engine:
        (expected,) = answer_all(engine, [ask(LONG[:length], **fields)])
        again = scored(LONG[:length], **fields)
        assert answer_all(engine, [again, ask(tokens(50, 8), max_tokens=9)])[0] == expected
    scores_of(again)


def test_they_need_every_row_so_cached_pages_are_not_reused_but_made(llama: LoadedModel) -> None:
    with unguided_engine(llama, with_drafts(3)) as engine:
        answers = [scored(LONG, 0), ask(LONG, max_tokens=3), scored(LONG, 0)]
        answer_each(engine, answers)
    assert [answer.telemetry.cached_tokens > 0 for answer in answers] == [False, True, False]
    assert np.array_equal(scores_of(answers[0]).logprob_N, scores_of(answers[2]).logprob_N)
    assert scores_of(answers[0]).top_ids_NM.shape == (len(LONG) - 1, 0)


def test_a_request_that_ends_between_two_chunks_leaves_nothing(llama: LoadedModel, overlap: bool) -> None:
    def parts(engine: Engine) -> dict[Any, Any]:
        return engine.executor.scorer._parts

    with unguided_engine(llama, config(overlap=overlap, max_batch_size=2)) as engine:
        other = ask(tokens(5, 1), max_tokens=200, ignore_eos=True)
        other.submit(engine)
        for seed in range(4):
            answer = scored(tokens(200, seed))
            hold = Hold(engine, lambda: bool(parts(engine)))
            answer.submit(engine)
            with hold.reached():
                engine.abort(answer.request.request_id)
            assert answer.wait().finish is FinishReason.ABORTED
        last = scored(LONG)
        answer_all(engine, [last])
        scores_of(last)
        other.wait()
        settle(engine)
        assert not parts(engine)


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
