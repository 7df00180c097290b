"""A tokenizer for llguidance in which every token that is not special is text, added tokens such as `<tool_call>` too.

The library takes each added token in angle brackets of a tokenizer.json for a special one, which no text contains. Here
the bytes of the tokens are given to it, and it calls back for the canonical tokens of a text that must follow.
Invariant: a token without bytes (special, stop, padding) is also special for the library.
Not responsible for: the library's own reading of tokenizer.json (see backend.py).
"""

from __future__ import annotations

from llguidance import LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from grammar_service.grammar.token_bytes import TokenBytes
from grammar_service.grammar.vocabulary import Vocabulary


class _Tokens:
    """What `TokenizerWrapper` reads."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, tokenizer_json: str) -> None:
        texts = TokenBytes.of(vocabulary).texts
        self.eos_token_id = vocabulary.stop_ids[0]
        self.tokens = [text or f"<[{token}]>".encode() for token, text in enumerate(texts)]
        self.special_token_ids = [token for token, text in enumerate(texts) if not text]
        self._tokenizer = Tokenizer.from_str(tokenizer_json)

    def __call__(self, text: bytes) -> list[int]:
        """Return the canonical tokens of UTF-8 text. The library calls this from any thread."""
        return list(self._tokenizer.encode(text.decode(), add_special_tokens=False).ids)


def native_tokenizer(vocabulary: Vocabulary, tokenizer_json: str) -> LLTokenizer:
    """Return the tokenizer. `tokenizer_json` has no names of special tokens that could occur in a text."""
    tokens = TokenizerWrapper(_Tokens(vocabulary, tokenizer_json))
    return LLTokenizer(tokens, n_vocab=vocabulary.size, eos_token=list(vocabulary.stop_ids))
