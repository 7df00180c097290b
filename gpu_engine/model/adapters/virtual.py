"""The embeddings of prompt adapters: virtual tokens, whose ids are after the vocabulary's.

A sequence with a prompt adapter begins with those ids, and the embedding of the model returns the adapter's rows for
them. Invariant: the table that a forward reads is never written; a load makes a new one. Not responsible for: which
sequence begins with which ids (see gpu_engine/front/prompt.py).

Shapes: V rows of the model's embedding, T virtual tokens of one adapter, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gpu_engine.model.adapters.peft_files import AdapterNotSupported, PromptFiles


class VirtualEmbeddings:
    """Owned by an adapter pool. `put` and `remove` are for any thread, one at a time.

    Args:
        embedding: of the model. Its calls return the adapters' rows as well.
        vocab_size: columns of the logits.
        refusal: why this server takes no prompt adapters; "" where it does.
    """

    def __init__(self, embedding: nn.Module, vocab_size: int, refusal: str = "") -> None:
        weight: Any = embedding.weight
        self._rows, self._hidden = int(weight.shape[0]), int(weight.shape[1])
        self._refusal = refusal
        if self._rows < vocab_size:
            self._refusal = f"the embedding has {self._rows} rows for {vocab_size} tokens"
        self.table_VH: torch.Tensor | None = None
        """float32, for the ids from V on; None: there is no prompt adapter."""
        self._places: dict[int, tuple[int, int]] = {}
        """By the adapter's number: its rows [begin, end) of the table."""
        self._ids: torch.Tensor | None = None
        embedding.register_forward_pre_hook(self._before)
        embedding.register_forward_hook(self._after)

    def check(self, files: PromptFiles) -> None:
        """Raise AdapterNotSupported where the embeddings do not fit the model."""
        refuse_unlike(files, self._hidden, self._refusal)

    def put(self, number: int, files: PromptFiles) -> int:
        """Take an adapter's embeddings; return the id of its first token."""
        rows_TH, begin = files.embeddings_TH.float(), 0
        for start, end in sorted(self._places.values()):
            if start - begin >= len(rows_TH):
                break
            begin = end
        self._places[number] = (begin, begin + len(rows_TH))
        table_VH = torch.zeros(max(end for _, end in self._places.values()), self._hidden)
        if self.table_VH is not None:
            kept = min(len(table_VH), len(self.table_VH))
            table_VH[:kept] = self.table_VH[:kept]
        table_VH[begin : begin + len(rows_TH)] = rows_TH
        self.table_VH = table_VH
        return self._rows + begin

    def remove(self, number: int) -> None:
        """Release the rows of an adapter, which no sequence uses."""
        del self._places[number]
        if self.table_VH is not None:
            end = max((end for _, end in self._places.values()), default=0)
            self.table_VH = self.table_VH[:end].clone() if end else None

    def _before(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if self.table_VH is None or not bool((args[0] >= self._rows).any()):
            return None
        self._ids = args[0]
        return args[0].clamp(max=self._rows - 1), *args[1:]

    def _after(self, module: nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor | None:
        ids, self._ids = self._ids, None
        if ids is None:
            return None
        assert self.table_VH is not None
        virtual = ids >= self._rows
        out = out.clone()
        out[virtual] = self.table_VH[ids[virtual] - self._rows].to(out.dtype)
        return out

    def __repr__(self) -> str:
        return f"<VirtualEmbeddings of {len(self._places)} adapters>"


def refuse_unlike(files: PromptFiles, hidden: int, refusal: str) -> None:
    """Raise AdapterNotSupported where the server takes no prompt adapters, for the reason `refusal`, or where the
    embeddings are not of `hidden` finite numbers each."""
    rows_TH = files.embeddings_TH
    if refusal:
        raise AdapterNotSupported(f"peft_type: PROMPT_TUNING is not taken: {refusal}")
    if rows_TH.shape[1] != hidden:
        has, wanted = list(rows_TH.shape), [len(rows_TH), hidden]
        raise AdapterNotSupported(f"prompt_embeddings: has the shape {has}, and the model needs {wanted}")
    if not rows_TH.isfinite().all():
        raise AdapterNotSupported("prompt_embeddings: has a number that is not finite")
