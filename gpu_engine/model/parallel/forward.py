"""The forward of a model over several ranks: rank 0 announces it, and every rank runs its part.

Each layer has two sums over the ranks, after the attention's output product and after the block's last product. So
the residual stream has the same bits on every rank. Invariant: a rank keeps only the keys and values of its own heads,
in pages with the numbers of rank 0's; only rank 0 schedules, samples, drafts and has grammars.
Not responsible for: the parts of the weights (see shards.py), the collectives (see collectives.py).

Shapes: B sequences, P positions, N pages of a sequence, V columns of the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.fused_forward import FusedForward
from gpu_engine.model.fused_layers import FusedAttention
from gpu_engine.model.parallel.collectives import Call, Collectives, Message
from kernels.kv_pages import KVPages, copy_page


class PartForward(Protocol):
    """The forward of one rank's part, with the sums in it."""

    @property
    def layers(self) -> Sequence[object]:
        """Its layers."""

    def logits(self, ids_BP: torch.Tensor, ctx: AttentionContext) -> torch.Tensor:
        """Return this rank's columns, [B * P, S]."""

    def fill(self, ids_BP: torch.Tensor, ctx: AttentionContext) -> None:
        """Write keys and values, and the states that `ctx.hidden` wants."""


class SummedProduct(nn.Module):
    """A product of which each rank has some inputs: its output is the sum over the ranks."""

    def __init__(self, own: nn.Module, collectives: Collectives) -> None:
        super().__init__()
        self.own, self._collectives = own, collectives

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, inputs of this rank] -> [N, H]."""
        return self._collectives.sum(self.own(x))


def add_over_ranks(forward: FusedForward, collectives: Collectives) -> None:
    """Make the sums a part of each layer, in place."""
    for layer in forward.layers:
        assert layer.recurrent is None, "a model with recurrent layers is not divided"
        assert isinstance(layer.attention, FusedAttention), "latent attention is not divided"
        assert layer.gated is not None
        layer.attention.replace_product("output", SummedProduct(layer.attention.output, collectives))
        layer.gated.replace_product("down", SummedProduct(layer.gated.down, collectives))


@dataclass(frozen=True, slots=True, eq=False)
class LeadingForward:
    """The forward of rank 0, which has the other ranks run theirs."""

    own: PartForward
    collectives: Collectives
    vocab_size: int

    @property
    def skips_padding(self) -> bool:
        """False: padding is computed like any row."""
        return False

    @property
    def takes_prompts(self) -> bool:
        """False: rank 0 tells the others only of the batch."""
        return False

    def logits(self, ids_BP: torch.Tensor, ctx: AttentionContext) -> torch.Tensor:
        """Return [B * P, V]. Raises RankLost."""
        self._announce(Call.LOGITS, ids_BP, ctx)
        whole_NV = self.collectives.gather(self.own.logits(ids_BP, ctx), self.vocab_size)
        assert whole_NV is not None, "rank 0 gets the logits"
        return whole_NV

    def fill(self, ids_BP: torch.Tensor, ctx: AttentionContext) -> None:
        """Write keys and values on every rank, and here the states that `ctx.hidden` wants. Raises RankLost."""
        through = ctx.hidden is not None and len(self.own.layers) in ctx.hidden
        self._announce(Call.FILL_THROUGH if through else Call.FILL, ids_BP, ctx)
        self.own.fill(ids_BP, ctx)

    def _announce(self, call: Call, ids_BP: torch.Tensor, ctx: AttentionContext) -> None:
        B, P = ids_BP.shape
        self.collectives.send(call, B, P, tensors=(ids_BP, ctx.positions_BP, ctx.page_table_BN))

    def __repr__(self) -> str:
        return f"<LeadingForward of {self.collectives.size} ranks, {self.own}>"


Allocate = Callable[[int, int], list[KVPages]]
"""From a number of pages and a page size to the cache of a rank's heads, one entry a layer."""


class Follower:
    """Runs what rank 0 announces, on another rank on a CPU."""

    def __init__(self, forward: PartForward, collectives: Collectives, allocate: Allocate) -> None:
        self._forward, self._collectives, self._allocate = forward, collectives, allocate
        self._pages: list[KVPages] = []

    @torch.inference_mode()
    def run(self) -> None:
        """Follow until rank 0 is gone. Raises RankLost."""
        while True:
            self._do(self._collectives.receive())

    def _do(self, message: Message) -> None:
        if message.call is Call.ALLOCATE:
            self._pages = self._allocate(*message.numbers[:2])
        elif message.call is Call.COPY:
            copy_page(self._pages, *message.numbers[:2])
        else:
            B, P = message.numbers[:2]
            run_part(self._forward, self._collectives, self._pages, message.call, (B, P), message.payload)


def run_part(
    forward: PartForward, collectives: Collectives, pages: list[KVPages], call: Call, shape: tuple[int, int],
    payload: torch.Tensor,
) -> None:  # fmt: skip
    """Run this rank's part of a forward that rank 0 announced. `payload`: the tensors of `LeadingForward`, int32."""
    B, P = shape
    ids_BP, positions_BP = (part.view(B, P) for part in payload[: 2 * B * P].split(B * P))
    ctx = AttentionContext(pages, payload[2 * B * P :].view(B, -1), positions_BP)
    if call is Call.LOGITS:
        collectives.gather(forward.logits(ids_BP.long(), ctx), 0)
        return
    if call is Call.FILL_THROUGH:
        ctx.hidden = {len(forward.layers): None}
    forward.fill(ids_BP.long(), ctx)
