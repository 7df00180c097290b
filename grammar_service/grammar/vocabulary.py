"""The engine's tokenizer as the backends need it: the bytes of tokenizer.json, its size, stop and special tokens.

Invariant: `stop_ids` are sorted, distinct and inside the vocabulary. A special token is never part of an answer's text.
Not responsible for: the bytes of each token (see token_bytes.py).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grammar_service.errors import InvalidField, InvalidGrammar
from grammar_service.grammar.value import Grammar, Kind
from shared_mem.layout import MAX_VOCAB


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The checked content of Configure. Vocabularies with equal digests are equal."""

    tokenizer_json: bytes = field(repr=False)
    size: int
    """The number of columns of the logits, padding included."""
    stop_ids: tuple[int, ...]
    digest: str
    special: dict[int, str] = field(repr=False)
    """Token id -> text of the tokens that the tokenizer marks as special. A stop token may or may not be marked."""

    markers: tuple[int, ...] = ()
    """Added tokens in angle brackets that are not special, such as `<tool_call>`."""
    as_text: bool = False
    """The grammars of this vocabulary are the engine's own, whose markers are text."""

    @property
    def num_words(self) -> int:
        """The number of 32-bit words in a mask row."""
        return (self.size + 31) // 32

    @staticmethod
    def load(tokenizer_json: bytes, size: int, stop_ids: tuple[int, ...]) -> Vocabulary:
        """Check the content of Configure. Raises InvalidField for tokenizer_json, vocab_size or stop_token_ids."""
        document = _document(tokenizer_json)
        if size < 1:
            raise InvalidField("vocab_size", "must be at least 1")
        if size > MAX_VOCAB:
            raise InvalidField("vocab_size", f"{size} is above {MAX_VOCAB}, the most of a segment")
        if not stop_ids:
            raise InvalidField("stop_token_ids", "at least one is required, because otherwise no answer could end")
        for token in stop_ids:
            if token >= size:
                raise InvalidField("stop_token_ids", f"{token} is outside the vocabulary of {size}")
        added = _added_tokens(document)
        special = {t["id"]: t["content"] for t in added if t.get("special") and t["id"] < size}
        markers = tuple(
            t["id"]
            for t in added
            if not t.get("special") and t["id"] < size and t["content"][:1] == "<" and t["content"][-1:] == ">"
        )
        stops = tuple(sorted(set(stop_ids)))
        digest = hashlib.blake2b(tokenizer_json, digest_size=16)
        digest.update(json.dumps([size, stops]).encode())
        return Vocabulary(tokenizer_json, size, stops, digest.hexdigest(), special, markers)

    def opened(self, tokens: tuple[int, ...]) -> Vocabulary:
        """Return the same vocabulary in which `tokens` and `markers` are text. Raises InvalidGrammar for other ids."""
        if strange := [token for token in tokens if token not in self.special]:
            raise InvalidGrammar(f"open_tokens: {strange[0]} is not a special token")
        document = json.loads(self.tokenizer_json)
        for added in document["added_tokens"]:
            added["special"] = bool(added.get("special")) and added["id"] not in tokens
        changed = json.dumps(document, ensure_ascii=False).encode() if tokens else self.tokenizer_json
        return replace(Vocabulary.load(changed, self.size, self.stop_ids), as_text=True)

    def plain_tokens(self) -> NDArray[np.uint8]:
        """Return 1 for each token that is neither special nor a stop token, else 0: uint8 [size]."""
        plain = np.ones(self.size, dtype=np.uint8)
        plain[[*self.special, *self.stop_ids]] = 0
        return plain

    def refuse_special(self, grammar: Grammar) -> None:
        """Raise InvalidGrammar if an EBNF or Lark grammar contains the text of a special token.

        That token could switch the roles of a conversation. In other kinds of grammar the same characters are
        harmless, because no mask ever allows a special token as text.
        """
        if grammar.kind not in (Kind.EBNF, Kind.LARK):
            return
        name = next((text for text in self.special.values() if text and text in grammar.text), None)
        if name is not None:
            raise InvalidGrammar(f"source: names the special token {name!r}; a grammar may describe text only")


def _added_tokens(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the added tokens, each with its id and its content. Raises InvalidField."""
    added = document.get("added_tokens", [])
    if not isinstance(added, list):
        raise InvalidField("tokenizer_json", "added_tokens: is no list")
    for token in added:
        if not isinstance(token, dict) or not isinstance(token.get("content"), str):
            raise InvalidField("tokenizer_json", "added_tokens: a token has no content, or one that is no text")
        if type(token.get("id")) is not int or token["id"] < 0:
            raise InvalidField("tokenizer_json", "added_tokens: the id of a token is no whole number from 0 on")
    return added


def _document(tokenizer_json: bytes) -> dict[str, Any]:
    try:
        document = json.loads(tokenizer_json)
    except ValueError as error:
        raise InvalidField("tokenizer_json", f"is not JSON: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("model"), dict):
        raise InvalidField("tokenizer_json", "is not a tokenizer.json: it has no object `model`")
    return document
