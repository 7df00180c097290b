"""A vocabulary that is filled up encodes as before and has a token for every column."""

from __future__ import annotations

import json

import pytest
import tokenizers

from benchmarks.gpu.models import widened
from tests.fakes import byte_tokenizer


def wordy() -> tokenizers.Tokenizer:
    """A byte tokenizer with the words `the` and ` cat`."""
    made = json.loads(byte_tokenizer().to_str())
    vocab = made["model"]["vocab"]
    vocab |= {token["content"]: token["id"] for token in made["added_tokens"]}
    for added, pair in enumerate((("t", "h"), ("th", "e"), ("c", "a"), ("ca", "t"), ("\u0120", "cat"))):
        made["model"]["merges"].append(list(pair))
        vocab["".join(pair)] = 258 + added
    return tokenizers.Tokenizer.from_str(json.dumps(made))


def test_tokens_are_added_and_no_text_is_encoded_differently() -> None:
    plain = wordy()
    wide = tokenizers.Tokenizer.from_str(json.dumps(widened(json.loads(plain.to_str()), 264)))
    assert wide.get_vocab_size() == 264
    text = "the cat, the catthe"
    assert wide.encode(text).ids == plain.encode(text).ids
    assert sorted(wide.get_vocab().values()) == list(range(264))
    assert wide.decode([263]) == " catthe"


def test_more_than_pairs_can_fill_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size: 9999"):
        widened(json.loads(wordy().to_str()), 9999)
