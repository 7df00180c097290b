"""The texts of tokens, for log-probabilities and origins: the engine's answers name tokens only by id.

Invariant: an engine is asked once for each token; what it said is kept for as long as it serves that model. Not
responsible for: the texts themselves (the engine's Detokenize).
"""

from __future__ import annotations

from collections.abc import Iterable

import grpc

from http_gateway.engines.engine import CALL_TIMEOUT_S, Engine, Metadata
from http_gateway.wire.errors import from_grpc
from protos.engine.v1 import engine_pb2 as pb

UNREADABLE = "\N{REPLACEMENT CHARACTER}"
"""In the text of a token that is a part of a character."""


async def load(engine: Engine, metadata: Metadata, ids: Iterable[int]) -> None:
    """Read the texts of the ids that `engine.texts` lacks. Raises ApiError."""
    missing = sorted(set(ids) - engine.texts.keys())
    if not missing:
        return
    request = pb.DetokenizeRequest(token_ids=missing, with_texts=True)
    try:
        response = await engine.stub.Detokenize(request, timeout=CALL_TIMEOUT_S, metadata=[*metadata])
    except grpc.aio.AioRpcError as error:
        raise from_grpc(error) from error
    engine.texts.update(zip(missing, response.texts, strict=True))


def ids_of(response: pb.GenerateResponse) -> set[int]:
    """Return every token that the log-probabilities of a response, or its tokens' origins, name."""
    if not (response.logprobs or response.prompt_logprobs or response.token_origins):
        return set()
    entries = [*response.logprobs, *response.prompt_logprobs]
    return {*response.token_ids, *response.prompt_token_ids, *(top.token_id for entry in entries for top in entry.top)}


def bytes_of(text: str) -> list[int] | None:
    """Return the bytes of a token's text; None where they are not known."""
    return None if UNREADABLE in text else list(text.encode())
