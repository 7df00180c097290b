"""Budgeted completion: near `max_tokens`, mask rows are narrowed to tokens from which the answer still ends in time.

Invariant: a narrowed row, and whether a row is narrowed, depend on the grammar, the tokens so far and the limit alone;
not on drafts, on time, or on earlier requests for rows. So each look-ahead is a function of the one before it, or of a
look-ahead whose position is such a function, and a rebuilt matcher comes to the same rows. Far from the limit a token
costs one comparison.

How it works, with `path`, a known way to the end, and `spare`, the tokens left beyond it:

    spare >= margin    the grammar's own row is used
    spare <  margin    a token stays in the row if a path behind it is known and fits: found for the token itself, or,
                       in free text, for three tokens of its class
    spare == 0         only the next token of `path` stays
    no path fits       the grammar's own row is used

Terms: a row is *steered* when it was narrowed, or when a token before it came from a narrowed row.

Not responsible for: finding paths (see search.py).
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from grammar_service.backends.backend import Matcher, MatcherFailed
from grammar_service.completion.plan import CompletionPlan
from grammar_service.completion.search import Path, Search, WorkSpentError, is_text
from grammar_service.completion.texts import TokenTexts
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
_MAX_SINGLES = 12
"""Up to so many tokens of a class are tried one by one; of a larger class, three tokens represent all."""
_MAX_SEARCHES = 2
"""Tokens of a row behind which a search is made because the known path does not fit there."""


class _Group(NamedTuple):
    """Tokens of a row with the same distance to the end."""

    words: Words
    """The tokens, as a row."""
    num_tokens: int
    """Tokens to the end, the group's own token included."""


@dataclass(frozen=True, slots=True)
class LookAhead:
    """What was found at one position of an answer."""

    position: int
    path: Path | None
    """A way to the end from here; None: not known, or longer than the tokens left."""
    next_position: int
    """Positions before this one need no look-ahead."""
    steered: bool = False
    """A token before this position came from a narrowed row."""
    words: Words | None = None
    """The narrowed row; None: the grammar's own row is used."""
    plain: Words | None = None
    """The grammar's own row, where there is a table."""
    table: tuple[_Group, ...] = ()
    """The groups of the row's tokens; `words` is made of those that fit into the tokens left."""
    paths: tuple[tuple[int, Path], ...] = ()
    """(token, path behind it) for each token of the table that needed another path than `path`. The next row often
    needs them again."""


