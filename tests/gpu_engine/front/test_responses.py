"""Whole and cumulative responses: what a request gets instead of deltas."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from gpu_engine.api.errors import GrammarUnavailable
from gpu_engine.api.request import FinishReason, Logprobs, Request, TokenEvent
from protos.engine.v1 import engine_pb2 as pb
from tests.fakes import EOS
from tests.gpu_engine.front.serving import Setup, answer, ask, prompt_scores, refusal, serving
from tests.waiting import eventually

THINKS = "<think>a b</think>c d"
GROUPS = ("<think>a", " b", "</think>c", " d", "")
"""THINKS in groups of tokens, each of which has its own response; the last one is the stop token."""
EVERYTHING: dict[str, Any] = {
    "reasoning": pb.Reasoning(begin="<think>", end="</think>"),
    "sampling": pb.SamplingParams(n=2, logprobs=1, stop=["zz"]),
}


def script(request: Request) -> Iterable[TokenEvent]:
    """Yield THINKS token by token, with log-probabilities and those of the prompt."""
    ids = [*THINKS.encode(), EOS]
    for place, token in enumerate(ids):
        wanted = request.outputs.prompt_logprobs if place == 0 else None
        yield TokenEvent(
            request.index,
            (token,),
            (Logprobs(-0.25, ((token, -0.25),)),),
            FinishReason.STOP if token == EOS else None,
            token if token == EOS else None,
            prompt_logprobs=None if wanted is None else prompt_scores(len(request.prompt_ids) - 1, wanted),
        )


async def stepwise(s: Setup, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    """Return the responses of a request whose engine sends a group when the response of the one before has come."""
    responses: list[pb.GenerateResponse] = []

    async def read() -> None:
        async for response in s.client.generate(request, timeout_s=60):
            responses.append(response)

    s.engine.script, before = None, len(s.engine.submitted)
    reading = asyncio.create_task(read())
    await eventually(lambda: len(s.engine.submitted) == before + 2)
    for submitted in s.engine.submitted[before:]:
        events = iter([*script(submitted)])
        for group in GROUPS:
            count = len(responses)
            for event in itertools.islice(events, len(group) or 1):
                s.engine.emit(submitted, event)
            await eventually(lambda: len(responses) > count)  # noqa: B023 - ends before it changes
    await reading
    return responses


def joined(responses: list[pb.GenerateResponse], index: int) -> pb.GenerateResponse:
    """Return the deltas of a sequence as one message: what a whole response has to be."""
    mine = [response for response in responses if response.index == index]
    whole = pb.GenerateResponse()
    whole.CopyFrom(mine[-1])
    whole.text = "".join(response.text for response in mine)
    for name in ("token_ids", "logprobs", "parts", "prompt_token_ids", "prompt_logprobs"):
        whole.ClearField(name)
        for response in mine:
            getattr(whole, name).extend(getattr(response, name))
    parts = list(whole.parts)
    whole.ClearField("parts")
    for part in parts:
        if whole.parts and whole.parts[-1].kind == part.kind:
            whole.parts[-1].text += part.text
        else:
            whole.parts.append(part)
    whole.ClearField("telemetry")
    return whole


def asking(**options: Any) -> pb.GenerateRequest:
    options = {"echo": True, "prompt_logprobs": 1, **options}
    return ask("hi", response=pb.ResponseOptions(**options), request_id="r", **EVERYTHING)


@pytest.mark.parametrize("more", [{}, {"omit_text": True}, {"omit_token_ids": True}], ids=["all", "no text", "no ids"])
async def test_whole_and_cumulative_responses_have_what_the_deltas_have(tmp_path: Path, more: dict[str, bool]) -> None:
    async with serving(tmp_path) as s:
        deltas = await stepwise(s, asking(**more))
        cumulative = await stepwise(s, asking(cumulative=True, **more))
        s.engine.script = script
        whole = await answer(s.client, asking(whole=True, **more))
    assert len(deltas) > 4
    assert sorted(response.index for response in whole) == [0, 1]
    for response in whole:
        assert response.telemetry.seed
        response.ClearField("telemetry")
        assert response == joined(deltas, response.index)
        mine = [each for each in cumulative if each.index == response.index]
        assert len(mine) > 2
        assert mine[0].prompt_logprobs == response.prompt_logprobs
        assert mine[0].prompt_token_ids == response.prompt_token_ids
        assert not any(each.prompt_token_ids or each.prompt_logprobs for each in mine[1:])
        for before, after in itertools.pairwise(mine):
            assert after.text.startswith(before.text)
            assert list(after.token_ids)[: len(before.token_ids)] == list(before.token_ids)
            assert (after.text, list(after.token_ids), after.finish_reason) != (before.text, list(before.token_ids), 0)
        for name in ("text", "token_ids", "logprobs", "parts", "finish_reason"):
            assert getattr(mine[-1], name) == getattr(response, name), name


async def test_a_whole_response_of_a_sequence_that_is_aborted_or_fails(tmp_path: Path) -> None:
    def ends_early(request: Request) -> Iterable[TokenEvent]:
        yield TokenEvent(request.index, (65,))
        if request.request_id == "fails":
            yield TokenEvent(request.index, error=GrammarUnavailable("gone"))
        yield TokenEvent(request.index, finish=FinishReason.ABORTED)

    whole = pb.ResponseOptions(whole=True)
    async with serving(tmp_path, ends_early) as s:
        (response,) = await answer(s.client, ask(response=whole))
        error = await refusal(s.client, ask(response=whole, request_id="fails"))
    assert (response.text, response.finish_reason) == ("A", pb.FINISH_REASON_ABORTED)
    assert error.details() == "gone"
