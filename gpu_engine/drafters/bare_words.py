"""The words of a vocabulary as they are spelled after a quote, for the lookup in a prompt.

A byte-level vocabulary and one of SentencePiece have two tokens for a word: one with the space before it, and one, or
several pieces, without. JSON writes a word after a quote, and the prompt has it after a space. Invariant: a spelling is
the tokenizer's own. Not responsible for: the lookup (see kernels/suffix.py).
"""

from __future__ import annotations

import logging
from typing import Any

from kernels.suffix import BareWords

log = logging.getLogger(__name__)

_SPACES = ("\u0120", "\u2581")
"""How a byte-level vocabulary writes a space, and SentencePiece."""
_QUOTE = '"'


def bare_words(tokenizer: Any, vocab_size: int) -> BareWords:
    """Return the words of a Rust tokenizer, for a model with so many columns of logits.

    A word begins with a letter or a digit. Words with characters outside ASCII have no spelling here, because a
    byte-level vocabulary does not show their text. It takes 0.2 to 0.4 s for 50,000 tokens.
    """
    vocab = {text: token for text, token in tokenizer.get_vocab().items() if token < vocab_size}
    found = {token: text[1:] for text, token in vocab.items() if text.startswith(_SPACES) and _is_word(text[1:])}
    texts = [_QUOTE, *(_QUOTE + word for word in found.values())]
    try:
        quote, *encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    except Exception as error:  # the library has no class of its own
        log.info("words after quotes are not looked up: the tokenizer cannot encode one: %s", error)
        return BareWords.of({}, (), vocab_size)
    before, spellings = len(quote.ids), {}
    for token, each in zip(found, encoded, strict=True):
        spelling = each.ids[before:]
        if each.ids[:before] == quote.ids and max(spelling, default=0) < vocab_size:
            spellings[token] = spelling
    return BareWords.of(spellings, (token for text, token in vocab.items() if text.endswith(_QUOTE)), vocab_size)


def _is_word(text: str) -> bool:
    return text.isascii() and text[:1].isalnum()
