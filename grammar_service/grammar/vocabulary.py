"""The engine's tokenizer as the backends need it: bytes of tokenizer.json, size, stop and special tokens.

Invariant: `stop_ids` are sorted, distinct and inside the vocabulary; a special token is never part of an answer's text.
It reads tokenizer.json with `json` alone: no transformers, no tokenizers.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from grammar_service.errors import InvalidField, InvalidGrammar
from grammar_service.grammar.value import Grammar, Kind


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What Configure carried, checked. Equal digests are equal vocabularies."""

    tokenizer_json: bytes = field(repr=False)
    size: int
    """Columns of the logits, padding included."""
    stop_ids: tuple[int, ...]
    digest: str
    special: dict[int, str] = field(repr=False)
    """Tokens that the tokenizer marks as special: id -> text. Stop tokens are in it only if they are marked."""

    @property
    def num_words(self) -> int:
        """32-bit words of a mask row."""
        return (self.size + 31) // 32

    @staticmethod
    def load(tokenizer_json: bytes, size: int, stop_ids: tuple[int, ...]) -> Vocabulary:
        """Check the content of Configure.

        Raises InvalidField naming tokenizer_json, vocab_size or stop_token_ids.
        """
        document = _document(tokenizer_json)
        if size < 1:
            raise InvalidField("vocab_size", "must be at least 1")
        if not stop_ids:
            raise InvalidField("stop_token_ids", "at least one is required, or no answer could end")
        for token in stop_ids:
            if token >= size:
                raise InvalidField("stop_token_ids", f"{token} is outside the vocabulary of {size}")
        special = {
            int(t["id"]): str(t["content"])
            for t in document.get("added_tokens", ())
            if t.get("special") and t["id"] < size
        }
        stops = tuple(sorted(set(stop_ids)))
        digest = hashlib.blake2b(tokenizer_json, digest_size=16)
        digest.update(json.dumps([size, stops]).encode())
        return Vocabulary(tokenizer_json, size, stops, digest.hexdigest(), special)

    def refuse_special(self, grammar: Grammar) -> None:
        """Raise InvalidGrammar when an EBNF or Lark grammar names a special token by its text.

        Such a name is a switch of roles in the hands of a user. Other kinds describe text, and the masks never let a
        special token stand for text, so there the same characters are harmless.
        """
        if grammar.kind not in (Kind.EBNF, Kind.LARK):
            return
        name = next((text for text in self.special.values() if text and text in grammar.text), None)
        if name is not None:
            raise InvalidGrammar(f"source: names the special token {name!r}; a grammar may describe text only")


def _document(tokenizer_json: bytes) -> dict[str, Any]:
    try:
        document = json.loads(tokenizer_json)
    except ValueError as error:
        raise InvalidField("tokenizer_json", f"is not JSON: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("model"), dict):
        raise InvalidField("tokenizer_json", "is not a tokenizer.json: it has no object `model`")
    return document
