"""The search for an answer's end: from a matcher's state, few tokens that complete the answer, the stop token included.

Invariant: the result depends only on the matcher's state and the bounds, never on time. Work is counted in steps of
the matcher. The search is incomplete: None does not prove that there is no end. Each token of a `Path` is legal under
the masks that the engine samples with. Every method leaves the matcher where it was; a matcher that raised
MatcherFailed is unusable.

How it works:

    descend: take a text of `ends` where one ends something, else the first choice of the row (`choices_of`: tokens that
             close brackets come first), until a stop token
    repeat while work is left: take one decision of the best path differently, then descend again
    spell the text of the path anew in the fewest tokens that the masks allow

The second line is limited discrepancy search (Harvey and Ginsberg 1995).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from grammar_service.backends.backend import Matcher, Rows, chain_filler_of
from grammar_service.completion.texts import TokenTexts
from grammar_service.grammar.mask_rows import Words, count_tokens, has_token, has_tokens, token_ids

T = TypeVar("T")
Path = tuple[int, ...]
"""Tokens to the end; the last one is a stop token."""

_MAX_EQUAL_ROWS = 3
"""After so many equal lists of choices in a row, the descent takes the second choice, then the third."""
_WORDLIKE_BYTES = 4
"""A token of at least so many bytes may follow itself; a shorter one is a digit or a mark."""
_SHALLOW = 48
"""Tokens of the first, shallow descent. A grammar that can go on for ever is given up at this depth."""
_DEEP = 2 * _SHALLOW
"""Tokens of the first descent where any way will do. Most such descents end, but with long values not in _SHALLOW."""
_MAX_HALVES = 2
"""Tokens that are tried as the second half of an escape or of a character."""
_ACCEPT_WORK, _FILL_WORK, _TOKENS_PER_UNIT = 1, 8, 8
"""Units of work. A fill takes five to ten times as long as an accept (measured)."""
_JOINT, _MAX_JOINTS = re.compile(rb'[\[\]{}",:]'), 48
_BYTES_PER_UNIT = 32
"""Bytes of certain text per unit of work. A library that tokenizes all of it for a row needs 25 ms for 100 KB."""

_TEXT_TOKENS = 4096
"""A row with more legal tokens, or with more than a quarter of a small vocabulary, is free text: most tokens mean the
same there."""
_FEW_TOKENS = 256
"""A row with at most so many legal tokens is a name, or a value out of a list: the tokens are compared one by one."""
_MAX_CHOICES = 4
_MAX_REMEMBERED_ROWS = 1024
"""Rows whose choices are remembered: 16 KiB each with 128k tokens."""


class WorkSpentError(Exception):
    """The search has spent all of its work units."""


class Search:
    """Looks ahead with a private matcher.

    Args:
        matcher: a copy, which the search moves.
        texts: the texts of the matcher's vocabulary.
        work: units that the search may spend in all.
        ends: texts with which the grammar ends its parts. The row of a free text does not tell them from the text.
        single_token_cost: extra units for a row with a single legal token.
        measures: ask the matcher for the cost of each row before the fill. `single_token_cost` then becomes the most
            expensive one that was met.
    """

    def __init__(
        self,
        matcher: Matcher,
        texts: TokenTexts,
        work: int,
        *,
        ends: Sequence[str] = (),
        single_token_cost: int = 0,
        measures: bool = False,
    ) -> None:
        self.matcher = matcher
        self.work = work
        self.single_token_cost = single_token_cost
        self._measures = measures
        self._texts = texts
        self._part_ends = [spelled for end in ends if (spelled := texts.spell(end.encode()))]
        self._filler = chain_filler_of(matcher)
        self._carried: Path | None = None
        """The path of the last `carry`, its text, and what is left of it by the number of bytes that were written."""
        self._carried_text = b""
        self._carried_rests: dict[int, Path | None] = {}
        self._ended: Path | None = None
        self._ended_rests: list[Path] = []
        self._words = np.zeros(texts.num_words, dtype=np.int32)
        self._rows = Rows(self._words[None])

    def mask(self) -> Words:
        """Return the mask row of the present state, int32 [W]; valid until the next call of any method."""
        units = self.matcher.num_jump_forward_bytes() // _BYTES_PER_UNIT if self._measures else 0
        self.single_token_cost = max(self.single_token_cost, units)
        self._spend(_FILL_WORK + units)
        self.matcher.fill(self._rows, 0)
        if not self._measures and self.single_token_cost and count_tokens(self._words) == 1:
            self._spend(self.single_token_cost)
        return self._words

    def find(self, limit: int, *, any_will_do: bool = False) -> Path | None:
        """Return a path of at most `limit` tokens or None: with `any_will_do` the first one met, else a short one."""
        best: Path | None = None
        with contextlib.suppress(WorkSpentError):
            if any_will_do:
                ended, trail, _ = self._descend((), min(_DEEP, 2 * limit + 8))
                if ended and len(trail) <= limit:
                    return trail
            for depth in (_SHALLOW, 4 * _SHALLOW, 16 * _SHALLOW):
                best = self._within(min(depth, 2 * limit + 8), limit, any_will_do)
                if best is not None or depth >= 2 * limit + 8:
                    break
        return best

    def along(self, text: bytes, limit: int, spelled_before: Path = ()) -> Path | None:
        """Return a path of at most `limit` tokens that spells `text` under the masks and then stops, or None.

        `spelled_before` is a path that was spelled so at an earlier state. Where the rest of the text has the tokens of
        its end, they are checked by one call, without their masks.
        """
        taken: list[int] = []
        try:
            spelled = self._texts.spell(text)
            while spelled is not None and len(taken) < limit:
                rest = spelled_before[-1 - len(spelled) :]
                if taken and rest and rest[:-1] == spelled and len(taken) + len(rest) <= limit and self.fits(rest):
                    return (*taken, *rest)
                words = self.mask()
                if not spelled:
                    stop = self._stop(words)
                    return None if stop is None else (*taken, stop)
                token = spelled[0]
                if not has_token(words, token):
                    # Some libraries' masks allow only one spelling of a text that has only one continuation.
                    left = self._texts.text(spelled)
                    legal = [
                        t for t in (token_ids(words, 16) or ()) if left.startswith(self._texts.texts[t] or b"\xff")
                    ]
                    if not legal:
                        return None
                    token = max(legal, key=lambda t: len(self._texts.texts[t]))
                    spelled = (token, *(self._texts.spell(left[len(self._texts.texts[token]) :]) or ()))
                if not self._accept(token):
                    return None
                taken.append(token)
                spelled = spelled[1:]
            return None
        finally:
            self._back(len(taken))

    def fits(self, tokens: Path) -> bool:
        """Return whether the matcher accepts all of `tokens`."""
        if self._filler is not None:
            self._spend(_ACCEPT_WORK)
            legal = self._filler.may_follow(self.matcher, tokens)
            if legal:
                self._spend(len(tokens) // _TOKENS_PER_UNIT)
            return legal
        taken = 0
        try:
            for token in tokens:
                if not self._accept(token):
                    return False
                taken += 1
            return True
        finally:
            self._back(taken)

    def carry(self, token: int, path: Path, limit: int) -> Path | None:
        """Return a path from the present state, just after `token`, derived from a `path` that began before `token`.

        The new path spells the text of the old one, less the part that `token` has written. None when no such path is
        legal within `limit` tokens. The tokens are legal for the matcher, but not each is in a mask.
        """
        return next((rest for rest in self._rests(token, path) if len(rest) <= limit and self.fits(rest)), None)

    def after(self, token: int, path: Path, limit: int) -> Path | None:
        """Return the path that `carry` would return, for a matcher that has not accepted `token` yet."""
        for rest in self._rests(token, path):
            if len(rest) <= limit and self.fits((token, *rest)):
                return rest
        return None

    def carry_on(self, token: int, path: Path, limit: int) -> Path | None:
        """Return the result of `carry`, else an end of `path`, from one of its joints on, that may follow `token`."""
        found = self.carry(token, path, limit)
        if found is None:
            found = next((rest for rest in self._ends(path) if len(rest) <= limit and self.fits(rest)), None)
        return found

    def join(self, token: int, path: Path, limit: int) -> Path | None:
        """Return a path after `token` that is the end of `path`, from one of its joints on; the shortest such path.

        The matcher is before `token`. A token that ends a value early or writes it differently leaves this path.
        """
        for rest in self._ends(path):
            if len(rest) <= limit and self.fits((token, *rest)):
                return rest
        return None

    def after_next(self, token: int, path: Path, limit: int) -> Path | None:
        """Return the result of `carry` one token later, for a `token` that is half of an escape or of a character."""

        def ask() -> Path | None:
            for choice in choices_of(self.mask(), self._texts)[:_MAX_HALVES]:
                rest = self.after(choice, path, limit - 1)
                if rest is not None:
                    return (choice, *rest)
            return None

        return self._behind(token, ask)

    def leads(self, token: int, path: Path) -> bool:
        """Return whether `path` leads to the end after `token`."""
        return self.fits((token, *path))

    def legal_after(self, path: Path) -> list[int]:
        """Return every token that may follow `path`. A long list spends all of the work and raises WorkSpentError."""
        taken = 0
        try:
            for token in path:
                if not self._accept(token):
                    return []
                taken += 1
            words = self.mask()
            self._spend(count_tokens(words) // 8)
            return token_ids(words, self._texts.num_words * 32)
        finally:
            self._back(taken)

    def find_after(self, token: int, limit: int, work: int) -> Path | None:
        """Return a path of at most `limit` tokens after `token`, found with at most `work` of the remaining units."""
        reserved = max(0, self.work - work - _ACCEPT_WORK)
        self.work -= reserved
        try:
            return self._behind(token, lambda: self.find(limit, any_will_do=True))
        finally:
            self.work += reserved

    # -- inside -------------------------------------------------------------------------------------------------------

    def _within(self, depth: int, limit: int, any_will_do: bool) -> Path | None:
        """Return a path of at most `limit` tokens that had at most `depth` tokens before it was spelled anew."""
        best: Path | None = None
        ended, trail, decisions = self._descend((), depth)
        if ended:
            best = self._better(trail, None, limit)
        if best and any_will_do:
            return best
        tried = 0
        with contextlib.suppress(WorkSpentError):
            while tried < len(decisions) and not (any_will_do and best):
                at, choices = decisions[tried]
                tried += 1
                for choice in choices:
                    # Once an end is known, only a shorter path is of interest.
                    shorter = len(trail) - 1 if ended else depth
                    reached, other, more = self._descend((*trail[:at], choice), shorter)
                    if reached and any_will_do and len(other) <= limit:
                        return other
                    if reached:
                        best, trail, ended = self._better(other, best, limit), other, True
                        if any_will_do and best:
                            return best
                        # Continue with the decisions of the new path that come after this one.
                        decisions = [*decisions[:tried], *(d for d in more if d[0] > at)]
        return best

    def _descend(self, start: Path, depth: int) -> tuple[bool, Path, list[tuple[int, Path]]]:
        """Accept `start`, then the first choice of each row.

        Returns whether the descent reached a stop token, its tokens, and its decisions: pairs of a position and the
        choices that were not taken there. If the same choices repeat, the first one leads nowhere, so the descent takes
        the next ones.
        """
        taken: list[int] = []
        before: list[int] = []
        again = 0
        decisions: list[tuple[int, Path]] = []
        try:
            for token in start:
                if not self._accept(token):
                    return False, tuple(taken), []
                taken.append(token)
            while len(taken) < depth:
                words = self.mask()
                stop = self._stop(words)
                if stop is not None:
                    return True, (*taken, stop), decisions
                if self._part_ends:
                    words = words.copy()  # the next mask is written in the same place
                    if end := self._take_end(words):
                        taken += end
                        continue
                choices = choices_of(words, self._texts)
                again = again + 1 if choices == before else 0
                before = choices
                turn = max(0, again - _MAX_EQUAL_ROWS) % max(1, len(choices))
                if (
                    choices
                    and taken
                    and choices[turn] == taken[-1]
                    and len(self._texts.texts[taken[-1]]) < _WORDLIKE_BYTES
                ):
                    turn = (turn + 1) % len(choices)
                if len(choices) > 1:
                    decisions.append((len(taken), tuple(choices[:turn] + choices[turn + 1 :])))
                if not choices or not self._accept(choices[turn]):
                    break
                taken.append(choices[turn])
            return False, tuple(taken), decisions
        finally:
            self._back(len(taken))

    def _take_end(self, words: Words) -> Path | None:
        """Accept a text of `ends` that ends something in the present state, whose row is `words`; return its tokens.

        None: no text does.
        """
        for end in self._part_ends:
            if not has_token(words, end[0]) or not self.fits(end):
                continue
            taken, ended = 0, False
            try:
                for token in end:
                    if not has_token(self.mask() if taken else words, token) or not self._accept(token):
                        break
                    taken += 1
                ended = taken == len(end) and not is_text(self.mask())
            finally:
                if not ended:
                    self._back(taken)
            if ended:
                return end
        return None

    def _better(self, trail: Path, best: Path | None, limit: int) -> Path | None:
        """Return the shorter of `best` and a trail, which is spelled in fewer tokens where that is legal."""
        limit = min(limit, len(best) - 1 if best else limit)
        with contextlib.suppress(WorkSpentError):
            spelled = self.along(self._texts.text(trail[:-1]), min(limit, len(trail)))
            if spelled is not None:
                return spelled
        return trail if len(trail) <= limit else best

    def _behind(self, token: int, ask: Callable[[], T]) -> T | None:
        """Return the result of `ask` with the matcher after `token`; None where the token is illegal."""
        if not self._accept(token):
            return None
        try:
            return ask()
        finally:
            self._back(1)

    def _stop(self, words: Words) -> int | None:
        return next((stop for stop in self._texts.stop_ids if has_token(words, stop)), None)

    def _accept(self, token: int) -> bool:
        self._spend(_ACCEPT_WORK)
        return self.matcher.accept(token)

    def _ends(self, path: Path) -> list[Path]:
        """Return the ends of `path` that begin at a joint of its text, the shortest first."""
        if path is not self._ended:
            text = self._texts.text(path[:-1])
            spelled = [self._texts.spell(text, at) for at in _joints(text)]
            self._ended = path
            self._ended_rests = [(*tokens, path[-1]) for tokens in spelled if tokens is not None]
        return self._ended_rests

    def _rests(self, token: int, path: Path) -> Iterator[Path]:
        """Yield what may be left of `path` when `token` has written the beginning of its text, the shortest first."""
        if path is not self._carried:
            self._carried, self._carried_text, self._carried_rests = path, self._texts.text(path[:-1]), {0: path}
        text, rests = self._carried_text, self._carried_rests
        for cut in _cuts(self._texts.texts[token], text):
            if cut not in rests:
                left = self._texts.spell(text, cut)
                rests[cut] = None if left is None else (*left, path[-1])
            rest = rests[cut]
            if rest is not None:
                yield rest

    def _back(self, count: int) -> None:
        if count:
            self.matcher.rollback(count)

    def _spend(self, units: int) -> None:
        if self.work < units:
            raise WorkSpentError
        self.work -= units

    def __repr__(self) -> str:
        return f"<Search work={self.work}>"


def _joints(text: bytes) -> list[int]:
    """Return the places of a text next to its brackets, quotation marks, commas and colons, the last one first.

    Where there are more than _MAX_JOINTS, the first ones.
    """
    found = sorted({at for match in _JOINT.finditer(text) for at in (match.start(), match.end())} - {0})
    return found[_MAX_JOINTS - 1 :: -1] if len(found) > _MAX_JOINTS else found[::-1]


def _cuts(new: bytes, text: bytes) -> list[int]:
    """Return how many bytes of `text` a token with the bytes `new` may have written, the largest number first.

    None, one, the common prefix, and the longest prefix of `text` that ends `new`.
    """
    if not text:
        return [0]
    most = min(len(new), len(text))
    common = 0
    while common < most and new[common] == text[common]:
        common += 1
    cuts = {0, 1, common}
    if text[:1] in new:
        cuts.add(next((n for n in range(most, 0, -1) if new.endswith(text[:n])), 0))
    return sorted(cuts, reverse=True)


def is_text(words: Words, number: int | None = None) -> bool:
    """Return whether a row has so many legal tokens that it is free text.

    Args:
        words: the row, int32 [W].
        number: its number of legal tokens, where the caller knows it.
    """
    number = count_tokens(words) if number is None else number
    return number > _TEXT_TOKENS or 4 * number > 32 * len(words)


def choices_of(words: Words, texts: TokenTexts) -> list[int]:
    """Return the tokens of a row that a search tries, the best first; at least one where any token is legal.

    A function of only the row and the vocabulary. A search meets the same rows again and again, so the last ones are
    remembered: the list is shared, and the caller must not change it.
    """
    row = words.tobytes()
    found = texts.choices.get(row)
    if found is None:
        if len(texts.choices) >= _MAX_REMEMBERED_ROWS:
            texts.choices.clear()
        found = texts.choices[row] = _choices(words, texts)
    return found


def _choices(words: Words, texts: TokenTexts) -> list[int]:
    number = count_tokens(words)
    legal = has_tokens(words, texts.structure)
    out: list[int] = []
    if is_text(words, number):
        # Within free text brackets are also text; only a quotation mark is sure to end something.
        out += texts.structure[legal & texts.quoted][:2].tolist()
        out += texts.words[has_tokens(words, texts.words)][:1].tolist()
        out += texts.punctuation[has_tokens(words, texts.punctuation)][:4].tolist()
        return list(dict.fromkeys(out)) or token_ids(words, texts.num_words * 32)[:_MAX_CHOICES]
    found = texts.structure[legal]
    cheap = int((texts.cost[legal] <= 0.3).sum())
    out += found[: min(cheap, _MAX_CHOICES)].tolist()
    if number <= _FEW_TOKENS:
        out += _names(token_ids(words, _FEW_TOKENS), texts.texts)
    else:
        out += texts.words[has_tokens(words, texts.words)][:1].tolist()
        out += texts.punctuation[has_tokens(words, texts.punctuation)][:2].tolist()
    out += found[cheap : cheap + 2].tolist()
    return list(dict.fromkeys(out)) or token_ids(words, texts.num_words * 32)[:_MAX_CHOICES]


def _names(legal: Sequence[int], texts: Sequence[bytes]) -> list[int]:
    """Return tokens that continue in different ways, each the longest of its kind, and the shortest token of all."""
    longest = sorted((t for t in legal if texts[t] and not texts[t].isspace()), key=lambda t: (-len(texts[t]), t))
    out = longest[:1]
    for token in longest:
        if all(texts[token][0] != texts[other][0] for other in out):
            out.append(token)
    for token in (*longest[1:], *longest[-1:]):
        if len(out) < _MAX_CHOICES and not any(texts[other].startswith(texts[token]) for other in out):
            out.append(token)
    return list(dict.fromkeys([*out[:_MAX_CHOICES], *longest[-1:]]))
