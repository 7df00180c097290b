"""Budgeted completion: near `max_tokens`, mask rows are narrowed to tokens from which the answer still ends in time.

Invariant: a narrowed row, and whether a row is narrowed, depend only on the grammar, the tokens so far and the limit;
not on drafts, on time, or on earlier requests for rows. So each look-ahead is a function of the one before it, or of a
look-ahead whose position is a function of the same, and a rebuilt matcher comes to the same rows. Far from the limit a
token costs one comparison.

How it works, with `path`, a known way to the end, and `spare`, the tokens left beyond it:

    spare >= margin    the grammar's own row is used; the next look-ahead follows some tokens later, and carries `path`
                       over them
    spare <  margin    a token stays in the row if a path after it is known and fits: found for the token itself, or,
                       in free text, for three tokens of its class
    spare == 0         only the next token of `path` stays
    no path fits       the grammar's own row is used

An answer that repeats itself (`RepetitionLimit`) gets the limit of a short way from there: a known one or one that a
search of bounded work finds, which need not be the shortest. Without one it goes on, and is looked at again later.

Terms: a narrowed row *cuts* if a text that the grammar allows next cannot be begun any more. A row that only lacks
other spellings of what it allows, or halves of rare characters, does not. A row is *steered* when it cuts, or when a
token before it came from a row that cuts. So an answer with room to spare is not called steered for a token that a
search of bounded work did not reach.

Not responsible for: finding paths (see search.py).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from grammar_service.backends.backend import Matcher, MatcherFailed
from grammar_service.backends.reasoning import Phase, ReasoningMatcher
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
from service_runtime.repetition import RepetitionLimit

FIND_WORK, IMPROVE_WORK, TABLE_WORK, ONE_WORK = 2_000, 600, 1_500, 200
"""Units of work: for a state, for a shorter way there, for a row, for one token of a row that needs a search."""
_WORK_PER_TOKEN = 12
"""Units for one token of a row, by tokens left: a descent of so many tokens."""
_MAX_SINGLES = 12
"""The most tokens of a class that are tried one by one. Three tokens represent a larger class."""
_MAX_CARRIED = 64
"""Over so many tokens a known path is carried; after more, a new one is searched for."""
_MAX_WORDS = 48
"""As _MAX_SINGLES, for words in a row that is not free text."""
_LONG_RUN = 3
"""Tokens by which each of many tokens may lengthen the way to the end."""
_MAX_SEARCHES = 2
"""Tokens of a row after which a search is made because the known path does not fit there."""


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
    checked: bool = True
    """Each token of `path` is in the mask of its row. Far from the limit that is not checked."""
    steered: bool = False
    """A token before this position came from a row that cuts."""
    words: Words | None = None
    """The narrowed row; None: the grammar's own row is used."""
    plain: Words | None = None
    """The grammar's own row, where there is a table."""
    table: tuple[_Group, ...] = ()
    """The groups of the row's tokens; `words` has the ones that fit into the remaining tokens."""
    paths: tuple[tuple[int, Path], ...] = ()
    """(token, path after it) for each token of the table that needed another path than `path`. The next row often
    needs them again."""
    cuts: bool = False
    """`words` cuts."""
    limit: int | None = None
    """The answer repeated itself and ends within so many tokens; None: `max_tokens`."""


