"""The distance of a model's logits from a reference's, over a fixed text: perplexity, KL divergence, equal best tokens.

Invariant: logits come from the code that serves (`LoadedModel.logits` over paged memory), and both models see the same
windows. Not responsible for: loading, answers and the table (see quantisation.py).

Shapes: P tokens of a window, V columns of the logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.loader import LoadedModel
from kernels.forward import Forward
from kernels.kv_pages import KVPages

PAGE = 16
"""Tokens of a page, as a server has it by default."""
_ROWS = 64
"""Positions that are compared at once: float32 log-probabilities of a whole window would take 100 MB and more."""


@dataclass(slots=True)
class Divergence:
    """Sums over the scored tokens of a text. A token is scored when its window has a token in front of it."""

    tokens: int = 0
    nll: float = 0.0
    """Negative log-likelihood of the text's own tokens, in nats."""
    kl: float = 0.0
    """KL(reference || model) over the vocabulary, in nats."""
    same_best: int = 0
    """Positions where both have the same best token; of equal logits, the smaller id counts as the best."""

    def add(self, ids_P: torch.Tensor, logits_PV: torch.Tensor, reference_PV: torch.Tensor) -> None:
        """Score one window: row p of the logits predicts token p + 1, so the last row is not used.

        `ids_P` int64; the logits in any float dtype, with rows behind each other or not. Nothing is kept.
        """
        for begin in range(0, len(ids_P) - 1, _ROWS):
            rows = slice(begin, min(begin + _ROWS, len(ids_P) - 1))
            logs_PV, reference_logs_PV = (x_PV[rows].double().log_softmax(-1) for x_PV in (logits_PV, reference_PV))
            targets_P1 = ids_P[rows.start + 1 : rows.stop + 1, None]
            self.tokens += len(targets_P1)
            self.nll -= float(logs_PV.gather(1, targets_P1).sum())
            terms_PV = reference_logs_PV.exp() * (reference_logs_PV - logs_PV)
            # A column that the reference excludes has probability 0 and adds nothing; 0 * inf would be NaN.
            self.kl += float(terms_PV.masked_fill_(reference_logs_PV.isneginf(), 0.0).sum())
            self.same_best += int((logits_PV[rows].argmax(-1) == reference_PV[rows].argmax(-1)).sum())

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood; NaN without tokens."""
        return math.exp(self.nll / self.tokens) if self.tokens else math.nan

    @property
    def mean_kl(self) -> float:
        """Nats a token; NaN without tokens."""
        return self.kl / self.tokens if self.tokens else math.nan

    @property
    def same_best_share(self) -> float:
        """Share of the positions with the same best token; NaN without tokens."""
        return self.same_best / self.tokens if self.tokens else math.nan


def windows(ids: Sequence[int], size: int) -> list[torch.Tensor]:
    """Cut `ids` into windows of `size` tokens, int64; the last may be shorter. A rest of one token scores nothing and
    is left out.

    Raises:
        ValueError: `size` is below 2, or there are fewer than two tokens.

    """
    if size < 2:
        raise ValueError("window: must be at least 2")
    if len(ids) < 2:
        raise ValueError(f"text: has {len(ids)} tokens, and 2 are the least")
    cut = [torch.tensor(ids[at : at + size], dtype=torch.int64) for at in range(0, len(ids), size)]
    return [window for window in cut if len(window) > 1]


class WindowLogits:
    """Runs one model over windows of at most `size` tokens. Owns one sequence's KV pages, which each window reuses."""

    def __init__(self, model: LoadedModel, size: int) -> None:
        self._model = model
        pages = -(-size // PAGE)
        self._pages: list[KVPages] = model.allocate_pages(pages, PAGE)
        self._table_BN = torch.arange(pages, dtype=torch.int32)[None]

    @torch.inference_mode()
    def __call__(self, ids_P: torch.Tensor) -> torch.Tensor:
        """Return [P, V]; the next call may overwrite it."""
        positions_BP = torch.arange(len(ids_P), dtype=torch.int32)[None]
        return self._model.logits(ids_P[None], AttentionContext(self._pages, self._table_BN, positions_BP))

    def __repr__(self) -> str:
        return f"<WindowLogits of {self._model!r}>"


def divergence(
    model: LoadedModel,
    reference: LoadedModel,
    texts: Sequence[torch.Tensor],
    on_window: Callable[[], None] = lambda: None,
) -> Divergence:
    """Compare `model` with `reference` over the windows `texts`. A model compared with itself runs once a window."""
    size = max(len(window) for window in texts)
    ours = WindowLogits(model, size)
    theirs = ours if model is reference else WindowLogits(reference, size)
    total = Divergence()
    for ids_P in texts:
        logits_PV = ours(ids_P)
        total.add(ids_P, logits_PV, logits_PV if theirs is ours else theirs(ids_P))
        on_window()
    return total


def weight_bytes(model: LoadedModel) -> int:
    """Return the bytes of the weights and tables that a loaded model holds, copies included.

    These are all tensors that its modules and its fused parts refer to; KV pages, scratch memory and logits do not
    count.
    """
    sizes: dict[int, int] = {}
    for tensor in _tensors(model):
        # oneDNN's packed weights have no storage of torch's, and no two share one.
        if tensor.is_mkldnn:
            sizes[id(tensor)] = tensor.numel() * tensor.element_size()
        else:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(sizes.values())


def _tensors(model: LoadedModel) -> Iterator[torch.Tensor]:
    """Yield every tensor that the model or its fused parts refer to; one tensor comes once."""
    seen: set[int] = set()
    waiting: list[Any] = [model.net, model.fused]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            yield item
        else:
            waiting += _referred(item)


_HOLDERS = ("torch.nn.", "transformers.models.", "gpu_engine.model.", "kernels.")
"""Packages whose objects hold weights."""


def _referred(item: Any) -> list[Any]:
    if isinstance(item, dict):
        return list(item.values())
    if isinstance(item, list | tuple):
        return list(item)
    if isinstance(item, type | KVPages) or not type(item).__module__.startswith(_HOLDERS):
        return []
    slots = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
    fields = [*getattr(item, "__dict__", {}).values(), *(getattr(item, name) for name in slots if hasattr(item, name))]
    # The native forward's own tensors are its scratch memory and its logits.
    return [field for field in fields if not (isinstance(item, Forward) and isinstance(field, torch.Tensor))]
