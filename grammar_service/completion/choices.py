"""Which tokens of a row the search for an answer's end tries, and in which order.

Invariant: a function of the row and the vocabulary alone. Not here: the search (closing_search.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from grammar_service.completion.texts import TokenTexts
from grammar_service.grammar.mask_rows import Words, count_tokens, has_tokens, token_ids

_FREE = 4096
"""So many legal tokens, or a quarter of a small vocabulary: free text, where most tokens mean the same."""
_FEW = 256
"""At most so many: a name or a value out of a list, to be read token by token."""
_CHOICES = 4
_MEMORY = 1024
"""Rows whose choices are remembered: 16 KiB each with 128k tokens."""


def is_text(words: Words, number: int | None = None) -> bool:
    """Say whether so many tokens (`number`, if that is known) are legal that they are text."""
    number = count_tokens(words) if number is None else number
    return number > _FREE or 4 * number > 32 * len(words)


def choices_of(words: Words, texts: TokenTexts) -> list[int]:
    """Return the tokens of a row to try, the best first; at least one where any is legal. Not the caller's to change.

    A search comes to the same rows again and again: the last ones are remembered.
    """
    row = words.tobytes()
    found = texts.choices.get(row)
    if found is None:
        if len(texts.choices) >= _MEMORY:
            texts.choices.clear()
        found = texts.choices[row] = _choices(words, texts)
    return found


def _choices(words: Words, texts: TokenTexts) -> list[int]:
    number = count_tokens(words)
    legal = has_tokens(words, texts.structure)
    out: list[int] = []
    if is_text(words, number):
        # Brackets are text here; only quotes are sure to mean something.
        out += texts.structure[legal & texts.quoted][:2].tolist()
        out += texts.words[has_tokens(words, texts.words)][:1].tolist()
        out += texts.punctuation[has_tokens(words, texts.punctuation)][:4].tolist()
        return list(dict.fromkeys(out)) or token_ids(words, texts.num_words * 32)[:_CHOICES]
    found = texts.structure[legal]
    cheap = int((texts.cost[legal] <= 0.3).sum())
    out += found[: min(cheap, _CHOICES)].tolist()
    if number <= _FEW:
        out += _names(token_ids(words, _FEW), texts.texts)
    else:
        out += texts.words[has_tokens(words, texts.words)][:1].tolist()
        out += texts.punctuation[has_tokens(words, texts.punctuation)][:2].tolist()
    out += found[cheap : cheap + 2].tolist()
    return list(dict.fromkeys(out)) or token_ids(words, texts.num_words * 32)[:_CHOICES]


def _names(legal: Sequence[int], texts: Sequence[bytes]) -> list[int]:
    """Return tokens that go on in different ways, each as far as one token can, and the shortest of all."""
    longest = sorted((t for t in legal if texts[t] and not texts[t].isspace()), key=lambda t: (-len(texts[t]), t))
    out = longest[:1]
    for token in longest:
        if all(texts[token][0] != texts[other][0] for other in out):
            out.append(token)
    for token in (*longest[1:], *longest[-1:]):
        if len(out) < _CHOICES and not any(texts[other].startswith(texts[token]) for other in out):
            out.append(token)
    return list(dict.fromkeys([*out[:_CHOICES], *longest[-1:]]))
