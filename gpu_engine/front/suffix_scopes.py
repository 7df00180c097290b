"""The scope of a request in the suffix index: which answers may draft for it.

A client that the server knows by its bearer token or its certificate has its own scopes, one for each grammar and
one for free text. Requests of unknown clients share the scope of their grammar; free text has none, unless the setting
`draft_index_shared` gives it one. A `cache_salt` divides each scope further. A new scope begins with the words that its
grammar spells out: names of properties and tools, values of `enum` and `const`, choices. Invariant: two requests with
different clients, salts or grammars have different keys. A key is a digest, so no log shows a token. Used on the event
loop. Not responsible for: the answers (see gpu_engine/drafters/suffix_index.py).
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from gpu_engine.api.limits import Limits
from gpu_engine.api.ports import Tokenizer
from gpu_engine.api.request import GrammarKind, GrammarSpec, Params, SuffixScope
from gpu_engine.front.grammar_handles import grammar_id

MAX_SEEDED_CHARS = 64 << 10
"""A longer grammar gives no seeds: reading it would delay the event loop."""
MAX_LITERALS = 64
"""More would delay the event loop: 64 take half a millisecond to tokenise, once for each grammar."""
MAX_LITERAL_CHARS = 128
MAX_SEEDED_SCOPES = 256
"""Scopes whose seeds are remembered; the seeds of others are made again."""


def client_identity(
    metadata: Iterable[tuple[str, str | bytes]], identities: Iterable[bytes] | None, *, checks_tokens: bool
) -> bytes:
    """Return bytes that identify the caller, b"" if the server cannot tell callers apart.

    `metadata` is the call's; its token counts only if the server has checked it. `identities` are the names in a client
    certificate.
    """
    if checks_tokens:
        for key, value in metadata:
            if key == "authorization":
                token = (value.encode() if isinstance(value, str) else value).partition(b" ")[2]
                return b"token\0" + token.strip()
    names = list(identities or ())
    return b"certificate\0" + b"\0".join(names) if names else b""


def client_key(identity: bytes, client_id: str) -> str:
    """Return a short name of a client: its `client_identity` if that is known, else the request's `client_id`.

    "" without either.
    """
    value = identity or client_id.encode()
    return _digest(value).hex() if value else ""


def _digest(value: bytes) -> bytes:
    return hashlib.blake2b(value, digest_size=16).digest()


class SuffixScopes:
    """Makes the scope of each request."""

    def __init__(self, tokenizer: Tokenizer, limits: Limits) -> None:
        self._tokenizer, self._limits = tokenizer, limits
        self._seeds: OrderedDict[str, tuple[tuple[int, ...], ...]] = OrderedDict()
        """The seeds by grammar id; the most recently used grammar is last."""

    def of(self, params: Params, client: bytes) -> SuffixScope | None:
        """Return the scope; None: no earlier answer drafts for the request. `client`: see `client_identity`."""
        speculation, grammar = params.speculation, params.grammar
        if not self._limits.draft_index or not speculation.draft_index or not speculation.num_draft_tokens:
            return None
        if not client and grammar is None and not self._limits.draft_index_shared:
            return None
        name = grammar_id(grammar) if grammar else ""
        key = _digest(client) + _digest(params.scheduling.cache_salt.encode()) + name.encode()
        return SuffixScope(key, self._seeds_of(name, grammar) if grammar else ())

    def _seeds_of(self, name: str, grammar: GrammarSpec) -> tuple[tuple[int, ...], ...]:
        if name not in self._seeds:
            texts = list(dict.fromkeys(islice(literals(grammar), MAX_LITERALS)))
            encoded = self._tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            self._seeds[name] = tuple(tuple(one.ids) for one in encoded if len(one.ids) > 2)
        self._seeds.move_to_end(name)
        while len(self._seeds) > MAX_SEEDED_SCOPES:
            self._seeds.popitem(last=False)
        return self._seeds[name]

    def __repr__(self) -> str:
        return f"<SuffixScopes of {len(self._seeds)} grammars>"


def literals(grammar: GrammarSpec) -> Iterator[str]:
    """Yield the texts that the grammar spells out, as they are in an answer; none for a grammar in a text notation.

    A JSON text that cannot be read yields nothing: the grammar process reports what is wrong with it.
    """
    kinds = (GrammarKind.JSON_SCHEMA, GrammarKind.CHOICE, GrammarKind.STRUCTURAL_TAG, GrammarKind.COMPOSED)
    if grammar.kind not in kinds or len(grammar.source) > MAX_SEEDED_CHARS:
        return
    try:
        value = json.loads(grammar.source)
    except (ValueError, RecursionError):
        return
    if grammar.kind is GrammarKind.CHOICE:
        yield from (choice for choice in value if len(choice) <= MAX_LITERAL_CHARS)
    else:
        yield from _spelled_out(value)


def _spelled_out(schema: Any) -> Iterator[str]:
    """Yield names and values of a JSON Schema or a structural tag, the outermost first."""
    level = [schema]
    while level:
        following: list[Any] = []
        for value in level:
            if isinstance(value, list):
                following += value
            elif isinstance(value, dict):
                yield from _of_object(value)
                following += value.values()
        level = following


def _of_object(value: dict[str, Any]) -> Iterator[str]:
    properties = value.get("properties")
    for name in properties if isinstance(properties, dict) else ():
        if len(name) <= MAX_LITERAL_CHARS:
            yield f", {json.dumps(name)}: "
    constants = [*(value["enum"] if isinstance(value.get("enum"), list) else ()), value.get("const")]
    yield from (
        f" {json.dumps(text)}" for text in constants if isinstance(text, str) and len(text) <= MAX_LITERAL_CHARS
    )
    for key in ("begin", "end"):  # of a structural tag
        if isinstance(text := value.get(key), str) and 0 < len(text) <= MAX_LITERAL_CHARS and _is_unicode(text):
            yield text


def _is_unicode(text: str) -> bool:
    """Return whether a text is free of lone surrogates, which JSON can express and no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
