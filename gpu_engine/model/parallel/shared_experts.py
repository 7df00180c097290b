"""Experts of a mixture over several engines: each engine holds some, and attends to its own batch (data-parallel
attention).

A row goes to the engines of its experts, and their outputs come back. Attention, routers, experts that every row takes,
and all that is not a mixture are whole on each engine. Invariant: a row's result has the bits that it has where all
experts are in one process: an expert's product does not depend on the rows that come with one, and its outputs are
weighted and added where the row came from, in the order of the experts. Not responsible for: which forwards run (see
peers.py), the experts (see model/experts.py).

Source: D. Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding",
arXiv:2006.16668, section 3.2 (the two all-to-all exchanges); attention by data as in DeepSeek-V3, arXiv:2412.19437,
section 3.4.

Shapes: N rows, k experts of a row, M = N * k pairs of a row and an expert, E experts, R ranks, H channels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from gpu_engine.model.experts import Experts
from gpu_engine.model.loaded_model import LoadedModel, ModelNotSupported
from gpu_engine.model.parallel.collectives import Collectives
from gpu_engine.model.parallel.rendezvous import SETTING
from gpu_engine.model.parallel.shards import Shard


class SharedExperts(nn.Module):
    """Replaces `inner`, of which it keeps the experts of `part`: (rows [N, H], chosen [N, k], weights [N, k]) ->
    [N, H].

    Args:
        enter: called when a forward comes here.
        like: an empty tensor [0, H] of the rows' dtype and device.
    """

    def __init__(
        self, inner: Experts, part: Shard, collectives: Collectives, enter: Callable[[], None], like: torch.Tensor
    ) -> None:
        super().__init__()
        self._parts = [Shard(rank, part.size).of(inner.count) for rank in range(part.size)]
        self._own, self._collectives, self._enter, self._like = part.of(inner.count), collectives, enter, like
        self.inner = inner
        inner.keep(self._own)

    def forward(self, hidden_states: torch.Tensor, chosen_Nk: torch.Tensor, weights_Nk: torch.Tensor) -> torch.Tensor:
        """Send the rows to their experts, and add what comes back. Raises RankLost."""
        E, k = self.inner.count, chosen_Nk.shape[1]
        expert_M = chosen_Nk.reshape(-1)
        pairs_M = torch.argsort(expert_M, stable=True)
        pairs_M = pairs_M[(expert_M[pairs_M] >= 0) & (expert_M[pairs_M] < E)]  # some routers leave a place empty
        counts_E = torch.bincount(expert_M[pairs_M], minlength=E)
        outputs_MH = self._of_experts(hidden_states[pairs_M // k], counts_E)
        out_NH = torch.zeros_like(hidden_states)
        for pairs, outputs in zip(pairs_M.split(counts_E.tolist()), outputs_MH.split(counts_E.tolist()), strict=True):
            rows = pairs // k
            part_NH = outputs * weights_Nk[rows, pairs % k, None]
            out_NH.index_add_(0, rows, part_NH.to(out_NH.dtype))
        return out_NH

    def without_rows(self) -> None:
        """Compute only the rows of other ranks. Raises RankLost."""
        self._of_experts(self._like, torch.zeros(self.inner.count, dtype=torch.int64))

    def _of_experts(self, rows_MH: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """Return the experts' outputs, [M, H], of rows in the order of their experts; `counts_E` are each one's."""
        self._enter()
        counts_RE = self._collectives.every(counts_E)
        sent_R = [int(counts_E[part.start : part.stop].sum()) for part in self._parts]
        own_RE = counts_RE[:, self._own.start : self._own.stop]
        received_R = own_RE.sum(dim=1).tolist()
        theirs_MH = self._collectives.swap(rows_MH, sent_R, received_R)
        outputs_MH = torch.empty_like(theirs_MH)
        # The rows came by rank, and by expert within a rank.
        expert_M = torch.arange(len(self._own)).repeat(len(own_RE)).repeat_interleave(own_RE.reshape(-1))
        for expert, number in enumerate(self._own):
            (places,) = torch.where(expert_M == expert)
            if len(places):
                outputs_MH[places] = self.inner.one(number, theirs_MH[places])
        return self._collectives.swap(outputs_MH, received_R, sent_R)


def mixtures_of(model: LoadedModel) -> list[tuple[nn.Module, str, Experts]]:
    """Return the experts of a model with their parent and their name there, in the order of a forward.

    Raises ModelNotSupported for a model without any, and for one with experts of a form that cannot be shared.
    """
    found: list[tuple[nn.Module, str, Experts]] = []
    for parent in model.net.modules():
        for name, child in parent.named_children():
            if type(child) is Experts:
                found.append((parent, name, child))
            elif isinstance(child, Experts) or isinstance(getattr(child, "gate_up_proj", None), nn.Parameter):
                raise ModelNotSupported(
                    f"{SETTING}: the experts {type(child).__name__} of {model.model_type} are not shared"
                )
    if not found:
        raise ModelNotSupported(f"{SETTING}: {model.model_type} has no experts to share")
    return found


def fingerprint(model: LoadedModel) -> str:
    """Return what two engines must have in common: family, dtype, form of the products, and weights.

    The weights are the first rows of every parameter that is not packed, embeddings and routers among them: no rank
    gives those away.
    """
    digest = hashlib.sha256()
    for name, tensor in model.net.named_parameters():
        first = tensor.detach()[:256].contiguous()
        digest.update(name.encode() + first.view(torch.uint8).numpy().tobytes())
    form = "quantised" if model.quantised else "whole"
    return f"{model.model_type} {model.dtype_name} {form} {digest.hexdigest()[:16]}"


def share_experts(model: LoadedModel, part: Shard, group: Any) -> None:
    """Replace every mixture of `model` by one whose experts are divided over the ranks of `group`, a `Peers`."""
    layers: list[SharedExperts] = []
    width = model.net.config.get_text_config().hidden_size
    like = torch.empty(0, width, dtype=model.dtype, device=model.device)
    for number, (parent, name, experts) in enumerate(mixtures_of(model)):
        shared = SharedExperts(experts, part, group.collectives, partial(group.enter, number), like)
        setattr(parent, name, shared)
        layers.append(shared)
    group.share([layer.without_rows for layer in layers])
    # Modules of an expert see rows of every rank, or none.
    inner = {f"{name}." for name, module in model.net.named_modules() if isinstance(module, SharedExperts)}
    model.outputs = {
        name: spec for name, spec in model.outputs.items() if not any(name.startswith(each) for each in inner)
    }
