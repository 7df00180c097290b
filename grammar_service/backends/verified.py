"""Matchers that check the rest of a JSON Schema where a value ends, for parts that no grammar can say.

    fill      the library's row, without the tokens after which the answer could not become valid any more
    accept    a stop token only after a valid answer

A token is looked at where it ends a value: a string, an array, an object, or a value before a comma. The value so far,
its open brackets closed, goes to the validator, but for strings of which the schema says no more than the grammar
(see last_string.py). An error there counts if no continuation can undo it. A row that would have nothing but white
space left is empty: the same tokens are lost after it.

An answer without a legal token may go back over some of its tokens. `find_way_back` says how far, and which text is
*dead* from then on: a matcher that avoids it has no token after which the answer, without its white space, begins with
it. The text is dead up to the token that began the last value for which there is another choice, so that the next
attempt differs in more than the end of a word.
Invariant: a row depends only on the accepted tokens, so drafts, rollbacks and rebuilt matchers see the same rows. It
loses tokens and never gains any. A stop token is legal exactly where the answer is complete and valid; where that
leaves no token, the row is empty and the request ends with GRAMMAR_INVALID.
Not responsible for: the validator (see json_schema/validator.py), which parts need it (see the backends).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from grammar_service.backends.backend import Compiled, Matcher, MatcherFailed, Rows
from grammar_service.backends.json_schema.places import SPACE, Place, compacted, goes_on, string_start
from grammar_service.backends.json_schema.unenforced import UNVERIFIED
from grammar_service.backends.json_schema.validator import Validator
from grammar_service.backends.last_string import LastString
from grammar_service.backends.reasoning import ReasoningCompiled, ReasoningMatcher
from grammar_service.backends.value_tokens import Part, ValueTokens, take_out
from grammar_service.grammar.mask_rows import token_ids

MAX_CHECKS = 24
"""Values that the validator checks for one row. Tokens after them stay, and are checked where the answer ends."""
MAX_TEXT = 16 << 10
"""Bytes of an answer up to which values inside it are checked; its end is checked at any length."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What the matchers of a grammar share."""

    validator: Validator
    tokens: ValueTokens


class WayBack(NamedTuple):
    """How an answer without a legal token goes on."""

    num_tokens: int
    """Its tokens that stay legal."""
    dead: tuple[bytes, ...]
    """Texts to be avoided from then on, without white space between values."""


class VerifiedCompiled:
    """A grammar whose answers are verified.

    Args:
        inner: the library's.
        verification: the schema's.
        dead: texts that no answer begins with.
    """

    def __init__(self, inner: Compiled, verification: Verification, dead: tuple[bytes, ...] = ()) -> None:
        self._inner, self.verification, self._dead = inner, verification, dead
        self.warnings = tuple(
            f"verified: {line.removeprefix(UNVERIFIED)}" if line.startswith(("not enforced by ", UNVERIFIED)) else line
            for line in inner.warnings
        )
        self.memory_bytes = inner.memory_bytes + (256 << 10)
        """With an estimate of the validator."""

    def avoiding(self, dead: tuple[bytes, ...]) -> VerifiedCompiled:
        """Return the same grammar, whose answers begin with none of the texts `dead`."""
        return VerifiedCompiled(self._inner, self.verification, dead)

    def matcher(self) -> VerifiedMatcher:
        """Return a matcher at the start of an answer."""
        return VerifiedMatcher(self._inner.matcher(), self.verification, self._dead)


