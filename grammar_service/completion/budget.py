"""An answer that closes: near its last token, rows are narrowed to what still leaves room for the answer's end.

Invariant: a narrowed row, and whether a row is narrowed, depend on the grammar, the tokens so far and the limit alone:
not on drafts, time, or what was asked before. So every state is a function of the state one token before, or of a check
whose place is such a function too; a matcher that is made anew comes to the same rows. Far from the limit a token costs
one comparison.

How: `path` is a known way to the end. While the tokens left exceed it by `margin` or more, rows stay as they are.
Within the margin a token is offered when a path behind it is known and fits: found for itself, or, in text, for a few
of its kind. When nothing is to spare, only the path is left. Where no path is known or fits, nothing is narrowed.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from grammar_service.backends.backend import Matcher, MatcherFailed
from grammar_service.completion.choices import is_text
from grammar_service.completion.plan import ClosingPlan
from grammar_service.completion.search import Path, Search, WorkSpentError
from grammar_service.grammar.mask_rows import (
    Words,
    count_tokens,
    first_token_ids,
    has_token,
    has_tokens,
    spread_token_ids,
    token_ids,
)

FIND_WORK, TABLE_WORK, ONE_WORK = 2_000, 1_500, 200
"""Units of work: for a state, for a row, for one token of a row that needs a search."""
_SINGLES = 12
"""So many tokens of a kind are tried one by one; of more, three speak for all."""
_SEARCHES = 2
"""Tokens of a row behind which a search is made, when the known path does not fit there."""


class _Group(NamedTuple):
    """Tokens behind which the end is at most `need - 1` tokens away."""

    words: Words
    need: int


@dataclass(frozen=True, slots=True)
class Mark:
    """What was found at one position of an answer."""

    position: int
    path: Path | None
    following: int
    """The next position to look at."""
    steered: bool = False
    """A token before this position came from a narrowed row."""
    words: Words | None = None
    """The narrowed row; None: the grammar's own row stands."""
    plain: Words | None = None
    """The grammar's own row, where there is a table."""
    table: tuple[_Group, ...] = ()
    """What `words` was cut from: every group that fits into what is left."""
    ways: tuple[tuple[int, Path], ...] = ()
    """(token, way to the end behind it) for each token of the table that needed another than `path`: often the next
    row's, too."""


