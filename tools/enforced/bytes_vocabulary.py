"""A vocabulary of the 256 bytes and a stop token.

Invariant: token i is byte i, so each text has exactly one spelling and a result for tokens is a result for texts.
"""

from __future__ import annotations

import json

from grammar_service.grammar.vocabulary import Vocabulary

STOP = 256


def bytes_vocabulary() -> Vocabulary:
    """Return the vocabulary, as a byte-level BPE tokenizer without merges."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    texts = [chr(byte) if byte in printable else chr(256 + moved.index(byte)) for byte in range(256)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    added = {"id": STOP, "content": "<|end|>", "single_word": False, "lstrip": False, "rstrip": False}
    document = {
        "version": "1.0",
        "added_tokens": [{**added, "normalized": False, "special": True}],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {text: i for i, text in enumerate([*texts, "<|end|>"])}, "merges": []},
    }
    return Vocabulary.load(json.dumps(document).encode(), STOP + 1, (STOP,))