class VerifiedMatcher:
    """The library's matcher, the text of the answer, and the place in it after each token.

    It has no chain filler: its rows are filled one by one.
    """

    def __init__(self, inner: Matcher, verification: Verification, dead: tuple[bytes, ...] = ()) -> None:
        self._inner, self._verification = inner, verification
        self._validator, self._tokens = verification.validator, verification.tokens
        self.dead = dead
        """Texts that no answer begins with, without white space between values."""
        self._text = bytearray()
        self._compact = bytearray()
        """The text without white space between values."""
        self._before: list[tuple[int, int, Place]] = []
        """Lengths of both texts, and the place, before each accepted token."""
        self._place = Place()
        self._string: LastString | None = None
        """The check of the string that was open in the last row with an open string."""

    @property
    def terminated(self) -> bool:
        """Whether a stop token was accepted."""
        return self._inner.terminated

    def accept(self, token: int) -> bool:
        """Advance over `token`; see `Matcher.accept`. A stop token is illegal after an answer that is not valid."""
        if not self._inner.accept(token):
            return False
        spelled = self._tokens.texts[token]
        if token in self._tokens.stops:
            spelled = b""
            if not self._validator.is_valid(bytes(self._text)):
                self._inner.rollback(1)
                return False
        self._before.append((len(self._text), len(self._compact), self._place))
        self._text += spelled
        compact, self._place = compacted(self._place, spelled)
        self._compact += compact
        return True

    def rollback(self, count: int) -> None:
        """Take back `count` tokens; see `Matcher.rollback`."""
        if count:
            self._inner.rollback(count)
            length, compact, self._place = self._before[-count]
            del self._before[-count:], self._text[length:], self._compact[compact:]

    def copy(self) -> VerifiedMatcher:
        """Return an independent matcher in the same state."""
        twin = VerifiedMatcher(self._inner.copy(), self._verification, self.dead)
        twin._text, twin._compact = bytearray(self._text), bytearray(self._compact)
        twin._before, twin._place = list(self._before), self._place
        return twin

    def fill(self, rows: Rows, index: int) -> None:
        """Write the library's row without the tokens that would lose the answer; see `Matcher.fill`."""
        self._inner.fill(rows, index)
        tokens = self._tokens
        words = rows.words[index, : len(tokens.ending)]
        loses = bool((words & tokens.stop_words).any()) and not self._validator.is_valid(bytes(self._text))
        if loses:
            words &= ~tokens.stop_words
        if self.dead and (avoided := self._avoided(words)):
            loses = take_out(words, avoided)
        if (len(self._text) <= MAX_TEXT or len(self._place.brackets) <= 1) and (lost := self._lost(words)):
            loses = take_out(words, lost)
        if loses and not self._place.in_string and not (words & ~tokens.space).any():
            words[:] = 0

    def _avoided(self, words: NDArray[np.int32]) -> list[int]:
        """Return the tokens of a row after which the answer begins with a dead text."""
        compact, texts, found = bytes(self._compact), self._tokens.texts, list[int]()
        for dead in self.dead:
            # A token has no more bytes without its white space than with it.
            if not dead.startswith(compact) or len(dead) - len(compact) > self._tokens.longest:
                continue
            rest = dead[len(compact) :]
            first = rest[:1] if self._place.in_string else rest[:1] + SPACE
            for token in token_ids(words, 32 * len(words)):
                text = texts[token]
                if not rest or (text[:1] in first and compacted(self._place, text)[0].startswith(rest)):
                    found.append(token)
        return found

    def _lost(self, words: NDArray[np.int32]) -> list[int]:
        """Return the tokens of a row after which, as far as is known, no text makes the answer valid."""
        ends = self._tokens.ends_at(self._place, words)
        string = self._last_string() if ends.of_string else None
        head = b"" if string is None else bytes(self._text[len(string.before) :])
        known = {} if string is None else string.known(head, ends.of_string)
        groups = ends.groups if string is None or string.asks or any(known.values()) else ends.beyond
        lost, num_checks = list[int](), 0
        for parts, tokens in groups:
            for at in parts:
                if at not in known:
                    if num_checks == MAX_CHECKS:
                        break
                    num_checks += 1
                    part = ends.parts[at]
                    ended = string if part.ends_string else None
                    known[at] = self._is_lost(part) if ended is None else ended.is_lost(head + part.text)
                if known[at]:
                    lost += tokens
                    break
        return lost

    def _last_string(self) -> LastString | None:
        """Return what checks the ends of the string that is open; None: the string is the answer."""
        if not self._place.brackets:
            return None
        start = string_start(self._text)
        before = bytes(self._text[:start])
        if self._string is None or self._string.before != before:
            self._string = LastString(self._validator, before, self._place.brackets[::-1])
        return self._string

    def _is_lost(self, part: Part) -> bool:
        text, brackets = bytes(self._text) + part.text, part.place.brackets
        if not brackets:
            return not self._validator.is_valid(text)
        return self._validator.is_lost(text + brackets[::-1], len(brackets))

    def way_back(self, most: int) -> int:
        """Go back over tokens of an answer that has no legal token here, to where there is another choice.

        Returns how many tokens that are, at most `most`; then `dead` has the texts to be avoided. 0: there is no other
        choice among them. The matcher must not be used afterwards. Raises MatcherFailed.
        """
        scratch = Rows(np.zeros((1, len(self._tokens.ending)), dtype=np.int32))
        for taken in range(1, min(most, len(self._before)) + 1):
            text, compact = bytes(self._text[self._before[-1][0] :]), bytes(self._compact)
            self.rollback(1)
            if len(compact) == len(self._compact) or goes_on(self._place, bytes(self._compact), text):
                continue
            self.dead = (*(dead for dead in self.dead if not dead.startswith(compact)), compact)
            self.fill(scratch, 0)
            if scratch.words.any():
                return taken
        return 0

    def jump_forward_tokens(self, limit: int) -> tuple[int, ...]:
        """Return the library's tokens; see `Matcher.jump_forward_tokens`. A row may have none of them."""
        return self._inner.jump_forward_tokens(limit)

    def num_jump_forward_bytes(self) -> int:
        """Return what the library returns."""
        return self._inner.num_jump_forward_bytes()

    def __repr__(self) -> str:
        return f"<VerifiedMatcher {len(self._text)} bytes of {self._inner!r}>"


def is_verified(compiled: Compiled | ReasoningCompiled) -> bool:
    """Return whether the answers of a grammar, after a reasoning or not, are verified."""
    return isinstance(compiled.answer if isinstance(compiled, ReasoningCompiled) else compiled, VerifiedCompiled)


def avoiding(compiled: Compiled, dead: Sequence[bytes]) -> Compiled:
    """Return the grammar with answers that begin with none of the texts `dead`; as it is if they are not verified."""
    if isinstance(compiled, ReasoningCompiled):
        return ReasoningCompiled(avoiding(compiled.answer, dead), compiled.rows)
    return compiled.avoiding(tuple(dead)) if dead and isinstance(compiled, VerifiedCompiled) else compiled


def find_way_back(new_matcher: Callable[[], Matcher], committed: Sequence[int], first: int) -> WayBack | None:
    """Return how an answer whose tokens `committed` have no legal token after them goes on.

    Args:
        new_matcher: returns a matcher at the start of the answer, which avoids the texts that are dead so far.
        committed: the tokens, including those of a reasoning phase.
        first: the number of committed tokens that must stay.

    None: there is no other choice, or the answer is not verified. Raises MatcherFailed when a token is illegal.
    """
    matcher = new_matcher()
    for at, token in enumerate(committed):
        if not matcher.accept(token):
            raise MatcherFailed(f"token {token} at {at} does not fit the grammar")
    answer = matcher.answer_alone(0) if isinstance(matcher, ReasoningMatcher) else matcher
    if not isinstance(answer, VerifiedMatcher):
        return None
    taken = answer.way_back(len(committed) - first)
    return WayBack(len(committed) - taken, answer.dead) if taken else None
