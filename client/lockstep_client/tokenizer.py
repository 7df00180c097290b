"""A server's tokenizer as a value: its vocabulary, its definition, and the tokens that end an answer.

The invariant: what `dump` writes, `load` reads back as an equal value, on any machine.

Not responsible for: tokenising (the server's `tokenize`, or the library `tokenizers` over `tokenizer_str`).
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep_client.answers import from_message
from lockstep_client.wire import engine_pb2 as pb

_FIELDS = ("encoded_vocab", "tokenizer_str", "stop_token_ids")


@dataclass(frozen=True, slots=True, repr=False)
class TokenizerInfo:
    """The data from which a client can build grammar tables, or a tokeniser.

    Attributes:
        encoded_vocab: each id's token, as the tokenizer writes it; empty for an id without a token.
        tokenizer_str: the text of the tokenizer's tokenizer.json.
        stop_token_ids: tokens that end a sequence.

    """

    encoded_vocab: tuple[str, ...]
    tokenizer_str: str
    stop_token_ids: tuple[int, ...]

    def dump(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file with the three attributes."""
        Path(path).write_text(json.dumps(asdict(self), ensure_ascii=False), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TokenizerInfo:
        """Read a file of `dump`. Raises OSError, and ValueError for a file that holds something else."""
        try:
            value = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: is no JSON: {error}") from error
        if not isinstance(value, dict) or sorted(value) != sorted(_FIELDS):
            raise ValueError(f"{os.fspath(path)}: must be a JSON object with {', '.join(_FIELDS)}")
        vocab, text, stops = (value[name] for name in _FIELDS)
        if not isinstance(text, str) or not _all(vocab, str) or not _all(stops, int):
            raise ValueError(f"{os.fspath(path)}: one of {', '.join(_FIELDS)} has the wrong type")
        return cls(tuple(vocab), text, tuple(stops))

    def __repr__(self) -> str:
        return f"<TokenizerInfo {len(self.encoded_vocab)} tokens>"


def _all(values: object, kind: type) -> bool:
    return isinstance(values, list) and all(isinstance(each, kind) for each in values)


def tokenizer_of(message: pb.GetTokenizerInfoResponse) -> TokenizerInfo:
    """Return the value of a message."""
    return from_message(TokenizerInfo, message)
