"""What is known of a grammar's answers before their first token: a short way to the end, and a proven minimum length.

Invariant: a plan is a function of only the grammar and the vocabulary. It is found within a bounded amount of work,
never changes, and is shared by every answer to the grammar. `min_tokens` is never above the length of the shortest
answer; when the work ends early it is only lower.

Not responsible for: the answers themselves (see budget.py).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from grammar_service.backends.backend import Matcher, MatcherFailed
from grammar_service.completion.growth import growth_of
from grammar_service.completion.search import Path, Search, WorkSpentError
from grammar_service.completion.texts import TokenTexts
from grammar_service.grammar.structural_tag import formats

START_WORK = 2_000
"""Units of work for the way from the start of an answer to its end."""
MIN_TOKENS_WORK = 500
MAX_START_PATH = 512
"""Tokens. A compile worker does not look for a longer way to the end."""
MARGIN = range(12, 129)
_LARGEST_ESTIMATE = 64
"""Largest margin of a grammar whose growth is only estimated from the length of its text."""
_MAX_ENDS = 4
_SLACK = 6
"""Tokens by which a way that is found may be longer than the shortest one."""
_MIN_COUNT = re.compile(r'"min(?:Length|Items|Properties)"\s*:\s*(\d{1,9})|\{(\d{1,9})')
"""A minimum count is short in the grammar and long in the answer: in JSON Schema, and in a pattern, EBNF or Lark."""


@dataclass(frozen=True, slots=True)
class CompletionPlan:
    """What is known of a grammar before its first token. Immutable, shared by its matchers."""

    texts: TokenTexts
    path: Path | None
    """A short way from the start of an answer to its end; None: not found."""
    min_tokens: int
    """No answer has fewer tokens, the stop token included."""
    margin: int
    """Spare tokens below which rows are narrowed. One token may make the way to the end longer, but by less."""
    single_token_cost: int
    """Extra work units for the most expensive single-token mask seen."""
    longest_way: int | None = None
    """No state of an answer is further from its end, in tokens; None: not known."""
    ends: tuple[str, ...] = ()
    """Texts with which the grammar ends its parts (`ends_of`)."""

    @staticmethod
    def of(matcher: Matcher, source: str, texts: TokenTexts) -> CompletionPlan:
        """Look ahead from the start of an answer: milliseconds, at most about 200. Raises no error of the matcher.

        For a compile worker: the search asks the library for the cost of a row (`num_jump_forward_bytes`) before it
        fills the row.
        """
        path, minimum = None, 1
        # Copies of a matcher remember what was measured.
        if certain := matcher.num_jump_forward_bytes():
            minimum += -(-certain // max(map(len, texts.texts)))
        ends = ends_of(source)
        search = Search(matcher.copy(), texts, START_WORK, ends=ends, measures=True)
        try:
            path = search.find(MAX_START_PATH)
            if path is None:
                # A long certain text, such as the beginning of a tool call, takes the depth of the short searches.
                other = Search(matcher.copy(), texts, START_WORK, ends=ends, measures=True)
                path = other.find(MAX_START_PATH, any_will_do=True)
            minimum = max(minimum, min_tokens(matcher.copy(), texts, MIN_TOKENS_WORK))
        except MatcherFailed:
            path = None
        growth = growth_of(source, lambda text: len(texts.spell(text.encode("utf-8", "replace")) or text))
        wanted = growth.by_one_token + _SLACK if growth else _estimated_margin(source, path)
        margin = min(max(wanted, MARGIN.start), MARGIN.stop - 1)
        longest = growth.longest_way if growth else None
        return CompletionPlan(texts, path, minimum, margin, search.single_token_cost, longest, ends)

    def to_wire(self) -> dict[str, Any]:
        """Return the plan as plain JSON, without the vocabulary."""
        return {
            "path": self.path,
            "min_tokens": self.min_tokens,
            "margin": self.margin,
            "single_token_cost": self.single_token_cost,
            "longest_way": self.longest_way,
            "ends": list(self.ends),
        }

    @staticmethod
    def from_wire(wire: Any, texts: TokenTexts) -> CompletionPlan:
        """Return the plan that `to_wire` turned into `wire`. Raises ValueError if `wire` is not such a value."""
        match wire:
            case {
                "path": list() | None as path,
                "min_tokens": int(minimum),
                "margin": int(margin),
                "single_token_cost": int(cost),
                "longest_way": int() | None as longest,
                "ends": list() as ends,
            } if minimum > 0 and margin in MARGIN and cost >= 0 and (longest is None or longest >= 0):
                known = all(type(token) is int and 0 <= token < len(texts.texts) for token in path or ())
                if known and all(isinstance(end, str) for end in ends):
                    way = None if path is None else tuple(path)
                    return CompletionPlan(texts, way, minimum, margin, cost, longest, tuple(ends))
        raise ValueError("the completion plan cannot be read")

    def closing_at(self, max_tokens: int) -> int:
        """Return at which token a phase before the answer must end, so that the answer fits into `max_tokens`.

        The answer keeps its known way and the margin, or half of what the way leaves if few tokens remain.
        """
        beyond = max_tokens - len(self.path or ())
        return beyond - min(self.margin, beyond // 2)

    def is_far(self, tokens_left: int) -> bool:
        """Return whether a row at the start of an answer needs no look-ahead with so many tokens left."""
        return self.path is not None and tokens_left - len(self.path) >= self.margin

    def __repr__(self) -> str:
        return f"<CompletionPlan path={len(self.path or ())} min_tokens={self.min_tokens} margin={self.margin}>"


def ends_of(source: str) -> tuple[str, ...]:
    """Return the texts that end a part of an answer to a structural tag with free text inside, at most _MAX_ENDS.

    The ones of free text come first. Every other grammar has none: brackets and quotation marks end its parts.
    """
    if not source.startswith("{") or ('"any_text"' not in source and '"style"' not in source):
        return ()  # most grammars, without reading them
    try:
        document = json.loads(source)
    except ValueError:  # a regular expression or a grammar
        return ()
    of_text, others = dict[str, None](), dict[str, None]()
    for _, node in formats(document.get("format"), ""):
        content, end = node.get("content"), node.get("end")
        if isinstance(content, dict) and isinstance(end, str) and end:
            is_text = content.get("type") == "any_text" or content.get("style") == "text"
            (of_text if is_text else others)[end] = None
    return tuple(of_text | others)[:_MAX_ENDS] if of_text else ()


def min_tokens(matcher: Matcher, texts: TokenTexts, work: int) -> int:
    """Return a proven lower bound on the tokens of an answer, the stop token included; 1 says nothing.

    Breadth first over every legal token, as far as `work` units go. States after the same text count as one state.
    """
    search = Search(matcher, texts, work, measures=True)
    layer: dict[bytes, Path] = {b"": ()}
    seen: set[bytes] = {b""}
    length = 1
    try:
        while layer:
            next_layer: dict[bytes, Path] = {}
            for text, path in layer.items():
                for token in search.legal_after(path):
                    if token in texts.stop_ids:
                        return length
                    longer = text + texts.texts[token]
                    if longer not in seen:
                        seen.add(longer)
                        next_layer[longer] = (*path, token)
            layer = next_layer
            length += 1
    except (WorkSpentError, MatcherFailed):
        return length
    return length


def _estimated_margin(source: str, path: Path | None) -> int:
    """Return a margin for a grammar that growth.py does not read.

    One token opens a part of the grammar at most. Eight bytes of grammar per answer token are a safe estimate.
    """
    return min(_LARGEST_ESTIMATE, max(len(source) // 8 + _sum_of_minimum_counts(source), 4 + len(path or ())))


def _sum_of_minimum_counts(source: str) -> int:
    """Return the sum of the minimum repetition counts that a grammar's text names."""
    return sum(int(in_schema or in_pattern) for in_schema, in_pattern in _MIN_COUNT.findall(source))
