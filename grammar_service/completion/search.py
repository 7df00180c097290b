"""The search for an answer's end: from a matcher's state, few tokens that complete it, the stop token included.

Invariant: what is found depends on the state and the bounds alone, never on time: work is counted in steps of the
matcher. What is not found may exist. A `Path` is legal token by token, under the masks that the engine samples with.
Every method leaves the matcher where it was; one that fails (MatcherFailed) is of no use any more.

How: depth first, what closes most comes first (`TokenTexts.structure`); then each decision of the best path is taken
otherwise once, and the rest found again, while there is work left (limited discrepancies, Harvey and Ginsberg 1995).
The text of a path is then spelled anew in the fewest tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from grammar_service.backends.backend import Matcher, Rows, chain_filler_of
from grammar_service.completion.choices import choices_of
from grammar_service.completion.texts import TokenTexts
from grammar_service.grammar.mask_rows import Words, count_tokens, has_token, token_ids

T = TypeVar("T")
Path = tuple[int, ...]
"""Tokens to the end; the last one is a stop token."""

_PATIENCE = 3
"""So often the first choice is taken when the choices are the same."""
_WORDLIKE = 4
"""Bytes of a token that may well follow itself; a shorter one is a digit or a mark."""
_SHALLOW = 48
"""The first try goes so deep; a grammar that can go on for ever is left by then."""
_HALVES = 2
"""Tokens that are tried as the second half of something."""
_ACCEPT, _FILL = 1, 8
"""Units of work; measured, a fill takes five to ten times as long as an accept."""
_BYTES_A_UNIT = 32
"""Of text that can only go one way: where a library tokenizes all of it for a row, 100 KB take 25 ms."""


class WorkSpentError(Exception):
    """The bound on the work is reached."""


class Search:
    """Looks ahead with a matcher of its own.

    Args:
        matcher: a copy, to be moved.
        texts: of its vocabulary.
        work: units that may be spent in all.
        toll: units that a row of one token costs beyond those of any row.
        measures: what such a row costs is asked for before it is filled, and `toll` becomes the most that was met.
    """

    def __init__(
        self, matcher: Matcher, texts: TokenTexts, work: int, *, toll: int = 0, measures: bool = False
    ) -> None:
        self.matcher = matcher
        self.work = work
        self.toll = toll
        self._measures = measures
        self._texts = texts
        self._filler = chain_filler_of(matcher)
        self._words = np.zeros(texts.num_words, dtype=np.int32)
        self._rows = Rows(self._words[None])

    def mask(self) -> Words:
        """Return the row of the present state; valid until the next call of any method."""
        units = self.matcher.num_jump_forward_bytes() // _BYTES_A_UNIT if self._measures else 0
        self.toll = max(self.toll, units)
        self._spend(_FILL + units)
        self.matcher.fill(self._rows, 0)
        if not self._measures and self.toll and count_tokens(self._words) == 1:
            self._spend(self.toll)
        return self._words

    def find(self, most: int, *, any_will_do: bool = False) -> Path | None:
        """Return a path of at most `most` tokens or None: with `any_will_do` the first one met, else a short one."""
        best: Path | None = None
        with contextlib.suppress(WorkSpentError):
            for depth in (_SHALLOW, 4 * _SHALLOW, 16 * _SHALLOW):
                best = self._within(min(depth, 2 * most + 8), most, any_will_do)
                if best is not None or depth >= 2 * most + 8:
                    break
        return best

    def along(self, text: bytes, most: int) -> Path | None:
        """Return a path of at most `most` tokens that spells `text` under the masks and then stops, or None."""
        taken: list[int] = []
        try:
            spelled = self._texts.spell(text)
            while spelled is not None and len(taken) < most:
                words = self.mask()
                if not spelled:
                    stop = self._stop(words)
                    return None if stop is None else (*taken, stop)
                token = spelled[0]
                if not has_token(words, token):
                    # A text that can only go one way has its own spelling in some libraries' masks.
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
        """Say whether the matcher takes `tokens` to the end."""
        taken = 0
        try:
            taken = self._accept_plain(tokens)
            for token in tokens[taken:]:
                if not self._accept(token):
                    return False
                taken += 1
            return True
        finally:
            self._back(taken)

    def carry(self, token: int, path: Path, most: int) -> Path | None:
        """Return a path from here, just behind `token`, given one from before it: its text, or what is left of it.

        None when those do not fit or are longer than `most`. Tokens are legal for the matcher, not always in a mask.
        """
        texts = self._texts
        text, new = texts.text(path[:-1]), texts.texts[token]
        for cut in sorted(set(_cuts(new, text)), reverse=True):
            left = texts.spell(text[cut:])
            rest = path if cut == 0 else None if left is None else (*left, path[-1])
            if rest is not None and len(rest) <= most and self.fits(rest):
                return rest
        return None

    def after(self, token: int, path: Path, most: int) -> Path | None:
        """Return what `carry` finds behind `token`."""
        return self._behind(token, lambda: self.carry(token, path, most))

    def after_next(self, token: int, path: Path, most: int) -> Path | None:
        """Return what `carry` finds one token later: `token` is half of something, an escape or a character."""

        def ask() -> Path | None:
            for choice in choices_of(self.mask(), self._texts)[:_HALVES]:
                rest = self.after(choice, path, most - 1)
                if rest is not None:
                    return (choice, *rest)
            return None

        return self._behind(token, ask)

    def leads(self, token: int, path: Path) -> bool:
        """Say whether `path` leads to the end behind `token`."""
        return bool(self._behind(token, lambda: self.fits(path)))

    def legal_after(self, path: Path) -> list[int]:
        """Return every token that may follow `path`; a long list costs more work than there is."""
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

    def find_after(self, token: int, most: int, work: int) -> Path | None:
        """Return a path of at most `most` tokens behind `token`, with at most `work` of the work left."""
        kept = max(0, self.work - work - _ACCEPT)
        self.work -= kept
        try:
            return self._behind(token, lambda: self.find(most, any_will_do=True))
        finally:
            self.work += kept

    # -- inside -------------------------------------------------------------------------------------------------------

    def _within(self, depth: int, most: int, any_will_do: bool) -> Path | None:
        """Look for a path that is no longer than `depth` before it is spelled anew."""
        best: Path | None = None
        ended, trail, decisions = self._descend((), depth)
        if ended:
            best = self._better(trail, None, most)
        tried = 0
        with contextlib.suppress(WorkSpentError):
            while tried < len(decisions) and not (any_will_do and best):
                at, choices = decisions[tried]
                tried += 1
                for choice in choices:
                    # Once an end is known, only what is shorter is of interest.
                    shorter = len(trail) - 1 if ended else depth
                    reached, other, more = self._descend((*trail[:at], choice), shorter)
                    if reached:
                        best, trail, ended = self._better(other, best, most), other, True
                        if any_will_do and best:
                            return best
                        # Go on with the decisions of this path that lie behind this one.
                        decisions = [*decisions[:tried], *(d for d in more if d[0] > at)]
        return best

    def _descend(self, start: Path, depth: int) -> tuple[bool, Path, list[tuple[int, Path]]]:
        """Take `start`, then the first choice each time; return whether it ends, the tokens, where there were others.

        Where the same choices come again and again, the first one leads nowhere: then it is the others' turn.
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
                choices = choices_of(words, self._texts)
                again = again + 1 if choices == before else 0
                before = choices
                turn = max(0, again - _PATIENCE) % max(1, len(choices))
                if choices and taken and choices[turn] == taken[-1] and len(self._texts.texts[taken[-1]]) < _WORDLIKE:
                    turn = (turn + 1) % len(choices)
                if len(choices) > 1:
                    decisions.append((len(taken), tuple(choices[:turn] + choices[turn + 1 :])))
                if not choices or not self._accept(choices[turn]):
                    break
                taken.append(choices[turn])
            return False, tuple(taken), decisions
        finally:
            self._back(len(taken))

    def _better(self, trail: Path, best: Path | None, most: int) -> Path | None:
        """Return the better of a trail, spelled in fewer tokens where that is legal, and `best`."""
        limit = min(most, len(best) - 1 if best else most)
        with contextlib.suppress(WorkSpentError):
            spelled = self.along(self._texts.text(trail[:-1]), min(limit, len(trail)))
            if spelled is not None:
                return spelled
        return trail if len(trail) <= limit else best

    def _behind(self, token: int, ask: Callable[[], T]) -> T | None:
        """Return what `ask` says with the matcher behind `token`; None where it is illegal."""
        if not self._accept(token):
            return None
        try:
            return ask()
        finally:
            self._back(1)

    def _stop(self, words: Words) -> int | None:
        return next((stop for stop in self._texts.stop_ids if has_token(words, stop)), None)

    def _accept(self, token: int) -> bool:
        self._spend(_ACCEPT)
        return self.matcher.accept(token)

    def _accept_plain(self, tokens: Path) -> int:
        """Move over all but the last, up to the first illegal one, in one call if there is one; return how many."""
        plain = tokens[:-1]
        if self._filler is None or len(plain) > self.work or not self._filler.all_plain(plain):
            return 0
        taken = self._filler.accept(self.matcher, plain)
        self._spend(_ACCEPT * taken)  # as one by one
        return taken

    def _back(self, count: int) -> None:
        if count:
            self.matcher.rollback(count)

    def _spend(self, units: int) -> None:
        if self.work < units:
            raise WorkSpentError
        self.work -= units

    def __repr__(self) -> str:
        return f"<Search work={self.work}>"


def _cuts(new: bytes, text: bytes) -> Iterator[int]:
    """How much of `text` a token may stand for: all that it begins with, what its end begins with, nothing."""
    common = 0
    while common < min(len(new), len(text)) and new[common] == text[common]:
        common += 1
    yield from (0, min(1, len(text)), common)
    yield next((n for n in range(min(len(new), len(text)), 0, -1) if new.endswith(text[:n])), 0)
