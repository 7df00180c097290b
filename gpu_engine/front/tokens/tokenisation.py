"""The calls Tokenize and Detokenize: text to token ids, as Generate has them, and back.

Invariant: a large text never blocks the event loop, and all large texts together use one thread, so that a prompt of
Generate waits for at most one of them. Not responsible for: prompts of Generate (see front/prompt.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from gpu_engine.api.conversation import Chat
from gpu_engine.api.errors import InvalidRequest
from gpu_engine.api.limits import Limits
from gpu_engine.api.ports import Tokenizer
from gpu_engine.front.prompt import LARGE_PROMPT_CHARS, chars_of, encode_prompt
from gpu_engine.front.validation import check_prompt, check_token_ids
from protos.engine.v1 import engine_pb2 as pb

Response = TypeVar("Response")

_ANCHOR = "a"
"""A text before a single token, so that its decoder keeps the token's leading space."""


class Tokenisation:
    """Serves both calls. Used on the event loop."""

    def __init__(self, tokenizer: Tokenizer, limits: Limits) -> None:
        self._tokenizer, self._limits = tokenizer, limits
        self._one_at_a_time = asyncio.Lock()

    async def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        """Return the ids of a text or a conversation. Raises InvalidRequest."""
        form = request.WhichOneof("prompt")
        if request.HasField("add_special_tokens") and form == "messages":
            raise InvalidRequest("add_special_tokens", "is for text: the chat template writes the special tokens")
        message = pb.GenerateRequest(tools=request.tools if request.HasField("tools") else None)
        if form == "text":
            message.text = request.text
        elif form == "messages":
            message.messages.CopyFrom(request.messages)
        prompt = check_prompt(message, self._limits)
        assert isinstance(prompt, (str, Chat))
        special = not request.HasField("add_special_tokens") or request.add_special_tokens
        large = chars_of(prompt) > LARGE_PROMPT_CHARS

        def run() -> pb.TokenizeResponse:
            ids = encode_prompt(prompt, self._tokenizer, add_special_tokens=special)
            return pb.TokenizeResponse(token_ids=ids, texts=self._texts(ids) if request.with_texts else ())

        return await self._run(run, large=large)

    async def detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        """Return the text of the ids. Raises InvalidRequest."""
        count, most = len(request.token_ids), self._limits.max_prompt_bytes // 4
        if count > most:
            raise InvalidRequest("token_ids", f"has {count} ids, at most {most} (max_prompt_bytes / 4) are allowed")

        def run() -> pb.DetokenizeResponse:
            ids = check_token_ids(request.token_ids, "token_ids", self._limits.vocab_size)
            text = self._decode([list(ids)], skip=request.skip_special_tokens)[0]
            return pb.DetokenizeResponse(text=text, texts=self._texts([*ids]) if request.with_texts else ())

        return await self._run(run, large=count > LARGE_PROMPT_CHARS)

    async def _run(self, run: Callable[[], Response], *, large: bool) -> Response:
        if not large:
            return run()
        async with self._one_at_a_time:
            return await asyncio.to_thread(run)

    def _texts(self, ids: list[int]) -> list[str]:
        """Return the text of each token as it is after other text; bytes that are no UTF-8 become U+FFFD."""
        (anchor,) = self._tokenizer.backend_tokenizer.encode_batch_fast([_ANCHOR], add_special_tokens=False)
        front, distinct = list(anchor.ids), sorted(set(ids))
        (head, *following) = self._decode([front, *([*front, token] for token in distinct)], skip=False)
        text = {token: piece.removeprefix(head) for token, piece in zip(distinct, following, strict=True)}
        return [text[token] for token in ids]

    def _decode(self, lists: list[list[int]], *, skip: bool) -> list[str]:
        # The batch call releases the GIL; `decode` holds it.
        texts: list[str] = self._tokenizer.backend_tokenizer.decode_batch(lists, skip_special_tokens=skip)
        return texts

    def __repr__(self) -> str:
        return f"<Tokenisation busy={self._one_at_a_time.locked()}>"
