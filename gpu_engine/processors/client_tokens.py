"""Tokens that some clients may not get: a processor that is called for one sequence.

The server's setting has the tokens by client id, and a request has no arguments, so that a client cannot widen them. A
request that does not name the processor is not restricted: a gateway that must enforce it adds the name.

Shapes: R rows, V columns of the logits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from gpu_engine.api.processors import ProcessorRequest, ProcessorSetup, SequenceRows


class ForbiddenForClient:
    """Option `clients`: {client id: [tokens]}, or `file`: a JSON file with such an object. A token is an id, or a text
    that is one token. "" is a request without a client id; a client that is not there may get every token."""

    def __init__(self, setup: ProcessorSetup) -> None:
        options = dict(setup.options)
        clients = options.pop("clients", None)
        if (file := options.pop("file", None)) is not None:
            if clients is not None:
                raise ValueError("clients and file exclude each other")
            clients = json.loads(Path(file).read_text(encoding="utf-8"))
        if options or not isinstance(clients, dict):
            raise ValueError("needs the option clients, or file: an object of token ids by client id")
        self._ids = {client: self._checked(client, ids, setup) for client, ids in clients.items()}

    @staticmethod
    def _checked(client: str, tokens: Any, setup: ProcessorSetup) -> torch.Tensor:
        if not isinstance(tokens, list):
            raise ValueError(f"clients.{client} is not a list of tokens")
        return torch.tensor([_id_of(client, token, setup) for token in tokens], dtype=torch.int64, device=setup.device)

    def prepare(self, request: ProcessorRequest) -> torch.Tensor | None:
        """Return the ids that the client may not get. Raises ValueError for any argument."""
        if request.arguments:
            raise ValueError(f"knows no argument {next(iter(request.arguments))!r}")
        return self._ids.get(request.client_id)

    def process(self, rows: SequenceRows, logits_RV: torch.Tensor) -> torch.Tensor:
        """Forbid them."""
        return logits_RV if rows.arguments is None else logits_RV.index_fill_(1, rows.arguments, -torch.inf)


def _id_of(client: str, token: Any, setup: ProcessorSetup) -> int:
    """Return the id of a token or of a text. Raises ValueError."""
    if isinstance(token, str):
        (encoding,) = setup.tokenizer.backend_tokenizer.encode_batch_fast([token], add_special_tokens=False)
        if len(encoding.ids) != 1:
            raise ValueError(f"clients.{client}: {token!r} has {len(encoding.ids)} tokens, must be one")
        return int(encoding.ids[0])
    if type(token) is not int or not 0 <= token < setup.vocab_size:
        raise ValueError(f"clients.{client}: {token!r} is not a text or a token id in [0, {setup.vocab_size})")
    return token
