"""A toy matcher over a finite set of texts, and a tokenizer.json of a few hundred tokens.

The language is a finite set of texts in tokens; the token STOP ends a complete text. A row contains exactly the tokens
after which a text is still possible. The matcher records its calls and fails at the positions that a test chooses.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from grammar_service.backends.backend import Filled, MatcherFailed, Rows
from shared_mem.chains import SpecialWords
from shared_mem.channel import GrammarEnd

STOP = 9
VOCAB = 70
"""Not a multiple of 32, so the last word of a row has unused bits."""


class ToyMatcher:
    """Accepts one of `texts` and then STOP. `fail_at` contains the positions at which `fill` raises MatcherFailed."""

    def __init__(self, texts: Iterable[Sequence[int]], fail_at: Iterable[int] = ()) -> None:
        self.texts = [tuple(text) for text in texts]
        self.fail_at = frozenset(fail_at)
        self.taken: list[int] = []
        self.fills = 0
        self.rollbacks: list[int] = []

    @property
    def terminated(self) -> bool:
        return bool(self.taken) and self.taken[-1] == STOP

    def legal(self) -> set[int]:
        at, prefix = len(self.taken), tuple(self.taken)
        possible = [text for text in self.texts if text[:at] == prefix]
        return {text[at] if at < len(text) else STOP for text in possible}

    def accept(self, token: int) -> bool:
        if self.terminated or token not in self.legal():
            return False
        self.taken.append(token)
        return True

    def jump_forward_tokens(self, limit: int) -> tuple[int, ...]:
        if len(self.taken) in self.fail_at:
            raise MatcherFailed("limit")
        twin = ToyMatcher(self.texts)
        twin.taken = list(self.taken)
        while len(twin.taken) < len(self.taken) + limit and len(legal := twin.legal()) == 1:
            twin.taken += legal
        return tuple(twin.taken[len(self.taken) :])

    def copy(self) -> ToyMatcher:
        twin = ToyMatcher(self.texts, self.fail_at)
        twin.taken = list(self.taken)
        return twin

    def rollback(self, count: int) -> None:
        if count > len(self.taken):
            raise MatcherFailed(f"{count} of {len(self.taken)}")
        self.rollbacks.append(count)
        del self.taken[len(self.taken) - count :]

    def fill(self, rows: Rows, index: int) -> None:
        if self.terminated:
            raise AssertionError("filled after the end")
        self.fills += 1
        if len(self.taken) in self.fail_at:
            raise MatcherFailed("limit")
        rows.words[index] = row_of(self.legal(), rows.words.shape[1])


class Watched(GrammarEnd):
    """Finds the leader overdue, by the deadline of its worker, only while `hurries` is set."""

    hurries = True

    def overdue(self, limit_ns: int, timeout_s: float) -> bool:
        return super().overdue(limit_ns if self.hurries else 3600 * 10**9, timeout_s)


class ToyFiller:
    """A chain filler that uses the methods of each matcher, and rolls the drafts back."""

    threaded = True

    def __init__(self) -> None:
        none = np.zeros(0, dtype=np.uint32)
        self.special = SpecialWords(np.zeros(0, dtype=np.int32), none, none)
        self.plain = np.ones(VOCAB, dtype=np.uint8)
        self.plain[STOP] = 0
        self.fills = 0

    def may_follow(self, matcher: Any, tokens: Sequence[int]) -> bool:
        taken = self.accept(matcher, tokens)
        matcher.rollback(taken)
        return taken == len(tokens)

    def accept(self, matcher: Any, tokens: Sequence[int]) -> int:
        return next((i for i, token in enumerate(tokens) if not matcher.accept(token)), len(tokens))

    def accept_each(self, matchers: Sequence[Any], tokens: Sequence[list[int]]) -> list[int]:
        return [self.accept(matcher, new) for matcher, new in zip(matchers, tokens, strict=True)]

    def fill(
        self, matchers: Sequence[Any], drafts: Sequence[list[int]], rows: Any, stride: int, threads: int
    ) -> Filled:
        self.fills += 1
        failed = []
        for i, (matcher, tokens) in enumerate(zip(matchers, drafts, strict=True)):
            view, passed = Rows(rows), 0
            try:
                matcher.fill(view, i * stride)
                while passed < len(tokens) and matcher.accept(tokens[passed]):
                    passed += 1
                    matcher.fill(view, i * stride + passed)
                matcher.rollback(passed)
            except MatcherFailed:
                failed.append(i)
        return Filled(failed, [])


def row_of(legal: Iterable[int], words: int) -> Any:
    """Return a mask row of `words` words that contains the tokens `legal`."""
    bits = np.zeros(words * 32, dtype=bool)
    bits[list(legal)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def tokens_in(row: Any) -> set[int]:
    """Return the tokens of a mask row."""
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


SPECIAL = ("<|end|>", "<|eot|>", "<|start|>")
"""Tokens 0, 1 and 2. Tokens 0 and 1 are stop tokens."""

STOPS = (0, 1)
PADDED = 301
"""Columns of the logits in the tests: more than there are tokens, and not a multiple of 32."""

_MERGES = ['{ "', '" :', "t r", "tr u", "tru e", "Ġ Ġ", "a b", "ab c", "< |", "e n", "en d", "| >", '" ,', '", "']


def byte_characters() -> list[str]:
    """Return the characters that represent the bytes 0..255 in a byte-level tokenizer."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + moved.index(byte)) for byte in range(256)]


def tokenizer_json() -> bytes:
    """Return a byte-level BPE tokenizer of 3 special tokens, 256 bytes and a few merges."""
    texts = [*SPECIAL, *byte_characters(), *(merge.replace(" ", "") for merge in _MERGES)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    added = [
        {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        | {"special": True}
        for i, text in enumerate(SPECIAL)
    ]
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": {text: i for i, text in enumerate(texts)},
        "merges": _MERGES,
    }
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }
    return json.dumps(document).encode()


def spell(text: str) -> list[int]:
    """Return `text` in byte tokens, which are legal wherever more than one text may follow."""
    return [len(SPECIAL) + byte for byte in text.encode()]