class Closing:
    """The marks along one answer. Moves with the slot's matcher, and is used by the same thread.

    Args:
        plan: of the grammar.
        max_tokens: most tokens of the answer, the stop token included.
        matcher: at the start of the answer.
    """

    def __init__(self, plan: ClosingPlan, max_tokens: int, matcher: Matcher) -> None:
        self._plan = plan
        self._max = max_tokens
        self._marks: list[Mark] = []
        self.push(matcher, [])

    def push(self, matcher: Matcher, tokens: list[int]) -> None:
        """Look at the position behind `tokens`, over which `matcher` has just moved. Leaves it where it is."""
        at = len(tokens)
        if (self._marks and at < self._marks[-1].following) or at >= self._max or matcher.terminated:
            return
        before = self._marks[-1] if self._marks else None
        try:
            self._marks.append(self._look(matcher, tokens, before))
        except (MatcherFailed, WorkSpentError):
            # The copy met a limit of its library, and the matcher itself has not; or a row alone is too dear.
            steered = before is not None and before.steered
            self._marks.append(Mark(at, None, at + max(1, (self._max - at) // 8), steered))

    def copy(self) -> Closing:
        """Return one at the same place that moves by itself."""
        twin = copy.copy(self)
        twin._marks = list(self._marks)
        return twin

    def cut(self, length: int) -> None:
        """Forget what lies behind position `length`."""
        while len(self._marks) > 1 and self._marks[-1].position > length:
            self._marks.pop()

    def is_quiet(self, first: int, last: int) -> bool:
        """Say whether positions `first` to `last` are far from the end: `push` would do nothing at any of them, and no
        row of theirs is narrowed or led.
        """
        mark = self._marks[-1] if self._marks else None
        if mark is None or mark.steered or mark.words is not None:
            return False
        return mark.position <= first and last < mark.following

    def narrowed(self, position: int) -> Words | None:
        """Return the words of the row at `position` if it is narrowed; they are not the caller's to change."""
        mark = self._marks[-1]
        return mark.words if mark.position == position else None

    def led(self, position: int) -> int:
        """Return the known number of tokens to the end if the row at `position` or one before is narrowed, else -1."""
        mark = self._marks[-1]
        if not mark.steered and (mark.words is None or mark.position != position):
            return -1
        return len(mark.path or ())

    def only(self, position: int) -> Path | None:
        """Return the one way to the end where the row at `position` was narrowed to it; () where the row has more.

        None: the row is the grammar's own.
        """
        words = self.narrowed(position)
        if words is None:
            return None
        path = self._marks[-1].path
        return path if path and count_tokens(words) == 1 and has_token(words, path[0]) else ()

    def refuses(self, position: int, token: int) -> bool:
        """Say whether the row at `position` was narrowed and has no `token`."""
        words = self.narrowed(position)
        return words is not None and not has_token(words, token)

    def _look(self, matcher: Matcher, tokens: list[int], before: Mark | None) -> Mark:
        at = len(tokens)
        left = self._max - at
        search = Search(matcher.copy(), self._plan.texts, FIND_WORK, toll=self._plan.toll)
        path = self._path(search, tokens, before, left)
        steered = before is not None and (before.steered or before.words is not None)
        spare = left - len(path) if path else -1
        if path is None or spare < 0:
            return Mark(at, None, at + max(1, left // 8), steered)
        if spare >= self._plan.margin:
            return Mark(at, path, at + max(1, (spare - self._plan.margin) // 2), steered)
        search.work = TABLE_WORK
        plain = search.mask().copy()
        if count_tokens(plain) <= 1:
            return Mark(at, path, at + 1, steered)
        if before is not None and before.path == path and self._goes_on(before, tokens[-1], plain):
            table, ways = before.table, before.ways
        else:
            table, ways = self._table(search, plain, path, left, dict(before.ways) if before else {})
        words = plain & np.bitwise_or.reduce([group.words for group in table if group.need <= left])
        narrowed = None if _equal(words, plain) else words
        return Mark(at, path, at + 1, steered, narrowed, plain, table, ways)

    def _goes_on(self, before: Mark, token: int, plain: Words) -> bool:
        """Say whether `token` was one of many in a text, a number or white space, and the row is what is left of it.

        A bounded text loses its longest tokens one by one; behind those that it keeps comes what came before.
        """
        if before.plain is None or not any(has_token(kind, token) for kind in self._plan.texts.classes):
            return False
        return _equal(before.plain, plain) or (is_text(plain) and not (plain & ~before.plain).any())

    def _path(self, search: Search, tokens: list[int], before: Mark | None, left: int) -> Path | None:
        if before is None:
            known = self._plan.path
            return known if known and len(known) <= left else search.find(left)
        if before.path and before.position == len(tokens) - 1:
            token = tokens[-1]
            if token == before.path[0]:
                return before.path[1:]
            known = dict(before.ways).get(token)
            try:
                carried = known if known and len(known) <= left else search.carry(token, before.path, left)
                spelled = search.along(self._plan.texts.text(carried[:-1]), left) if carried else None
            except WorkSpentError:
                spelled = None
            if spelled:
                return spelled
            search.work = FIND_WORK
        return search.find(left)

    def _table(
        self, search: Search, plain: Words, path: Path, left: int, known: dict[int, Path]
    ) -> tuple[tuple[_Group, ...], tuple[tuple[int, Path], ...]]:
        """Return groups of legal tokens and how far the end is with each; `known` is, and becomes, `Mark.ways`."""
        texts = self._plan.texts
        singles = {path[0]: len(path)} | {stop: 1 for stop in texts.stop_ids if has_token(plain, stop)}
        groups: list[_Group] = []
        ways: dict[int, Path] = {}
        searches = _SEARCHES

        def try_one(token: int) -> int | None:
            nonlocal searches
            if token in singles:
                return singles[token]
            rest = known.get(token)
            searched = rest is not None and len(rest) < left and search.leads(token, rest)
            if not searched:
                rest = search.after(token, path, left - 1)
            if rest is None and texts.is_half(token):
                searched = True
                rest = search.after_next(token, path, left - 1)
            elif rest is None and searches:
                searches -= 1
                searched = True
                rest = search.find_after(token, left - 1, ONE_WORK)
            if rest is None:
                return None
            if searched:
                ways[token] = rest
            singles[token] = 1 + len(rest)
            return singles[token]

        try:
            unsorted = plain.copy()
            for kind in texts.classes:
                members = plain & kind
                unsorted &= ~kind
                if count_tokens(members) <= _SINGLES:
                    for token in token_ids(members, _SINGLES):
                        try_one(token)
                    continue
                needs = [try_one(token) for token in spread_token_ids(members)]
                if None not in needs:
                    groups.append(_Group(members, max(need for need in needs if need is not None)))
            others = first_token_ids(unsorted, _SINGLES)
            ranked = texts.structure[has_tokens(unsorted, texts.structure)].tolist()
            for token in dict.fromkeys([*ranked[:_SINGLES], *others]):
                try_one(token)
        except WorkSpentError:
            pass
        for need in sorted(set(singles.values())):
            bits = np.zeros(texts.num_words * 32, dtype=bool)
            bits[[token for token, its_need in singles.items() if its_need == need]] = True
            groups.append(_Group(np.packbits(bits, bitorder="little").view(np.int32), need))
        return tuple(groups), tuple(ways.items())

    def __repr__(self) -> str:
        return f"<Closing max={self._max} marks={len(self._marks)} {self._plan!r}>"


def _equal(one: Words, other: Words) -> bool:
    return bool(np.array_equal(one, other))
