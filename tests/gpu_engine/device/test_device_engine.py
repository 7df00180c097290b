"""An engine whose steps are graphs over a recorded stream: numbers, ends and a lost device.

Not responsible for: its tokens (see test_device_lossless.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu_engine.api.errors import InternalError, InvalidRequest
from gpu_engine.api.output_tensors import WantedOutput
from gpu_engine.api.request import FinishReason, PromptLogprobs
from gpu_engine.core.device_slot_writer import DeviceSlotWriter
from gpu_engine.model.loader import LoadedModel
from tests.gpu_engine.device.device_engine import device_engine, guided_device_engine
from tests.gpu_engine.device.device_requests import GUIDED, INTERPRETED, UNGUIDED, on_cpu, on_device
from tests.gpu_engine.harness import (
    PATIENCE_S,
    Answer,
    Hold,
    answer_all,
    ask,
    executor_of,
    tokens,
)

pytestmark = INTERPRETED


@pytest.mark.parametrize("drafts_by", ["ngram", pytest.param("model", marks=pytest.mark.slow)])
def test_log_probabilities_and_tensors_equal_those_of_a_cpu(llama: LoadedModel, drafts_by: str) -> None:
    names = ("logits", "hidden_states.1", "model.layers.0.mlp")
    wanted = tuple(WantedOutput(name, name, llama.outputs[name], context=True, answer=True) for name in names)

    def made() -> list[Answer]:
        answers = [ask(tokens(n, n), max_tokens=6, logprobs=3, ignore_eos=True) for n in (70, 5, 1)]
        for answer in answers:
            answer.change(prompt_logprobs=3)
        for answer in answers[::2]:
            answer.change(tensors=wanted)
        return [*answers, ask(tokens(8, 2), max_tokens=4)]

    def rows(answer: Answer, name: str) -> Any:
        parts = [each for event in answer.events for each in event.outputs if each.name == name]
        assert [part.start for part in parts] == [0, *(part.end for part in parts[:-1])]
        return np.concatenate([part.data for part in parts]).view(np.float32)

    def scores(answer: Answer) -> PromptLogprobs:
        (found,) = [event.prompt_logprobs for event in answer.events if event.prompt_logprobs is not None]
        return found

    expected, answers = made(), made()
    on_cpu(llama, expected, max_model_len=96)
    fields = {"draft_model": llama.name} if drafts_by == "model" else {}
    with device_engine(llama, on_device(3, max_model_len=96, **fields)) as (engine, _):
        assert answer_all(engine, answers) == [answer.tokens for answer in expected]
        if fields:
            stats = engine.stats()
            assert stats.accepted_draft_tokens > 0.9 * stats.draft_tokens > 0, "the draft model has the prompt's keys"
    assert not [event for event in answers[3].events if event.logprobs or event.prompt_logprobs is not None]
    for ours, theirs in zip(answers[:3], expected[:3], strict=True):
        assert [entry.logprob for entry in ours.logprobs] == pytest.approx(
            [entry.logprob for entry in theirs.logprobs], abs=1e-4
        )
        for entry, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert [token for token, _ in entry.top] == [token for token, _ in other.top]
        got, want = scores(ours), scores(theirs)
        assert got.logprob_N == pytest.approx(want.logprob_N, abs=1e-4)
        assert got.top_ids_NM.tolist() == want.top_ids_NM.tolist()
        assert len(got.logprob_N) == len(ours.request.prompt_ids) - 1
        for name in names if ours is not answers[1] else ():
            found = rows(ours, name)
            assert len(found) == len(ours.request.prompt_ids) + len(ours.tokens) - 1
            np.testing.assert_allclose(found, rows(theirs, name), atol=1e-4)


def test_the_slot_of_an_aborted_request_is_reused(
    llama: LoadedModel, unguided_tokens: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """The start says once what of it no GPU has run."""
    with device_engine(llama, on_device(3, max_batch_size=1)) as (engine, _):
        endless = ask(tokens(5, 9), max_tokens=1000, ignore_eos=True)
        hold = Hold(engine, lambda: len(endless.tokens) >= 4)
        endless.submit(engine)
        following = UNGUIDED[0]()
        with hold.reached():
            following.submit(engine)
            assert engine.abort(endless.request.request_id)
        assert endless.wait().finish is FinishReason.ABORTED
        assert following.wait().tokens == unguided_tokens[0]
    assert caplog.text.count("so far: attention in parts of a head, kernels that Triton") == 1


def test_more_bad_tokens_than_a_slot_holds_are_rejected_with_the_limit(llama: LoadedModel) -> None:
    with device_engine(llama, on_device(0)) as (engine, _):
        request = ask(tokens(5, 1), bad_token_ids=tuple(range(600))).request
        with pytest.raises(InvalidRequest, match="rules of 605 numbers, at most 512"):
            engine.submit(request)


def test_a_refused_post_ends_only_its_own_requests_with_internal(
    llama: LoadedModel, guided_tokens: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with guided_device_engine(llama, on_device(3)) as (engine, grammar, stream):
        slot_writer, broken = executor_of(engine).slot_writer, [0]
        assert isinstance(slot_writer, DeviceSlotWriter)

        def break_the_count(answer: Answer) -> None:
            if len(answer.tokens) >= 3 and not broken[0]:
                broken[0] = 1
                # More tokens that are not yet posted than a record holds: the prompt's as well.
                stream.kernel(slot_writer.buffers.posted_S.fill_, -20)

        guided, unguided = ask(tokens(20, 1), grammar="50", max_tokens=90, on_event=break_the_count), GUIDED[1]()
        for answer in (guided, unguided):
            answer.submit(engine)
        assert isinstance(guided.wait().error, InternalError)
        assert unguided.wait().tokens == guided_tokens[1]
        assert "a step's post was refused" in caplog.text
        assert answer_all(engine, [GUIDED[0]()]) == guided_tokens[:1], "the next sequence can use the slot"
        assert engine.stats().failed == {"INTERNAL": 1}
        # A step launched after the refused post continues from the tokens of that post. The sidecar then sees a gap,
        # unless the matcher is closed by then. It sees no other problem, and none of another slot generation.
        broken_gen = grammar.opened[0][1]
        problems = grammar.sidecar.problems
        assert [p for p in problems if f"slot_gen={broken_gen}," not in p or not p.endswith(" tokens")] == []
        problems.clear()


def test_a_lost_device_ends_the_engine_and_is_reported(llama: LoadedModel) -> None:
    failures: list[Exception] = []
    with device_engine(llama, on_device(3)) as (engine, stream):
        engine.watch(failures.append)
        answer = ask(tokens(5, 9), max_tokens=1000, ignore_eos=True)
        hold = Hold(engine, lambda: len(answer.tokens) >= 4)
        answer.submit(engine)
        with hold.reached():
            stream.fail()
        assert isinstance(answer.wait().error, InternalError)
        engine._thread.join(PATIENCE_S)
        assert not engine._thread.is_alive()
        assert [str(failure) for failure in failures] == ["RuntimeError: an illegal memory access was encountered"]
        with pytest.raises(InternalError, match="lost its device"):
            engine.submit(ask(tokens(5, 9)).request)
        engine.watch(failures.append)
        assert len(failures) == 2, "a watcher that is added after the loss is called, too"
