"""The fingerprint of an engine: its weights, and the keys and values that it computes for a fixed prompt.

Invariant: engines with one fingerprint computed the same bits for the fixed prompt. Engines of another device, kernel,
precision or chunking usually round differently, and have another one. Not responsible for: the digest of the weights
(see mover.py).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import replace

from gpu_engine.api.page_transfer import PageFormat
from gpu_engine.api.ports import EngineCore, Model
from gpu_engine.api.request import Request, SamplingParams, Scheduling, TokenEvent
from gpu_engine.api.transfer_config import PROBE_TOKENS


async def identify(engine: EngineCore, model: Model) -> PageFormat:
    """Return the format of a running engine's pages, with its fingerprint. Prefills the fixed prompt.

    The pages are read one by one: a piece is ordered by layers, so the bytes of larger pieces would depend on how many
    pages were ready at each read.
    """
    form, digest = engine.pages.form, hashlib.sha256()
    digest.update(form.fingerprint.encode())
    count = max(PROBE_TOKENS, form.page_size)
    vocab_size = min(model.vocab_size, model.tokenizer.backend_tokenizer.get_vocab_size())
    request = prefill_request([at * vocab_size // count for at in range(count)], "\0fingerprint", "fingerprint")
    engine.submit(request)
    try:
        for at in range(-(-count // form.page_size)):
            piece = await asyncio.wrap_future(engine.pages.read(request, at, most=1))
            digest.update(bytes(piece.data))
    finally:
        engine.drop(request)
    return replace(form, fingerprint=digest.hexdigest())


def prefill_request(token_ids: Sequence[int], cache_salt: str, request_id: str) -> Request:
    """Return the request of a sequence that prefills whole pages of tokens, and never decodes.

    A sequence prefills all tokens but its last one, hence one more, which is never read.
    """
    return Request(
        request_id=request_id,
        prompt_ids=[*token_ids, token_ids[-1]],
        sampling=SamplingParams(max_tokens=1, seed=0, temperature=0.0),
        scheduling=Scheduling(cache_salt=cache_salt),
        sink=_ignore,
        prefill_only=True,
    )


def _ignore(event: TokenEvent) -> None:
    """The end of the sequence reaches the reader of its pages."""
