"""Tokenize and Detokenize: the ids that Generate has, texts of tokens, limits, and large texts off the event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from gpu_engine.api.errors import InvalidRequest
from gpu_engine.front.prompt import build_requests
from gpu_engine.front.tokens.tokenisation import Tokenisation
from gpu_engine.front.validation import check
from protos.engine.v1 import engine_pb2 as pb
from tests.fakes import ByteTokenizer, byte_tokenizer
from tests.gpu_engine.front import serving

LIMITS = dataclasses.replace(serving.LIMITS, max_prompt_bytes=100_000)


def chat(content: str) -> pb.ChatMessages:
    return serving.conversation(("user", content))


def served(tokenizer: Any = None) -> Tokenisation:
    return Tokenisation(tokenizer or ByteTokenizer(), LIMITS)


class WithStart:
    """A tokenizer that begins every text with a special token."""

    def __init__(self) -> None:
        self.backend_tokenizer = byte_tokenizer()
        self.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|start|> $A", special_tokens=[("<|start|>", 257)]
        )


async def test_a_text_has_the_ids_that_generate_gives_it() -> None:
    tokenizer = WithStart()
    (request,) = build_requests(check(pb.GenerateRequest(text="h\u00e9"), LIMITS, ()), tokenizer, LIMITS, print, 0.0)  # type: ignore[arg-type]
    response = await served(tokenizer).tokenize(pb.TokenizeRequest(text="h\u00e9"))
    assert list(response.token_ids) == request.prompt_ids == [257, *"h\u00e9".encode()]
    assert not response.texts
    longer_than_the_context = await served().tokenize(pb.TokenizeRequest(text="x" * 5_000))
    assert len(longer_than_the_context.token_ids) == 5_000
    bare = await served(tokenizer).tokenize(pb.TokenizeRequest(text="h\u00e9", add_special_tokens=False))
    assert list(bare.token_ids) == [*"h\u00e9".encode()]


async def test_a_conversation_with_tools_has_the_ids_that_generate_gives_it() -> None:
    tools = pb.Tools(tools=[pb.Tool(name="add", parameters='{"type": "object"}')])
    limits = dataclasses.replace(LIMITS, max_model_len=1000)
    checked = check(pb.GenerateRequest(messages=chat("u"), tools=tools), limits, ())
    (request,) = build_requests(checked, ByteTokenizer(), limits, print, 0.0)
    response = await served().tokenize(pb.TokenizeRequest(messages=chat("u"), tools=tools))
    assert list(response.token_ids) == request.prompt_ids
    assert b"add" in bytes(response.token_ids)


async def test_the_text_of_each_token_and_u_fffd_for_a_part_of_a_character() -> None:
    response = await served().tokenize(pb.TokenizeRequest(text="a b\u00e9<|end|>", with_texts=True))
    assert list(response.texts) == ["a", " ", "b", "\ufffd", "\ufffd", "<|end|>"]


async def test_a_token_keeps_its_leading_space_where_the_decoder_drops_that_of_a_text() -> None:
    class Words:
        backend_tokenizer = tokenizers.Tokenizer(models.WordLevel({"\u2581a": 0, "\u2581b": 1}, unk_token="\u2581b"))

    Words.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    Words.backend_tokenizer.decoder = decoders.Metaspace()
    assert Words.backend_tokenizer.decode([1]) == "b"
    response = await served(Words()).tokenize(pb.TokenizeRequest(text="b a b", with_texts=True))
    assert list(response.texts) == [" b", " a", " b"]


async def test_ids_become_text_and_no_utf8_becomes_u_fffd() -> None:
    request = pb.DetokenizeRequest(token_ids=[257, *"h\u00e9".encode(), 0xFF, 0xC3])
    assert (await served().detokenize(request)).text == "<|start|>h\u00e9\ufffd\ufffd"
    request.skip_special_tokens = True
    assert (await served().detokenize(request)).text == "h\u00e9\ufffd\ufffd"
    assert (await served().detokenize(pb.DetokenizeRequest())).text == ""


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (pb.TokenizeRequest(), "prompt: one of"),
        (pb.TokenizeRequest(text=""), "text: is empty"),
        (pb.TokenizeRequest(text="x" * 100_001), r"text: has 100001 bytes, at most 100000 \(max_prompt_bytes\)"),
        (pb.TokenizeRequest(messages=pb.ChatMessages()), "messages.messages: is empty"),
        (pb.TokenizeRequest(messages=chat("refuse")), "messages: the model's chat template raised an error: no"),
        (pb.TokenizeRequest(text="x", tools=pb.Tools(tools=[pb.Tool(name="a")])), "tools: needs messages"),
        (pb.TokenizeRequest(messages=chat("x"), add_special_tokens=True), "add_special_tokens: is for text"),
        (pb.DetokenizeRequest(token_ids=[1, 320]), r"token_ids\[1\]: is 320, token ids are in \[0, 320\)"),
        (pb.DetokenizeRequest(token_ids=[1] * 25_001), "token_ids: has 25001 ids, at most 25000"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_wrong_request_is_refused_by_field(
    request_: pb.TokenizeRequest | pb.DetokenizeRequest, message: str
) -> None:
    call: Any = served().tokenize if isinstance(request_, pb.TokenizeRequest) else served().detokenize
    with pytest.raises(InvalidRequest, match=message):
        await call(request_)


async def test_large_texts_are_tokenised_one_at_a_time_off_the_event_loop() -> None:
    threads: list[tuple[int, int]] = []
    running = threading.Semaphore(1)

    class Watched(ByteTokenizer):
        def __init__(self) -> None:
            super().__init__()
            inner = self.backend_tokenizer

            class Backend:
                def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
                    alone = running.acquire(blocking=False)
                    threads.append((threading.get_ident(), alone))
                    try:
                        return inner.encode_batch_fast(texts, **options)
                    finally:
                        if alone:
                            running.release()

            self.backend_tokenizer = Backend()

    tokenisation = served(Watched())
    await asyncio.gather(*(tokenisation.tokenize(pb.TokenizeRequest(text="x" * 50_000)) for _ in range(4)))
    await tokenisation.tokenize(pb.TokenizeRequest(text="small"))
    assert [thread == threading.get_ident() for thread, _ in threads] == [False] * 4 + [True]
    assert all(alone for _, alone in threads)
