"""Matchers that check the rest of a JSON Schema where a value ends, for parts that no grammar can say.

    fill      the library's row, without the tokens behind which the answer could not become valid any more
    accept    a stop token only behind a valid answer

A token is looked at where it ends a value: a string, an array, an object, or a value before a comma. The value so far,
its open brackets closed, goes to the validator. An error there counts if no continuation can undo it.
Invariant: a row depends on the accepted tokens alone, so drafts, rollbacks and rebuilt matchers see the same rows. It
loses tokens and never gains any. A stop token is legal exactly where the answer is complete and valid; where that
leaves no token, the row is empty and the request ends with GRAMMAR_INVALID.
Not responsible for: the validator (see json_schema/validator.py), which parts need it (see the backends).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from grammar_service.backends.backend import Compiled, Matcher, Rows
from grammar_service.backends.json_schema.validator import Validator
from grammar_service.grammar.token_bytes import TokenBytes
from grammar_service.grammar.vocabulary import Vocabulary

MAX_CHECKS = 24
"""Values that are checked for one row. Tokens behind them stay, and are checked again where the answer ends."""
MAX_TEXT = 16 << 10
"""Bytes of an answer up to which values inside it are checked; its end is checked at any length."""

_QUOTE, _BACKSLASH, _COMMA = b'"\\,'
_OPEN, _CLOSE = b"{[", b"}]"
_ENDS = frozenset(b'"},]')


class _Place(NamedTuple):
    """The place in a JSON text behind some of its bytes."""

    brackets: bytes = b""
    """Closing brackets of what is open, the outermost first."""
    in_string: bool = False
    escaped: bool = False
    is_name: bool = False
    """The string that is open, or was last, is a member's name."""
    previous: int = 0
    """The last byte outside of strings that is no white space."""


def _behind(place: _Place, byte: int) -> _Place:
    brackets, in_string, escaped, _, previous = place
    if in_string:
        if escaped:
            return place._replace(escaped=False)
        if byte == _BACKSLASH:
            return place._replace(escaped=True)
        return place._replace(in_string=False, previous=byte) if byte == _QUOTE else place
    if byte == _QUOTE:
        name = brackets[-1:] == b"}" and previous in b"{,"
        return _Place(brackets, in_string=True, is_name=name, previous=byte)
    if byte in _OPEN:
        return _Place(brackets + (b"}" if byte == _OPEN[0] else b"]"), previous=byte)
    if byte in _CLOSE:
        return _Place(brackets[:-1], previous=byte)
    return place if byte in b" \t\r\n" else place._replace(previous=byte)


def _ends(place: _Place, text: bytes) -> Iterator[tuple[int, _Place]]:
    """Yield (length, place) for each part of `text`, which follows at `place`, behind which a value is complete."""
    for at, byte in enumerate(text):
        before, place = place, _behind(place, byte)
        if byte not in _ENDS or before.escaped:
            continue
        if byte == _QUOTE:
            if before.in_string and not place.is_name:
                yield at + 1, place
        elif not before.in_string:
            # Before a comma or a bracket a number or a word ends.
            if byte == _COMMA:
                yield at, before
            else:
                yield at + 1, place


@dataclass(frozen=True, slots=True)
class Verification:
    """What the matchers of a grammar share."""

    validator: Validator
    tokens: TokenBytes
    stops: frozenset[int]
    ending: NDArray[np.int32]
    """[W] bits of the tokens with a byte behind which a value may be complete."""
    quoting: NDArray[np.int32]
    """[W] bits of the tokens with a quote, of which one ends a string."""
    stop_words: NDArray[np.int32]
    """[W] bits of the stop tokens."""

    @staticmethod
    def of(text: str, vocabulary: Vocabulary) -> Verification:
        """Return the verification of answers to the schema `text`. Raises InvalidGrammar."""
        tokens = TokenBytes.of(vocabulary)
        ending = [token for token, spelled in enumerate(tokens.texts) if not _ENDS.isdisjoint(spelled)]
        quoting = [token for token in ending if _QUOTE in tokens.texts[token]]
        return Verification(
            Validator(text),
            tokens,
            frozenset(vocabulary.stop_ids),
            _words(ending, vocabulary.num_words),
            _words(quoting, vocabulary.num_words),
            _words(list(vocabulary.stop_ids), vocabulary.num_words),
        )


def _words(tokens: list[int], num_words: int) -> NDArray[np.int32]:
    bits = np.zeros(num_words * 32, dtype=bool)
    bits[tokens] = True
    words: NDArray[np.int32] = np.packbits(bits, bitorder="little").view(np.int32)
    return words