class CompletionBudget:
    """The look-aheads along one answer. Moves with its slot's matcher, on the same thread.

    Args:
        plan: of the grammar.
        max_tokens: upper bound on the answer's tokens, the stop token included.
        matcher: at the start of the answer.
    """

    def __init__(self, plan: CompletionPlan, max_tokens: int, matcher: Matcher) -> None:
        self._plan = plan
        self._max_tokens = max_tokens
        self._lookaheads: list[LookAhead] = []
        self.advance(matcher, [])

    def advance(self, matcher: Matcher, tokens: list[int]) -> None:
        """Look ahead from the position behind `tokens`, over which `matcher` has just moved; it stays there."""
        at = len(tokens)
        if (self._lookaheads and at < self._lookaheads[-1].next_position) or at >= self._max_tokens:
            return
        if matcher.terminated:
            return
        before = self._lookaheads[-1] if self._lookaheads else None
        try:
            self._lookaheads.append(self._look(matcher, tokens, before))
        except (MatcherFailed, WorkSpentError):
            # A copy of the matcher met a limit of its library, or a single row costs more than the work there is.
            steered = before is not None and before.steered
            self._lookaheads.append(LookAhead(at, None, at + max(1, (self._max_tokens - at) // 8), steered))

    def copy(self) -> CompletionBudget:
        """Return a budget at the same position that moves by itself."""
        twin = copy.copy(self)
        twin._lookaheads = list(self._lookaheads)
        return twin

    def truncate(self, length: int) -> None:
        """Drop the look-aheads behind position `length`, to which the matcher was rolled back."""
        while len(self._lookaheads) > 1 and self._lookaheads[-1].position > length:
            self._lookaheads.pop()

    def is_far(self, first: int, last: int) -> bool:
        """Return whether positions `first` to `last` are far from the limit.

        True: `advance` would do nothing at any of them, and none of their rows is narrowed or steered.
        """
        latest = self._lookaheads[-1] if self._lookaheads else None
        if latest is None or latest.steered or latest.words is not None:
            return False
        return latest.position <= first and last < latest.next_position

    def narrowed_row(self, position: int) -> Words | None:
        """Return the narrowed row at `position`, int32 [W]; None: it is not narrowed. The caller must not change it."""
        latest = self._lookaheads[-1]
        return latest.words if latest.position == position else None

    def steered_tokens_left(self, position: int) -> int:
        """Return the known number of tokens to the end if the row at `position` is steered; -1: it is not."""
        latest = self._lookaheads[-1]
        if not latest.steered and (latest.words is None or latest.position != position):
            return -1
        return len(latest.path or ())

    def only_path(self, position: int) -> Path | None:
        """Return the way to the end if the row at `position` was narrowed to one token of it.

        () where the narrowed row has more tokens; None where the row is the grammar's own.
        """
        words = self.narrowed_row(position)
        if words is None:
            return None
        path = self._lookaheads[-1].path
        return path if path and count_tokens(words) == 1 and has_token(words, path[0]) else ()

    def forbids(self, position: int, token: int) -> bool:
        """Return whether the row at `position` was narrowed and lacks `token`."""
        words = self.narrowed_row(position)
        return words is not None and not has_token(words, token)

    def _look(self, matcher: Matcher, tokens: list[int], before: LookAhead | None) -> LookAhead:
        at = len(tokens)
        left = self._max_tokens - at
        search = Search(matcher.copy(), self._plan.texts, FIND_WORK, single_token_cost=self._plan.single_token_cost)
        path = self._path(search, tokens, before, left)
        steered = before is not None and (before.steered or before.words is not None)
        spare = left - len(path) if path else -1
        if path is None or spare < 0:
            return LookAhead(at, None, at + max(1, left // 8), steered)
        if spare >= self._plan.margin:
            return LookAhead(at, path, at + max(1, (spare - self._plan.margin) // 2), steered)
        search.work = TABLE_WORK
        plain = search.mask().copy()
        if count_tokens(plain) <= 1:
            return LookAhead(at, path, at + 1, steered)
        if before is not None and before.path == path and self._is_same_text(before, tokens[-1], plain):
            table, paths = before.table, before.paths
        else:
            known = dict(before.paths) if before else {}
            table, paths = _Table(search, self._plan.texts, path, left, known).build(plain)
        words = plain & np.bitwise_or.reduce([group.words for group in table if group.num_tokens <= left])
        narrowed = None if _equal(words, plain) else words
        return LookAhead(at, path, at + 1, steered, narrowed, plain, table, paths)

    def _is_same_text(self, before: LookAhead, token: int, plain: Words) -> bool:
        """Return whether `token` continued a text, a number or white space, so that the table before it still holds.

        A bounded text loses its longest tokens one by one. Behind the tokens that stay legal, the rest is the same.
        """
        if before.plain is None or not any(has_token(members, token) for members in self._plan.texts.classes):
            return False
        return _equal(before.plain, plain) or (is_text(plain) and not (plain & ~before.plain).any())

    def _path(self, search: Search, tokens: list[int], before: LookAhead | None, left: int) -> Path | None:
        """Return a way to the end of at most `left` tokens: the rest of the known one where it fits, else a new one."""
        if before is None:
            known = self._plan.path
            return known if known and len(known) <= left else search.find(left)
        if before.path and before.position == len(tokens) - 1:
            token = tokens[-1]
            if token == before.path[0]:
                return before.path[1:]
            known = dict(before.paths).get(token)
            try:
                carried = known if known and len(known) <= left else search.carry(token, before.path, left)
                spelled = search.along(self._plan.texts.text(carried[:-1]), left) if carried else None
            except WorkSpentError:
                spelled = None
            if spelled:
                return spelled
            search.work = FIND_WORK
        return search.find(left)

    def __repr__(self) -> str:
        return f"<CompletionBudget max_tokens={self._max_tokens} lookaheads={len(self._lookaheads)} {self._plan!r}>"


class _Table:
    """Sorts the legal tokens of one row by their distance to the answer's end.

    Args:
        search: at the row's state, with the work that the table may spend.
        texts: of the vocabulary.
        path: the known way to the end.
        left: tokens that the answer may still have.
        known: token -> path behind it, found for the row before.
    """

    def __init__(self, search: Search, texts: TokenTexts, path: Path, left: int, known: dict[int, Path]) -> None:
        self._search, self._texts, self._path, self._left, self._known = search, texts, path, left, known
        self._distances: dict[int, int] = {}
        """Token -> tokens to the end, this one included."""
        self._paths: dict[int, Path] = {}
        self._searches_left = _MAX_SEARCHES

    def build(self, plain: Words) -> tuple[tuple[_Group, ...], tuple[tuple[int, Path], ...]]:
        """Return `LookAhead.table` and `LookAhead.paths` of the row `plain`."""
        texts = self._texts
        stops = {stop: 1 for stop in texts.stop_ids if has_token(plain, stop)}
        self._distances = {self._path[0]: len(self._path)} | stops
        groups: list[_Group] = []
        # What the work did not reach stays out of the row.
        with contextlib.suppress(WorkSpentError):
            self._try_classes(plain, groups)
        for distance in sorted(set(self._distances.values())):
            bits = np.zeros(texts.num_words * 32, dtype=bool)
            bits[[token for token, its_distance in self._distances.items() if its_distance == distance]] = True
            groups.append(_Group(np.packbits(bits, bitorder="little").view(np.int32), distance))
        return tuple(groups), tuple(self._paths.items())

    def _try_classes(self, plain: Words, groups: list[_Group]) -> None:
        """Try every class of free text, then tokens that close something, then the first others."""
        texts = self._texts
        unsorted = plain.copy()
        for tokens_of_class in texts.classes:
            members = plain & tokens_of_class
            unsorted &= ~tokens_of_class
            if count_tokens(members) <= _MAX_SINGLES:
                for token in token_ids(members, _MAX_SINGLES):
                    self._try_token(token)
                continue
            distances = [self._try_token(token) for token in spread_token_ids(members)]
            if None not in distances:
                groups.append(_Group(members, max(distance for distance in distances if distance is not None)))
        others = first_token_ids(unsorted, _MAX_SINGLES)
        ranked = texts.structure[has_tokens(unsorted, texts.structure)].tolist()
        for token in dict.fromkeys([*ranked[:_MAX_SINGLES], *others]):
            self._try_token(token)

    def _try_token(self, token: int) -> int | None:
        """Return the number of tokens to the end with `token` next, itself included; None: no path is known."""
        if token in self._distances:
            return self._distances[token]
        rest = self._known.get(token)
        searched = rest is not None and len(rest) < self._left and self._search.leads(token, rest)
        if not searched:
            rest = self._search.after(token, self._path, self._left - 1)
        if rest is None and self._texts.is_half(token):
            searched = True
            rest = self._search.after_next(token, self._path, self._left - 1)
        elif rest is None and self._searches_left:
            self._searches_left -= 1
            searched = True
            rest = self._search.find_after(token, self._left - 1, ONE_WORK)
        if rest is None:
            return None
        if searched:
            self._paths[token] = rest
        self._distances[token] = 1 + len(rest)
        return self._distances[token]


def _equal(one: Words, other: Words) -> bool:
    return bool(np.array_equal(one, other))
