"""The limits that need a tokenizer, and what a Request is made of."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from tokenizers.processors import TemplateProcessing

from gpu_engine.api.errors import InvalidRequest
from gpu_engine.api.limits import Limits
from gpu_engine.api.request import Request
from gpu_engine.front.prompt import build_requests, is_large, sequence_seed
from gpu_engine.front.validation import check
from protos.engine.v1 import engine_pb2 as pb
from tests.fakes import ByteTokenizer

LIMITS = Limits(
    vocab_size=320, max_model_len=64, num_draft_tokens=7, jump_forward_tokens=15, max_n=4, max_prompt_bytes=1 << 20
)


def build(message: pb.GenerateRequest, tokenizer: ByteTokenizer | None = None) -> list[Request]:
    checked = check(message, LIMITS, ())
    return build_requests(checked, tokenizer or ByteTokenizer(), LIMITS, lambda event: None, 12.5)


def chat(*pairs: tuple[str, str]) -> pb.GenerateRequest:
    turns = [pb.ChatMessage(role=role, content=content) for role, content in pairs]
    return pb.GenerateRequest(messages=pb.ChatMessages(messages=turns))


def test_max_tokens_is_the_room_that_is_left() -> None:
    (request,) = build(pb.GenerateRequest(text="hello"))
    assert request.prompt_ids == list(b"hello")
    assert request.sampling.max_tokens == 64 - 5
    assert request.arrived_s == 12.5


def test_a_larger_max_tokens_is_cut_to_the_room() -> None:
    (request,) = build(pb.GenerateRequest(text="hello", sampling=pb.SamplingParams(max_tokens=10**6)))
    assert request.sampling.max_tokens == 64 - 5


def test_a_prompt_of_full_length_is_refused_with_both_numbers() -> None:
    assert build(pb.GenerateRequest(text="x" * 63))[0].sampling.max_tokens == 1
    with pytest.raises(InvalidRequest, match=r"text: has 64 tokens, at most 63 fit \(max_model_len 64"):
        build(pb.GenerateRequest(text="x" * 64))


def test_min_tokens_above_max_tokens_is_refused() -> None:
    (request,) = build(pb.GenerateRequest(text="x", sampling=pb.SamplingParams(min_tokens=8, max_tokens=8)))
    assert request.sampling.min_tokens == request.sampling.max_tokens == 8
    with pytest.raises(InvalidRequest, match=r"sampling\.min_tokens: is 9, at most 8"):
        build(pb.GenerateRequest(text="x", sampling=pb.SamplingParams(min_tokens=9, max_tokens=8)))


def test_each_sequence_has_its_own_seed_and_the_first_the_given_one() -> None:
    requests = build(pb.GenerateRequest(text="x", sampling=pb.SamplingParams(n=4, seed=7)))
    seeds = [request.sampling.seed for request in requests]
    assert seeds[0] == 7
    assert len(set(seeds)) == 4
    assert seeds == [sequence_seed(7, i) for i in range(4)]
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert [request.index for request in requests] == [0, 1, 2, 3]
    assert requests[0].prompt_ids is not requests[1].prompt_ids


def test_a_chat_is_rendered_by_the_template() -> None:
    (request,) = build(chat(("system", "s"), ("user", "u")))
    assert bytes(request.prompt_ids) == b"system: s\nuser: u\nassistant:"


def test_an_error_of_the_chat_template_is_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="messages: the model's chat template raised an error: no"):
        build(chat(("user", "refuse")))


def test_an_unknown_role_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"messages\.messages\[1\]\.role: 'wizard'"):
        build(chat(("user", "u"), ("wizard", "w")))


def test_a_role_that_the_template_mentions_is_known() -> None:
    tokenizer = ByteTokenizer("{% for m in messages %}{% if m.role == 'tool' %}T{% endif %}{% endfor %}!")
    assert bytes(build(chat(("tool", "w")), tokenizer)[0].prompt_ids) == b"T!"


def test_a_model_without_a_template_refuses_chats() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = ""
    with pytest.raises(InvalidRequest, match="no chat template"):
        build(chat(("user", "u")), tokenizer)


def test_bad_words_are_forbidden_with_and_without_a_space() -> None:
    message = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(bad_words=["a", "bc"], bad_token_ids=[5]))
    sampling = build(message)[0].sampling
    assert sampling.bad_token_ids == (5, ord("a"))
    assert sampling.bad_words == ((32, ord("a")), (ord("b"), ord("c")), (32, ord("b"), ord("c")))


def test_only_small_prompts_are_tokenised_on_the_loop() -> None:
    checked = check(pb.GenerateRequest(text="x"), LIMITS, ())
    assert not is_large(checked)
    assert is_large(dataclasses.replace(checked, prompt="x" * 100_000))
    assert not is_large(check(chat(("user", "u")), LIMITS, ()))
    assert is_large(check(chat(("user", "u" * 100_000)), LIMITS, ()))


def test_what_is_far_too_long_is_not_tokenised_to_its_end() -> None:
    with pytest.raises(InvalidRequest, match=r"text: has more than 1024 tokens, at most 63 fit \(max_model_len 64"):
        build(pb.GenerateRequest(text="x" * 500_000))


async def test_other_threads_run_while_a_long_text_is_tokenised() -> None:
    tokenizer = ByteTokenizer()
    wide = dataclasses.replace(LIMITS, max_model_len=1 << 24)
    checked = dataclasses.replace(check(pb.GenerateRequest(text="x"), LIMITS, ()), prompt="a b c " * 150_000)
    turns = 0

    def tokenise() -> int:
        """Return the turns of the loop during one tokenisation. On a busy machine the loop may sleep through some."""
        nonlocal turns
        for _ in range(50):
            turns = 0
            (built,) = build_requests(checked, tokenizer, wide, lambda event: None, 0.0)
            assert len(built.prompt_ids) == 900_000
            if turns > 100:
                break
        return turns

    work = asyncio.create_task(asyncio.to_thread(tokenise))
    while not work.done():
        turns += 1
        await asyncio.sleep(0)
    assert await work > 100


def test_seeds_of_sequences_are_those_of_the_published_generator() -> None:
    """The first numbers of splitmix64 from 0."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [sequence_seed(0, i) for i in range(4)] == [0, *published]


@pytest.mark.parametrize(
    ("message", "large"),
    [
        (pb.GenerateRequest(text="x" * 8192), False),
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


def test_the_beginning_decides_about_texts_of_more_than_twice_its_length() -> None:
    with pytest.raises(InvalidRequest, match="text: has 2048 tokens"):
        build(pb.GenerateRequest(text="x" * 2048))
    with pytest.raises(InvalidRequest, match="text: has more than 1024 tokens"):
        build(pb.GenerateRequest(text="x" * 2049))


def test_the_first_sequence_has_the_log_probabilities_of_the_prompt() -> None:
    options = pb.ResponseOptions(prompt_logprobs=2)
    requests = build(pb.GenerateRequest(text="x", sampling=pb.SamplingParams(n=3), response=options))
    assert [request.outputs.prompt_logprobs for request in requests] == [2, None, None]
