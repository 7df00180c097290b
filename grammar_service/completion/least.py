"""A number of tokens that no answer falls short of, proven: what a request with fewer can be refused for.

Invariant: the number is never above the length of the shortest answer; where the work ends early it is only lower. Not
here: an answer (closing_search.py).
"""

from __future__ import annotations

from grammar_service.backends.backend import Matcher, MatcherFailed
from grammar_service.completion.search import Path, Search, WorkSpentError
from grammar_service.completion.texts import TokenTexts


def least_tokens(matcher: Matcher, texts: TokenTexts, work: int) -> int:
    """Return a number of tokens, the stop token included, that no answer falls short of: proven, 1 proves nothing.

    Breadth first over every legal token, as far as `work` goes. States of the same text are one.
    """
    search = Search(matcher, texts, work, measures=True)
    layer: dict[bytes, Path] = {b"": ()}
    seen: set[bytes] = {b""}
    length = 1
    try:
        while layer:
            following: dict[bytes, Path] = {}
            for text, path in layer.items():
                for token in search.legal_after(path):
                    if token in texts.stop_ids:
                        return length
                    longer = text + texts.texts[token]
                    if longer not in seen:
                        seen.add(longer)
                        following[longer] = (*path, token)
            layer = following
            length += 1
    except (WorkSpentError, MatcherFailed):
        return length
    return length
