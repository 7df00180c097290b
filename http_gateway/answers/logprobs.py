"""Log-probabilities in the shapes of chat, of completions, and of vLLM's prompt_logprobs.

Invariant: every token named here is in `texts` (see texts.py).

Not responsible for: their values (the engine).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from http_gateway.answers.texts import bytes_of
from protos.engine.v1 import engine_pb2 as pb

Texts = Mapping[int, str]


def chat_logprobs(ids: Iterable[int], entries: Iterable[pb.TokenLogprobs], texts: Texts) -> list[dict[str, Any]]:
    """Return `choice.logprobs.content` of a chat answer. `entries` has one entry for each token in `ids`."""
    return [
        _chat_token(texts[token], entry.logprob)
        | {"top_logprobs": [_chat_token(texts[top.token_id], top.logprob) for top in entry.top]}
        for token, entry in zip(ids, entries, strict=True)
    ]


def _chat_token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": bytes_of(text)}


def completion_logprobs(
    ids: Sequence[int], entries: Sequence[pb.TokenLogprobs], texts: Texts, offset: int, *, at_start: bool
) -> tuple[dict[str, Any], int]:
    """Return `choice.logprobs` of completions, and the offset after its last token.

    Args:
        ids: the tokens.
        entries: one for each token.
        texts: the text of each token.
        offset: characters of the choice's text before the first token.
        at_start: the first token is the prompt's first, which has no log-probability.
    """
    offsets = []
    for token in ids:
        offsets.append(offset)
        offset += len(texts[token])
    known = [None if at_start and i == 0 else entry for i, entry in enumerate(entries)]
    return {
        "tokens": [texts[token] for token in ids],
        "token_logprobs": [entry and entry.logprob for entry in known],
        "top_logprobs": [
            entry and ({texts[token]: entry.logprob} | {texts[top.token_id]: top.logprob for top in entry.top})
            for token, entry in zip(ids, known, strict=True)
        ],
        "text_offset": offsets,
    }, offset


def prompt_logprobs(ids: Sequence[int], entries: Sequence[pb.TokenLogprobs], texts: Texts) -> list[Any]:
    """Return vLLM's `prompt_logprobs`: for each token of the prompt its alternatives by id, null for the first."""
    rows: list[Any] = []
    for place, (token, entry) in enumerate(zip(ids, entries, strict=True)):
        if place == 0:
            rows.append(None)
            continue
        ranked = {
            top.token_id: {"logprob": top.logprob, "rank": rank, "decoded_token": texts[top.token_id]}
            for rank, top in enumerate(entry.top, 1)
        }
        ranked.setdefault(token, {"logprob": entry.logprob, "rank": None, "decoded_token": texts[token]})
        rows.append({str(id_): value for id_, value in ranked.items()})
    return rows