class CompletionBudget:
    """The look-aheads along one answer. Moves with its slot's matcher, on the same thread.

    Args:
        plan: the grammar's plan.
        max_tokens: upper bound on the answer's tokens, the stop token included.
        matcher: at the start of the answer.
        repetition: an answer that reaches it is led to its end; None: no limit.
    """

    def __init__(
        self, plan: CompletionPlan, max_tokens: int, matcher: Matcher, *, repetition: RepetitionLimit | None = None
    ) -> None:
        self._plan = plan
        self._max_tokens = max_tokens
        self.repetition = repetition
        self._lookaheads: list[LookAhead] = []
        self.advance(matcher, [])

    def advance(self, matcher: Matcher, tokens: list[int]) -> None:
        """Look ahead from the position after `tokens`, over which `matcher` has just moved; it stays there."""
        at = len(tokens)
        before = self._lookaheads[-1] if self._lookaheads else None
        if isinstance(matcher, ReasoningMatcher) and matcher.phase is Phase.REASONING:
            # The answer's way to its end begins after the reasoning, whose own end is a count of tokens.
            steered = matcher.cut_short or (before is not None and before.steered)
            self._lookaheads.append(LookAhead(at, self._plan.path, at + 1, steered=steered))
            return
        # No later look-ahead goes back after the answer's first token, so that the answer's own matcher is enough.
        begins = isinstance(matcher, ReasoningMatcher) and matcher.answer_begins
        limit = self._max_tokens if before is None or before.limit is None else before.limit
        if matcher.terminated or at >= limit:
            return
        waits = before is not None and at < before.next_position and not begins
        closes = limit == self._max_tokens and self._repeats(tokens) and not (waits and before and before.path is None)
        if waits and not closes:
            return
        try:
            found, limit = self._look(matcher, tokens, before, limit, closes=closes)
        except (MatcherFailed, WorkSpentError):
            # A copy of the matcher met a limit of its library, or a single row costs more than the work there is.
            steered = before is not None and before.steered
            found = LookAhead(at, None, at + max(1, (limit - at) // 8), steered=steered)
        if limit < self._max_tokens and found.path is not None:
            found = replace(found, limit=limit, cuts=found.words is not None)
        self._lookaheads.append(found)

    def copy(self) -> CompletionBudget:
        """Return a budget at the same position that moves by itself."""
        twin = copy.copy(self)
        twin._lookaheads = list(self._lookaheads)
        return twin

    def truncate(self, length: int) -> None:
        """Drop the look-aheads after position `length`, to which the matcher was rolled back."""
        while len(self._lookaheads) > 1 and self._lookaheads[-1].position > length:
            self._lookaheads.pop()

    def is_far(self, first: int, last: int) -> bool:
        """Return whether positions `first` to `last` are far from the limit.

        True: `advance` would do nothing at any of them, and none of their rows is narrowed or steered, as long as the
        answer does not repeat itself (`repeats_within`).
        """
        latest = self._lookaheads[-1] if self._lookaheads else None
        if latest is None or latest.steered or latest.words is not None:
            return False
        return latest.position <= first and last < latest.next_position

    def repeats_within(self, tokens: Sequence[int], length: int, taken: Sequence[int]) -> bool:
        """Return whether the answer repeats itself after one of `taken`, which follow `length` of `tokens`."""
        if self.repetition is None:
            return False
        recent = [*tokens[max(0, length - self.repetition.num_tokens) : length], *taken]
        before = length + len(taken) - len(recent)
        ends = range(len(recent) - len(taken) + 1, len(recent) + 1)
        return any(self.repetition.is_reached(recent, end, before) for end in ends)

    def narrowed_row(self, position: int) -> Words | None:
        """Return the narrowed row at `position`, int32 [W]; None: it is not narrowed. The caller must not change it."""
        latest = self._lookaheads[-1]
        return latest.words if latest.position == position else None

    def known_row(self, position: int) -> Words | None:
        """Return the row at `position`, int32 [W], narrowed or not, if a look-ahead has filled it; else None.

        The caller must not change it.
        """
        latest = self._lookaheads[-1]
        if latest.position != position:
            return None
        return latest.plain if latest.words is None else latest.words

    def steered_tokens_left(self, position: int) -> int:
        """Return the known number of tokens to the end if the row at `position` is steered; -1: it is not."""
        latest = self._lookaheads[-1]
        if not latest.steered and not (latest.cuts and latest.position == position):
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

    def _repeats(self, tokens: list[int]) -> bool:
        return self.repetition is not None and self.repetition.is_reached(tokens, len(tokens))

    def _look(
        self, matcher: Matcher, tokens: list[int], before: LookAhead | None, limit: int, *, closes: bool
    ) -> tuple[LookAhead, int]:
        """Return the look-ahead after `tokens` of an answer of at most `limit`, and its limit from here on.

        `closes`: the answer repeats itself, and the limit becomes the end of a short way.
        """
        at = len(tokens)
        left = limit - at
        plan = self._plan
        cost, ends = plan.single_token_cost, plan.ends
        search = Search(matcher.copy(), plan.texts, FIND_WORK, ends=ends, single_token_cost=cost)
        path, checked = self._path(search, tokens, before, left)
        steered = before is not None and (before.steered or before.cuts)
        if closes and path:
            path, checked = self._shortened(search, path, left, checked=checked)
            left = len(path) if path else left
        return self._row(search, tokens, before, left, path, checked=checked, steered=steered), at + left

    def _shortened(self, search: Search, path: Path, left: int, *, checked: bool) -> tuple[Path | None, bool]:
        """Return a path to an ending in which every token is allowed by its mask, and True.

        The path is shorter than `path` if the search finds one, else it spells the same text or takes at most `left`
        tokens. None: the search found no path.
        """
        search.work = FIND_WORK
        known = path if checked else search.along(self._plan.texts.text(path[:-1]), left) or search.find(left)
        if known is None or len(known) == 1:
            return known, True
        search.work = IMPROVE_WORK
        return search.find(len(known) - 1) or known, True

    def _row(
        self,
        search: Search,
        tokens: list[int],
        before: LookAhead | None,
        left: int,
        path: Path | None,
        *,
        checked: bool,
        steered: bool,
    ) -> LookAhead:
        """Return the look-ahead with `path` and, near the limit, the row that keeps to ways of `left` tokens."""
        at = len(tokens)
        if path and left - len(path) >= self._plan.margin:
            return LookAhead(at, path, at + self._skipped(left, left - len(path)), checked, steered)
        search.work = TABLE_WORK
        plain = search.mask().copy() if path else None
        if path and plain is not None and not has_token(plain, path[0]):
            # The path was checked at an earlier state, where the same text had another mask.
            path = search.along(self._plan.texts.text(path[:-1]), left) or search.find(left)
        if path is None or plain is None or len(path) > left:
            return LookAhead(at, None, at + max(1, left // 8), steered=steered)
        if count_tokens(plain) <= 1:
            return LookAhead(at, path, at + 1, steered=steered)
        if before is not None and before.path == path and self._is_same_text(before, tokens[-1], plain):
            table, paths = before.table, before.paths
        else:
            known = dict(before.paths) if before else {}
            table, paths = _Table(search, self._plan.texts, path, left, known).build(plain)
        words = plain & np.bitwise_or.reduce([group.words for group in table if group.num_tokens <= left])
        if _equal(words, plain):
            return LookAhead(at, path, at + 1, True, steered, None, plain, table, paths)
        cuts = not self._plan.texts.begins_all(words, plain & ~words)
        return LookAhead(at, path, at + 1, True, steered, words, plain, table, paths, cuts)

    def _skipped(self, left: int, spare: int) -> int:
        """Return how many tokens may follow a far position before the next look-ahead; at least 1."""
        # Each token takes one of the spare tokens and lengthens the way by less than the margin. Many tokens lengthen
        # it by less than the margin and _LONG_RUN tokens each, because a part that is opened must also be written.
        margin = self._plan.margin
        skipped = max(min(spare // margin, _MAX_CARRIED), (spare - margin) // (1 + _LONG_RUN))
        if self._plan.longest_way is not None:
            skipped = max(skipped, left - self._plan.longest_way - self._plan.margin)
        return skipped

    def _is_same_text(self, before: LookAhead, token: int, plain: Words) -> bool:
        """Return whether `token` continued a text, a number or white space, so that the table before it still holds.

        A bounded text loses its longest tokens one by one. After the tokens that stay legal, the rest is the same.
        """
        if before.plain is None or not any(has_token(members, token) for members in self._plan.texts.classes):
            return False
        return _equal(before.plain, plain) or (is_text(plain) and not (plain & ~before.plain).any())

    def _path(self, search: Search, tokens: list[int], before: LookAhead | None, left: int) -> tuple[Path | None, bool]:
        """Return a way to the end of at most `left` tokens, and whether its tokens were checked against the masks.

        It is the rest of the known way where that fits, else a new one. Far from the limit any way will do, unchecked.
        """
        far = left - self._plan.margin
        if before is None:
            known = self._plan.path
            return (known if known and len(known) <= left else search.find(left)), True
        if before.path and before.position >= len(tokens) - _MAX_CARRIED:
            with contextlib.suppress(WorkSpentError):
                carried, same = self._carried(search, tokens[before.position :], before, left)
                if carried and (len(carried) <= far or (same and before.checked)):
                    return carried, same and before.checked
                text = self._plan.texts.text(carried[:-1]) if carried else b""
                spelled = search.along(text, left, before.path if before.checked else ()) if carried else None
                if spelled:
                    return spelled, True
        search.work = FIND_WORK
        found = search.find(left, any_will_do=True)
        if found is None or len(found) <= far:
            return found, True
        search.work = min(search.work, IMPROVE_WORK)
        return search.find(len(found) - 1) or found, True

    def _carried(self, search: Search, taken: list[int], before: LookAhead, left: int) -> tuple[Path | None, bool]:
        """Return the path of the look-ahead `before`, carried over the tokens `taken` since, and whether it is its end.

        None: the path leads to no end after one of the tokens.
        """
        path = before.path or ()
        if path[: len(taken)] == tuple(taken):
            return path[len(taken) :], True
        if len(taken) == 1:
            known = dict(before.paths).get(taken[0])
            carried = known if known and len(known) <= left else search.carry_on(taken[0], path, left)
            return carried, carried == path
        carried = path
        search.matcher.rollback(len(taken))
        for number, token in enumerate(taken, 1):
            if not search.matcher.accept(token):
                raise MatcherFailed("a token of the answer was rejected when the matcher was moved over it again")
            if carried and token == carried[0]:
                carried = carried[1:]
            elif carried:
                try:
                    carried = search.carry_on(token, carried, left + len(taken) - number)
                except WorkSpentError:
                    carried = None
        return carried, carried is not None and carried == path[len(path) - len(carried) :]

    def __repr__(self) -> str:
        return f"<CompletionBudget max_tokens={self._max_tokens} lookaheads={len(self._lookaheads)} {self._plan!r}>"


class _Table:
    """Sorts the legal tokens of one row by their distance to the answer's end.

    Args:
        search: at the row's state, with the work that the table may spend.
        texts: the vocabulary's texts.
        path: the known way to the end.
        left: tokens that the answer may still have.
        known: token -> path after it, found for the row before.
    """

    def __init__(self, search: Search, texts: TokenTexts, path: Path, left: int, known: dict[int, Path]) -> None:
        self._search, self._texts, self._path, self._left, self._known = search, texts, path, left, known
        self._distances: dict[int, int] = {}
        """Token -> tokens to the end, this one included."""
        self._paths: dict[int, Path] = {}
        # Without spare tokens a search would have to find a shorter path than the known one.
        self._searches_left = _MAX_SEARCHES if left > len(path) else 0

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
        for number, tokens_of_class in enumerate(texts.classes):
            members = plain & tokens_of_class
            unsorted &= ~tokens_of_class
            # Outside a free text, a word is a part of a name or a value, and each leads to another end.
            singles = _MAX_SINGLES if number or is_text(plain) else _MAX_WORDS
            if found := token_ids(members, singles):
                for token in found:
                    self._try_token(token)
                continue
            if not members.any():
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
            if rest is None:
                rest = self._search.join(token, self._path, self._left - 1)
                searched = rest is not None
        if rest is None and self._texts.is_half(token):
            searched = True
            rest = self._search.after_next(token, self._path, self._left - 1)
        elif rest is None and self._searches_left:
            self._searches_left -= 1
            searched = True
            rest = self._search.find_after(token, self._left - 1, min(ONE_WORK, _WORK_PER_TOKEN * self._left))
        if rest is None:
            return None
        if searched:
            self._paths[token] = rest
        self._distances[token] = 1 + len(rest)
        return self._distances[token]


def _equal(one: Words, other: Words) -> bool:
    return bool(np.array_equal(one, other))