def _token_ids(words: NDArray[np.int32]) -> list[int]:
    found: list[int] = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
    return found


class VerifiedCompiled:
    """A grammar whose answers are verified."""

    def __init__(self, inner: Compiled, verification: Verification) -> None:
        self._inner, self._verification = inner, verification
        self.warnings = tuple(
            f"verified: {line}" if line.startswith("not enforced by ") else line for line in inner.warnings
        )
        self.memory_bytes = inner.memory_bytes + (256 << 10)
        """With an estimate of the validator and the two rows."""

    def matcher(self) -> VerifiedMatcher:
        """Return a matcher at the start of an answer."""
        return VerifiedMatcher(self._inner.matcher(), self._verification)


class VerifiedMatcher:
    """The library's matcher, the text of the answer, and the place in it behind each token.

    It has no chain filler: its rows are filled one by one.
    """

    def __init__(self, inner: Matcher, verification: Verification) -> None:
        self._inner, self._shared = inner, verification
        self._text = bytearray()
        self._before: list[tuple[int, _Place]] = []
        """Length of the text and place, before each accepted token."""
        self._place = _Place()

    @property
    def terminated(self) -> bool:
        """Whether a stop token was accepted."""
        return self._inner.terminated

    def accept(self, token: int) -> bool:
        """Advance over `token`; see `Matcher.accept`. A stop token is illegal behind an answer that is not valid."""
        if not self._inner.accept(token):
            return False
        if token in self._shared.stops:
            if not self._shared.validator.is_valid(bytes(self._text)):
                self._inner.rollback(1)
                return False
            self._before.append((len(self._text), self._place))
            return True
        self._before.append((len(self._text), self._place))
        spelled = self._shared.tokens.texts[token]
        self._text += spelled
        for byte in spelled:
            self._place = _behind(self._place, byte)
        return True

    def rollback(self, count: int) -> None:
        """Take back `count` tokens; see `Matcher.rollback`."""
        if count:
            self._inner.rollback(count)
            length, self._place = self._before[-count]
            del self._before[-count:], self._text[length:]

    def copy(self) -> VerifiedMatcher:
        """Return an independent matcher in the same state."""
        twin = VerifiedMatcher(self._inner.copy(), self._shared)
        twin._text, twin._before, twin._place = bytearray(self._text), list(self._before), self._place
        return twin

    def fill(self, rows: Rows, index: int) -> None:
        """Write the library's row without the tokens that would lose the answer; see `Matcher.fill`."""
        self._inner.fill(rows, index)
        words = rows.words[index, : len(self._shared.ending)]
        if (words & self._shared.stop_words).any() and not self._shared.validator.is_valid(bytes(self._text)):
            words &= ~self._shared.stop_words
        if len(self._text) > MAX_TEXT and len(self._place.brackets) > 1:
            return
        candidates = _token_ids(words & (self._shared.quoting if self._place.in_string else self._shared.ending))
        if candidates:
            words &= ~_words(self._lost(candidates), len(words))

    def _lost(self, candidates: list[int]) -> list[int]:
        """Return the tokens of `candidates` behind which no text makes the answer valid, as far as this is seen."""
        texts = self._shared.tokens.texts
        known: dict[bytes, bool] = {}
        lost = []
        for token in sorted(candidates, key=lambda token: len(texts[token])):
            for length, place in _ends(self._place, texts[token]):
                part = texts[token][:length]
                if part not in known:
                    if len(known) >= MAX_CHECKS:
                        break
                    known[part] = self._is_lost(part, place)
                if known[part]:
                    lost.append(token)
                    break
        return lost

    def _is_lost(self, part: bytes, place: _Place) -> bool:
        text = bytes(self._text) + part
        if not place.brackets:
            return not self._shared.validator.is_valid(text)
        return self._shared.validator.is_lost(text + place.brackets[::-1], len(place.brackets))

    def jump_forward_tokens(self, limit: int) -> tuple[int, ...]:
        """Return the library's tokens; see `Matcher.jump_forward_tokens`. A row may have none of them."""
        return self._inner.jump_forward_tokens(limit)

    def num_jump_forward_bytes(self) -> int:
        """Return what the library returns."""
        return self._inner.num_jump_forward_bytes()

    def __repr__(self) -> str:
        return f"<VerifiedMatcher {len(self._text)} bytes of {self._inner!r}>"
