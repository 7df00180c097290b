"""The digests of a receipt: keyed with the client's nonce, over a request and over the tokens of its answer.

Invariant: every digest of something that a client sent or received is an HMAC-SHA256 whose key is the nonce. The nonce
is in no receipt, so a digest tells nothing to a reader without it, and a reader with nonce and request computes it
again. The claims are plain values, so that readers in any language can do the same.

Not responsible for: who makes a receipt (extensions/receipts/), its signature (signed_statements.py), how two receipts
are compared (cli/receipt_differences.py).
"""

from __future__ import annotations

import hmac
import json
import struct
from collections.abc import Iterable, Mapping
from typing import Any

VERSION = 1
"""Of the claims, and of the rules of this module."""
MIN_NONCE_BYTES, MAX_NONCE_BYTES = 16, 64
LINK_BYTES = 4
"""Bytes of a token's link that a receipt keeps: enough to find the first token that differs."""

CHANGE_NO_TOKEN = frozenset(
    {
        *("request_id", "cache_salt", "priority", "client_id", "speculation"),
        *("sampling.seed", "sampling.n", "sampling.logprobs", "sampling.masked_logprobs"),
        *("sampling.include_stop_str_in_output", "sampling.skip_special_tokens"),
        *(f"response.{name}" for name in ("omit_text", "omit_token_ids", "echo", "prompt_logprobs", "whole")),
        *(f"response.{name}" for name in ("per_field_logprobs", "cumulative", "token_origins", "value_events")),
        *("response.items_of", "response.receipt_nonce"),
    }
)
"""Fields of a request that its digest leaves out: they change no token, or have a claim of their own (the seed). A
field that is not named here is in the digest."""


def keyed(nonce: bytes, label: str, value: Any) -> str:
    """Return 64 hexadecimal digits: the digest of a JSON value, under a label that says what it is."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hmac.digest(nonce, f"{label}\0{text}".encode(), "sha256").hex()


def prompt_digest(nonce: bytes, token_ids: Iterable[int]) -> str:
    """Return the digest of a prompt's token ids."""
    return keyed(nonce, "prompt", list(token_ids))


def request_digest(nonce: bytes, request: Any) -> str:
    """Return the digest of a GenerateRequest, of any generated code, without the fields of `CHANGE_NO_TOKEN`."""
    return keyed(nonce, "request", canonical(request))


def canonical(message: Any, prefix: str = "") -> dict[str, Any]:
    """Return the fields of a message that are set, by name, without those of `CHANGE_NO_TOKEN`: floats as `float.hex`
    writes them, bytes in hexadecimal digits, enums as numbers, the keys of maps as text."""
    fields: dict[str, Any] = {}
    for field, value in message.ListFields():
        name = prefix + field.name
        if name in CHANGE_NO_TOKEN:
            continue
        if isinstance(value, Mapping):
            fields[field.name] = {str(key): _plain(each, name) for key, each in value.items()}
        elif field.is_repeated:
            fields[field.name] = [_plain(each, name) for each in value]
        else:
            fields[field.name] = _plain(value, name)
    # A message whose fields are all left out is the same as none.
    return {name: value for name, value in fields.items() if value != {}} if not prefix else fields


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, bytes):
        return value.hex()
    return value if isinstance(value, bool | int | str) else canonical(value, f"{name}.")


class TokenChain:
    """A link for each token of an answer, each over the link before it: equal links have equal beginnings."""

    def __init__(self, nonce: bytes) -> None:
        self._nonce = nonce
        self._last = hmac.digest(nonce, b"answer\0", "sha256")
        self._links = bytearray()

    def push(self, token_ids: Iterable[int]) -> None:
        """Add tokens."""
        for token_id in token_ids:
            self._last = hmac.digest(self._nonce, self._last + struct.pack("<I", token_id), "sha256")
            self._links += self._last[:LINK_BYTES]

    def __len__(self) -> int:
        return len(self._links) // LINK_BYTES

    @property
    def links(self) -> str:
        """The beginnings of all links, in hexadecimal digits."""
        return self._links.hex()

    @property
    def end(self) -> str:
        """The whole last link, which stands for all tokens."""
        return self._last.hex()

    def __repr__(self) -> str:
        return f"<TokenChain of {len(self)} tokens>"


def first_difference(links: str, others: str) -> int | None:
    """Return the number of the first token, from 0, at which two chains of one nonce differ; None: they are equal."""
    size = 2 * LINK_BYTES
    for at in range(0, max(len(links), len(others)), size):
        if links[at : at + size] != others[at : at + size]:
            return at // size
    return None
