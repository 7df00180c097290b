"""A phase of free text before an answer, in which the model thinks: its markers, its budget, and the answer after it.

    BEGIN       the marker `begin`, or the answer at once       only where the prompt did not end with the marker
    REASONING   any text, up to the first `end`                 no special token, no stop token
    GAP         at most MAX_NEWLINES newlines, or the answer
    ANSWER      the inner grammar

Everything is counted in tokens and bytes here, and no library sees the phase, so it is the same on every backend, and
rolls back as any matcher does.
Invariant: a row depends only on the tokens before it and on the budget, never on drafts. The end of the phase falls on
the end of a token, newlines aside: a token with other text after `end` is illegal.
Not responsible for: the answer itself, the budget's default (see completion/budget.py).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from grammar_service.backends.backend import Compiled, Matcher, Rows
from grammar_service.errors import InvalidGrammar
from grammar_service.grammar.mask_rows import Words
from grammar_service.grammar.token_bytes import TokenBytes
from grammar_service.grammar.vocabulary import Vocabulary

MAX_NEWLINES = 2
"""Newlines between `end` and the answer, as models write them."""


@dataclass(frozen=True, slots=True)
class ReasoningSpec:
    """The reasoning of a composed grammar."""

    begin: bytes
    end: bytes
    is_open: bool
    """The prompt ended with `begin`."""
    max_tokens: int | None
    """Most tokens of the phase, its markers included; None: no limit."""

    @staticmethod
    def parse(document: Any) -> ReasoningSpec:
        """Return the value of the member `reasoning`. Raises InvalidGrammar."""
        match document:
            case {"begin": str(begin), "end": str(end), "open": bool(is_open), "max_tokens": int() | None as most} if (
                begin and end
            ):
                return ReasoningSpec(begin.encode(), end.encode(), is_open, most)
        raise InvalidGrammar("reasoning: must have begin, end, open and max_tokens")


def ways_out(tokens: TokenBytes, end: bytes) -> list[tuple[int, ...]]:
    """Return, by the bytes of `end` that are there, the tokens that complete it. Raises InvalidGrammar."""
    rests = [tokens.spell(end[at:]) for at in range(len(end))]
    if any(rest is None for rest in rests):
        raise InvalidGrammar(f"reasoning.end: {end.decode()!r} cannot be spelled in the model's tokens")
    return [rest or () for rest in rests]


class MarkerRows:
    """The mask rows of the phase, by how much of a marker was matched. Immutable except for its cache.

    Made in one pass over the vocabulary, 0.1 s for a large one; a row then takes microseconds. Raises InvalidGrammar
    when the vocabulary cannot spell `end`.
    """

    def __init__(self, vocabulary: Vocabulary, spec: ReasoningSpec) -> None:
        self.spec = spec
        self.tokens = TokenBytes.of(vocabulary)
        self._num_words = vocabulary.num_words
        self._fail = _failures(spec.end)
        self.rests = ways_out(self.tokens, spec.end)
        """By bytes of `end` that are matched: the tokens that complete it."""
        self.reserve = max(map(len, self.rests))
        self._crossing: dict[int, list[int]] = {}
        """Bytes of `end` -> tokens that begin with the rest of it and have other text after that; -1: tokens that
        have all of `end` within."""
        self._text = self._read_texts()
        self._rows: dict[tuple[str, int], Words] = {}
        self.begin_row(0)
        for newlines in range(MAX_NEWLINES + 1):
            self.gap_row(newlines)

    def _read_texts(self) -> NDArray[np.bool_]:
        """Return which tokens have text, and sort those that may cross the end of the phase."""
        end, texts = self.spec.end, self.tokens.texts
        bits = np.zeros(self._num_words * 32, dtype=bool)
        bits[[token for token, text in enumerate(texts) if text]] = True
        first = {byte: [at for at in range(1, len(end)) if end[at] == byte] for byte in end}
        for token, text in enumerate(texts):
            if not text:
                continue
            if end in text and not self.thinks(0, text):
                self._crossing.setdefault(-1, []).append(token)
            for at in first.get(text[0], ()):
                if text.startswith(end[at:]) and not is_gap(text[len(end) - at :], 0):
                    self._crossing.setdefault(at, []).append(token)
        return bits

    def scan(self, matched: int, text: bytes) -> tuple[int, int]:
        """Return how much of `end` is matched after `text`, and where in `text` the end is complete; -1: it is not."""
        end, fail = self.spec.end, self._fail
        for at, byte in enumerate(text):
            while matched and end[matched] != byte:
                matched = fail[matched - 1]
            if end[matched] == byte:
                matched += 1
            if matched == len(end):
                return matched, at + 1
        return matched, -1

    def thinks(self, matched: int, text: bytes) -> bool:
        """Return whether a token with this text may follow in the phase."""
        at = self.scan(matched, text)[1]
        return bool(text) and (at < 0 or is_gap(text[at:], 0))

    def begins(self, matched: int, text: bytes) -> bool:
        """Return whether a token with this text continues `begin` after its first `matched` bytes."""
        rest = self.spec.begin[matched:]
        if not text.startswith(rest):
            return bool(text) and rest.startswith(text)
        return not text[len(rest) :] or self.scan(0, text[len(rest) :])[1] < 0

    def reasoning_row(self, matched: int) -> Words:
        """Return the row of REASONING, int32 [W]. The caller must not change it."""
        row = self._rows.get(("think", matched))
        if row is None:
            bits = self._text.copy()
            bits[self._crossing.get(-1, [])] = False
            border = matched
            while border:
                bits[self._crossing.get(border, [])] = False
                border = self._fail[border - 1]
            row = self._rows["think", matched] = np.packbits(bits, bitorder="little").view(np.int32)
        return row

    def begin_row(self, matched: int) -> Words:
        """Return the tokens that go on with `begin`, int32 [W]. The caller must not change it."""
        return self._row("begin", matched, lambda text: self.begins(matched, text))

    def gap_row(self, newlines: int) -> Words:
        """Return the tokens of newlines that may follow in GAP, int32 [W]. The caller must not change it."""
        return self._row("gap", newlines, lambda text: is_gap(text, newlines))

    def one_row(self, token: int) -> Words:
        """Return the row of one token, int32 [W]."""
        bits = np.zeros(self._num_words, dtype=np.uint32)
        bits[token // 32] = 1 << token % 32
        return bits.view(np.int32)

    def _row(self, kind: str, key: int, legal: Callable[[bytes], bool]) -> Words:
        row = self._rows.get((kind, key))
        if row is None:
            bits = np.zeros(self._num_words * 32, dtype=bool)
            bits[[token for token, text in enumerate(self.tokens.texts) if text and legal(text)]] = True
            row = self._rows[kind, key] = np.packbits(bits, bitorder="little").view(np.int32)
        return row


def is_gap(text: bytes, newlines: int) -> bool:
    """Return whether `text` is newlines that may follow `newlines` others in GAP."""
    return text == b"\n" * len(text) and newlines + len(text) <= MAX_NEWLINES


def _failures(pattern: bytes) -> list[int]:
    """Return the failure function of Knuth, Morris and Pratt (1977)."""
    out = [0] * len(pattern)
    matched = 0
    for at in range(1, len(pattern)):
        while matched and pattern[at] != pattern[matched]:
            matched = out[matched - 1]
        if pattern[at] == pattern[matched]:
            matched += 1
        out[at] = matched
    return out


class ReasoningCompiled:
    """A compiled answer after a reasoning phase."""

    def __init__(self, answer: Compiled, rows: MarkerRows) -> None:
        self.answer = answer
        self.rows = rows

    @property
    def warnings(self) -> tuple[str, ...]:
        """See `Compiled.warnings`."""
        return self.answer.warnings

    @property
    def memory_bytes(self) -> int:
        """See `Compiled.memory_bytes`."""
        return self.answer.memory_bytes

    def matcher(self, closing_at: int | None = None) -> ReasoningMatcher:
        """Return a matcher at the start. The phase ends at `closing_at` tokens, or only by its budget if None."""
        return ReasoningMatcher(self.answer.matcher, self.rows, closing_at)


class Phase(enum.Enum):
    """Where a matcher is."""

    BEGIN = enum.auto()
    REASONING = enum.auto()
    GAP = enum.auto()
    ANSWER = enum.auto()


class _Step(NamedTuple):
    """The state after a token. Steps form a list from the last one to the first, which copies share."""

    before: _Step | None
    phase: Phase
    matched: int
    """Bytes of a marker; in GAP the newlines."""
    used: int
    """Tokens of the phase, its markers included."""
    counts: tuple[int, int]
    """Tokens that each inner matcher has accepted."""
    alive: bool = False
    """In BEGIN: the tokens so far are also the beginning of an answer without reasoning."""
    which: int = 1
    """In ANSWER: the number of the inner matcher."""


@dataclass(slots=True)
class _Inner:
    """The matchers of the answer: 0 without reasoning before it, 1 after it."""

    start: Callable[[], Matcher]
    made: list[Matcher | None] = field(default_factory=lambda: [None, None])

    def __getitem__(self, which: int) -> Matcher:
        found = self.made[which]
        if found is None:
            found = self.made[which] = self.start()
        return found

    def copy(self) -> _Inner:
        return _Inner(self.start, [matcher and matcher.copy() for matcher in self.made])


class ReasoningMatcher:
    """The state of one answer with its reasoning; see `Matcher`."""

    def __init__(self, start: Callable[[], Matcher], rows: MarkerRows, closing_at: int | None) -> None:
        self._rows = rows
        self._inner = _Inner(start)
        budget = rows.spec.max_tokens
        self._limit = min((most for most in (budget, closing_at) if most is not None), default=None)
        self._closes = closing_at is not None and (budget is None or closing_at < budget)
        if rows.spec.is_open:
            self._at = _Step(None, Phase.REASONING, 0, 0, (0, 0))
        else:
            self._at = _Step(None, Phase.BEGIN, 0, 0, (0, 0), alive=True)

    @property
    def phase(self) -> Phase:
        """Where the matcher is."""
        return self._at.phase

    @property
    def answer_begins(self) -> bool:
        """The last token was the first one of the answer that the reasoning cannot hold."""
        before = self._at.before
        return self._at.phase is Phase.ANSWER and before is not None and before.phase is not Phase.ANSWER

    def answer_alone(self, uncommitted: int) -> Matcher | None:
        """Return the matcher of the answer, if the answer had begun before the last `uncommitted` tokens; else None.

        It is in the same state, and takes this matcher's place: it knows no phase, so that it cannot be rolled back
        after the `uncommitted` tokens.
        """
        step: _Step | None = self._at
        for _ in range(uncommitted):
            step = step and step.before
        return self._inner[step.which] if step is not None and step.phase is Phase.ANSWER else None

    @property
    def cut_short(self) -> bool:
        """The next token belongs to an end of the phase that `closing_at` forces."""
        return self._closes and self._forced() is not None

    @property
    def terminated(self) -> bool:
        """See `Matcher.terminated`."""
        return self._at.phase is Phase.ANSWER and self._inner[self._at.which].terminated

    def accept(self, token: int) -> bool:
        """Advance over `token`; see `Matcher.accept`."""
        texts = self._rows.tokens.texts
        if not 0 <= token < len(texts):
            return False
        at, text = self._at, texts[token]
        step: _Step | None
        match at.phase:
            case Phase.ANSWER:
                step = self._answer(at.which, token)
            case Phase.GAP:
                if text and is_gap(text, at.matched):
                    step = at._replace(before=at, matched=at.matched + len(text), used=at.used + 1)
                else:
                    step = self._answer(1, token)
            case Phase.REASONING:
                forced = self._forced()
                legal = self._rows.thinks(at.matched, text) and forced in (None, token)
                step = self._think(at.matched, text) if legal else None
            case _:
                step = self._begin(token, text)
        if step is None:
            return False
        self._at = step
        return True

    def rollback(self, count: int) -> None:
        """Take back `count` tokens; see `Matcher.rollback`."""
        step: _Step | None = self._at
        for _ in range(count):
            step = step and step.before
        if step is None:
            raise ValueError(f"{count} tokens were not accepted")
        for which in (0, 1):
            extra = self._at.counts[which] - step.counts[which]
            if extra:
                self._inner[which].rollback(extra)
        self._at = step

    def copy(self) -> ReasoningMatcher:
        """Return an independent matcher in the same state."""
        twin = ReasoningMatcher.__new__(ReasoningMatcher)
        twin._rows, twin._limit, twin._closes, twin._at = self._rows, self._limit, self._closes, self._at
        twin._inner = self._inner.copy()
        return twin

    def fill(self, rows: Rows, index: int) -> None:
        """Write the row; see `Matcher.fill`."""
        at = self._at
        match at.phase:
            case Phase.ANSWER:
                self._inner[at.which].fill(rows, index)
            case Phase.GAP:
                self._inner[1].fill(rows, index)
                _add(rows, index, self._rows.gap_row(at.matched))
            case Phase.REASONING:
                forced = self._forced()
                row = self._rows.reasoning_row(at.matched) if forced is None else self._rows.one_row(forced)
                rows.words[index, : len(row)] = row
            case Phase.BEGIN:
                row = self._rows.begin_row(at.matched)
                if at.alive:
                    self._inner[0].fill(rows, index)
                else:
                    rows.words[index, : len(row)] = 0
                _add(rows, index, row)

    def jump_forward_tokens(self, limit: int) -> tuple[int, ...]:
        """Return tokens that must follow; see `Matcher.jump_forward_tokens`."""
        at = self._at
        if at.phase is Phase.ANSWER:
            return self._inner[at.which].jump_forward_tokens(limit)
        return () if self._forced() is None else self._rows.rests[at.matched][:limit]

    def num_jump_forward_bytes(self) -> int:
        """See `Matcher.num_jump_forward_bytes`."""
        at = self._at
        return self._inner[at.which].num_jump_forward_bytes() if at.phase is Phase.ANSWER else 0

    def _forced(self) -> int | None:
        """Return the next token of the end that the limit forces; None: it forces none."""
        at = self._at
        if at.phase is not Phase.REASONING or self._limit is None or self._limit - at.used > self._rows.reserve:
            return None
        return self._rows.rests[at.matched][0]

    def _answer(self, which: int, token: int) -> _Step | None:
        if not self._inner[which].accept(token):
            return None
        return self._at._replace(
            before=self._at, phase=Phase.ANSWER, counts=_one_more(self._at.counts, which), which=which
        )

    def _think(self, matched: int, text: bytes) -> _Step:
        at = self._at
        matched, end = self._rows.scan(matched, text)
        phase, matched = (Phase.REASONING, matched) if end < 0 else (Phase.GAP, len(text) - end)
        return at._replace(before=at, phase=phase, matched=matched, used=at.used + 1, alive=False)

    def _begin(self, token: int, text: bytes) -> _Step | None:
        at, begin = self._at, self._rows.spec.begin
        begins = self._rows.begins(at.matched, text)
        if begins and len(text) >= len(begin) - at.matched:
            return self._think(0, text[len(begin) - at.matched :])
        answers = at.alive and self._inner[0].accept(token)
        counts = _one_more(at.counts, 0) if answers else at.counts
        if begins:
            matched = at.matched + len(text)
            return at._replace(before=at, matched=matched, used=at.used + 1, counts=counts, alive=answers)
        if not answers:
            return None
        return at._replace(before=at, phase=Phase.ANSWER, counts=counts, which=0)

    def __repr__(self) -> str:
        return f"<ReasoningMatcher {self._at.phase.name} used={self._at.used}>"


def _add(rows: Rows, index: int, words: Words) -> None:
    rows.words[index, : len(words)] |= words


def _one_more(counts: Sequence[int], which: int) -> tuple[int, int]:
    return counts[0] + (which == 0), counts[1] + (which == 1)
