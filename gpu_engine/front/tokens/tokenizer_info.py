"""The tokenizer as a message: its vocabulary, its definition, and the tokens that end an answer.

Invariant: the index of a string in `encoded_vocab` is its token's id. The message is made once, off the event loop, and
shared by the calls that wait for it.

Not responsible for: the files of a tokenizer for gateways (see doors/vllm_wire/tokenizer_files.py).
"""

from __future__ import annotations

import asyncio

from gpu_engine.api.ports import Model
from protos.engine.v1 import engine_pb2 as pb


class TokenizerInfo:
    """The tokenizer of one model, as a message. Used on the event loop."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._made: asyncio.Task[pb.GetTokenizerInfoResponse] | None = None

    async def get(self) -> pb.GetTokenizerInfoResponse:
        """Return the message."""
        if self._made is None or (self._made.done() and self._made.exception()):
            self._made = asyncio.create_task(asyncio.to_thread(tokenizer_info, self._model), name="tokenizer info")
        # A client that leaves must not cancel the work that others wait for.
        return await asyncio.shield(self._made)

    def __repr__(self) -> str:
        return f"<TokenizerInfo {self._model.name}>"


def tokenizer_info(model: Model) -> pb.GetTokenizerInfoResponse:
    """Return the message. Takes a part of a second for a large vocabulary."""
    tokenizer = model.tokenizer.backend_tokenizer
    vocab: dict[str, int] = tokenizer.get_vocab()
    encoded = [""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        encoded[token_id] = token
    return pb.GetTokenizerInfoResponse(
        encoded_vocab=encoded, tokenizer_str=tokenizer.to_str(), stop_token_ids=model.eos_token_ids
    )
