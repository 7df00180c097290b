"""The limits that need a tokenizer, and what a Request is made of."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from gpu_engine.api.errors import InvalidRequest
from gpu_engine.api.request import Request
from gpu_engine.front.prompt import build_requests, is_large, sequence_seed
from gpu_engine.front.validation import check
from protos.engine.v1 import engine_pb2 as pb
from tests.fakes import ByteTokenizer
from tests.gpu_engine.front import serving

LIMITS = dataclasses.replace(serving.LIMITS, max_prompt_bytes=1 << 20)


def build(message: pb.GenerateRequest, tokenizer: ByteTokenizer | None = None) -> list[Request]:
    checked = check(message, LIMITS, ())
    return build_requests(checked, tokenizer or ByteTokenizer(), LIMITS, lambda event: None, 12.5)


def chat(*pairs: tuple[str, str]) -> pb.GenerateRequest:
    return pb.GenerateRequest(messages=serving.conversation(*pairs))


def text(count: int, **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="x" * count, sampling=pb.SamplingParams(**sampling))


def test_max_tokens_is_cut_to_the_room_that_is_left() -> None:
    for message in (text(5), text(5, max_tokens=10**6)):
        (request,) = build(message)
        assert (request.prompt_ids, request.arrived_s) == (list(b"xxxxx"), 12.5)
        assert request.sampling.max_tokens == 64 - 5
    assert build(text(63))[0].sampling.max_tokens == 1
    assert build(text(1, min_tokens=8, max_tokens=8))[0].sampling.min_tokens == 8


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (text(64), r"text: has 64 tokens, at most 63 fit \(max_model_len 64"),
        (text(2048), "text: has 2048 tokens"),
        (text(2049), r"text: has more than 1024 tokens, at most 63 fit \(max_model_len 64"),
        (text(1, min_tokens=9, max_tokens=8), r"sampling\.min_tokens: is 9, at most 8"),
        (chat(("user", "refuse")), "messages: the model's chat template raised an error: no"),
        (chat(("user", "u"), ("wizard", "w")), r"messages\.messages\[1\]\.role: 'wizard'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_prompt_that_does_not_fit_is_refused_by_field(message: pb.GenerateRequest, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        build(message)


def test_each_sequence_has_its_own_seed_and_the_first_the_given_one() -> None:
    message = text(1, n=4, seed=7)
    message.response.prompt_logprobs = 2
    requests = build(message)
    assert [request.sampling.seed for request in requests] == [sequence_seed(7, i) for i in range(4)]
    assert [request.index for request in requests] == [0, 1, 2, 3]
    assert [request.outputs.prompt_logprobs for request in requests] == [2, None, None, None]
    assert requests[0].prompt_ids is not requests[1].prompt_ids
    splitmix64_from_0 = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [sequence_seed(0, i) for i in range(4)] == [0, *splitmix64_from_0]
    assert sequence_seed(7, 0) == 7


def test_a_role_is_known_if_the_template_mentions_it_and_a_chat_needs_a_template() -> None:
    tokenizer = ByteTokenizer("{% for m in messages %}{% if m.role == 'tool' %}T{% endif %}{% endfor %}!")
    assert bytes(build(chat(("tool", "w")), tokenizer)[0].prompt_ids) == b"T!"
    tokenizer.chat_template = ""
    with pytest.raises(InvalidRequest, match="no chat template"):
        build(chat(("user", "u")), tokenizer)


async def test_other_threads_run_while_a_long_text_is_tokenised() -> None:
    wide = dataclasses.replace(LIMITS, max_model_len=1 << 24)
    checked = dataclasses.replace(check(text(1), LIMITS, ()), prompt="a b c " * 50_000)
    turns, most = 0, 0
    for _ in range(50):  # on a busy machine the loop may sleep through a tokenisation
        turns = 0
        work = asyncio.create_task(
            asyncio.to_thread(build_requests, checked, ByteTokenizer(), wide, lambda event: None, 0.0)
        )
        while not work.done():
            turns += 1
            await asyncio.sleep(0)
        assert len((await work)[0].prompt_ids) == 300_000
        most = max(most, turns)
        if most > 100:
            break
    assert most > 100


@pytest.mark.parametrize(
    ("message", "large"),
    [
        (pb.GenerateRequest(text="x" * 8192), False),
        (chat(("user", "u")), False),
        (chat(("user", "u" * 100_000)), True),
        (pb.GenerateRequest(text="x" * 8193), True),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[7] * 8193)), False),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[7] * 8193), response=pb.ResponseOptions(echo=True)), True),
        (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(bad_words=map(str, range(8)))), False),
        (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(bad_words=map(str, range(9)))), True),
    ],
)
def test_the_sizes_from_which_a_prompt_is_large(message: pb.GenerateRequest, large: bool) -> None:
    wide = dataclasses.replace(LIMITS, max_model_len=1 << 14)
    assert is_large(check(message, wide, ())) == large


def test_special_tokens_are_added_to_text_and_not_to_what_a_template_or_a_ban_spells() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", 257)]
    )
    (text,) = build(pb.GenerateRequest(text="x", sampling=pb.SamplingParams(bad_words=["y"])), tokenizer)
    assert text.prompt_ids == [257, *b"x"]
    assert text.sampling.bad_token_ids == (ord("y"),)
    assert text.sampling.bad_words == (tuple(b" y"),)
    assert bytes(build(chat(("user", "u")), tokenizer)[0].prompt_ids) == b"user: u\nassistant:"
