"""The distance of a model's logits from a reference's, over a fixed text: perplexity, KL divergence, equal best tokens.

Invariant: logits come from the code that serves (`LoadedModel.logits` over paged memory), and both models see the same
windows. Not responsible for: loading, answers and the table (see quantisation.py).

Shapes: P tokens of a window, V columns of the logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.loader import LoadedModel
from kernels.kv_pages import KVPages

PAGE = 16
"""Tokens of a page, as a server has it by default."""
_ROWS = 64
"""Positions that are compared at once: float32 log-probabilities of a whole window would take 100 MB and more."""


@dataclass(slots=True)
class Divergence:
    """Sums over the scored tokens of a text. A token is scored when its window has a token before it."""

    tokens: int = 0
    nll: float = 0.0
    """Negative log-likelihood of the text's own tokens, in nats."""
    kl: float = 0.0
    """KL(reference || model) over the vocabulary, in nats."""
    same_best: int = 0
    """Positions where both have the same best token; of equal logits, the smaller id counts as the best."""

    def add(self, ids_P: torch.Tensor, logits_PV: torch.Tensor, reference_PV: torch.Tensor) -> None:
        """Score one window: row p of the logits predicts token p + 1, so the last row is not used.

        `ids_P` int64; the logits in any float dtype, with rows after each other or not. Nothing is kept.
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
    """Runs one model over windows of at most `size` tokens. Owns one sequence's KV pages, which each window reuses.

    `dtype`: of keys and values; None: the model's.
    """

    def __init__(self, model: LoadedModel, size: int, dtype: torch.dtype | None = None) -> None:
        self._model = model
        pages = -(-size // PAGE)
        self._pages: list[KVPages] = model.allocate_pages(pages, PAGE, dtype=dtype)
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
    dtype: torch.dtype | None = None,
) -> Divergence:
    """Compare `model` with `reference` over the windows `texts`. A model compared with itself runs once a window.

    `dtype`: of the keys and values of `model`; None: the model's.
    """
    size = max(len(window) for window in texts)
    ours = WindowLogits(model, size, dtype)
    theirs = ours if model is reference else WindowLogits(reference, size)
    total = Divergence()
    for ids_P in texts:
        logits_PV = ours(ids_P)
        total.add(ids_P, logits_PV, logits_PV if theirs is ours else theirs(ids_P))
        on_window()
    return total
