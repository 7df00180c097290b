"""Fused replacements of a decoder layer's modules: norm, gated block, attention.

Invariant: each has the arguments and the result of the module that it replaces, so that the model's own forward also
runs over them. Not responsible for: choosing the modules to replace (see fusion.py).
"""

from __future__ import annotations

import enum
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gpu_engine.model.attention import AttentionContext, LayerAttention, context_of_forward
from gpu_engine.model.experts import Experts
from gpu_engine.model.linear import InvariantLinear
from kernels.fused import Activation, HeadForm, RMSNorm, gated, rms_norm
from kernels.fused_arguments import KeyValues
from kernels.fused_attention import QkvAttention
from kernels.kv_pages import KVPages
from kernels.mixture import Choice

Sources = dict[str, tuple[tuple[str, int], ...]]
"""By a fused part's product: the modules of the model that it has joined, with their outputs."""


class FusedNorm(nn.Module):
    """A norm in one kernel."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.norm = norm

    @property
    def weight(self) -> torch.Tensor:
        """The norm's weight, whose dtype some decoders read."""
        return self.norm.weight_H

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Norm the last dimension of [..., H]."""
        rows_NH = hidden_states.reshape(-1, hidden_states.shape[-1])
        return rms_norm(rows_NH, self.norm).view(hidden_states.shape)


class FusedGated(nn.Module):
    """down(act(gate(x)) * up(x)) with one product for gate and up, or down(act(up(x))) if `act` has no gate."""

    def __init__(self, gate_up: nn.Module, down: nn.Module, act: Activation) -> None:
        super().__init__()
        self.gate_up, self.down, self.act = gate_up, down, act
        self._gate_up, self._down = gate_up.forward, down.forward
        self._in_one: Callable[[torch.Tensor, Activation], torch.Tensor] | None = None
        self._apart: Callable[[], bool] | None = None
        """Whether the forward that runs needs the outputs of `gate_up` itself; None: none does."""
        self.sources: Sources = {}

    def products(self) -> list[tuple[str, nn.Module]]:
        """Return the products by name, in the order of their use."""
        return [("gate_up", self.gate_up), ("down", self.down)]

    def replace_product(self, name: str, product: nn.Module, apart: Callable[[], bool] | None = None) -> None:
        """Multiply by `product` instead of the one of that name. The activation then has its own kernel in the
        forwards in which `apart` returns True; None: in all."""
        setattr(self, name, product)
        self._gate_up, self._down, self._apart = self.gate_up.forward, self.down.forward, apart
        if apart is None:
            self._in_one = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]."""
        return self.of_rows(x.reshape(-1, x.shape[-1])).view(x.shape)

    def of_rows(self, x_NH: torch.Tensor) -> torch.Tensor:
        """[N, H] -> [N, H]."""
        in_one = self._in_one if self._apart is None or not self._apart() else None
        active_NI = in_one(x_NH, self.act) if in_one else gated(self._gate_up(x_NH), self.act)
        out_NH: torch.Tensor = self._down(active_NI)
        return out_NH

    def join_activation(self) -> bool:
        """Put the activation at the end of the product's kernel, where there is one that agrees; return whether."""
        if self.act.has_gate and isinstance(self.gate_up, InvariantLinear) and self.gate_up.gates_in_one(self.act):
            self._in_one = self.gate_up.gated
        return self._in_one is not None


class MixedBlock(nn.Module):
    """A mixture of experts in the place of a gated block: the model's own module, and a product after it, which is
    none at first."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.down: nn.Module = nn.Identity()

    def products(self) -> list[tuple[str, nn.Module]]:
        """Return the mixture by itself: nothing is known about its products."""
        return [("inner", self.inner)]

    def replace_product(self, name: str, product: nn.Module) -> None:
        """Put `product` after the mixture. `name` is "down"."""
        setattr(self, name, product)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[B, P, H] -> [B, P, H]."""
        return self.of_rows(hidden_states.reshape(-1, hidden_states.shape[-1])).view(hidden_states.shape)

    def of_rows(self, x_NH: torch.Tensor) -> torch.Tensor:
        """[N, H] -> [N, H]."""
        out = self.inner(x_NH[None])
        rows_NH: torch.Tensor = self.down((out[0] if isinstance(out, tuple) else out).view(x_NH.shape))
        return rows_NH


class ChosenExperts(MixedBlock):
    """A mixture of a known form: a row takes experts by the outputs of a router, and adds them with their weights.

    Args:
        inner: the model's own module, which keeps its place.
        router_EH: the router's weights.
        router_bias_E: the router's; None: it has none.
        choice: what becomes of the router's outputs.
        act: of the experts.
        shared: the name in `inner` of the expert that every row takes; None: there is none.
        shared_gate_H: float32, see `Mixture`.
    """

    def __init__(
        self,
        inner: nn.Module,
        router_EH: torch.Tensor,
        router_bias_E: torch.Tensor | None,
        choice: Choice,
        act: Activation,
        shared: str | None = None,
        shared_gate_H: torch.Tensor | None = None,
    ) -> None:
        super().__init__(inner)
        self.router_EH, self.router_bias_E = router_EH, router_bias_E
        self.choice, self.act, self._shared, self.shared_gate_H = choice, act, shared, shared_gate_H

    def products(self) -> list[tuple[str, nn.Module]]:
        """Return the experts' products. Where they are packed, so is the router's (see experts.py)."""
        experts = self.experts
        if experts is None:
            return super().products()
        both = (("gate_up", experts.gate_up), ("down", experts.down))
        products = [(f"{name}.{number}", product) for name, of in both for number, product in enumerate(of)]
        if self._shared is not None:
            shared = self.shared
            of_shared = [("", self.inner)] if shared is None else shared.products()
            products += [(f"shared.{name}", product) for name, product in of_shared]
        return products

    @property
    def experts(self) -> Experts | None:
        """The experts; None: the module has others by now."""
        return next((child for child in self.inner.children() if type(child) is Experts), None)

    @property
    def has_shared(self) -> bool:
        """Whether there is an expert that every row takes."""
        return self._shared is not None

    @property
    def shared(self) -> FusedGated | None:
        """The expert that every row takes; None: there is none, or it is not fused."""
        shared = None if self._shared is None else self.inner.get_submodule(self._shared)
        return shared if isinstance(shared, FusedGated) else None


class ExpertsAndBlock(ChosenExperts):
    """The sum of a mixture and of a gated block with the same input, which is like an expert that every row takes
    (Granite 4)."""

    def __init__(self, mixture: ChosenExperts, block: FusedGated) -> None:
        super().__init__(mixture.inner, mixture.router_EH, mixture.router_bias_E, mixture.choice, mixture.act)
        self._block = block

    def products(self) -> list[tuple[str, nn.Module]]:
        """Return those of the mixture and of the block."""
        return [*super().products(), *((f"shared.{name}", product) for name, product in self._block.products())]

    @property
    def has_shared(self) -> bool:
        """True."""
        return True

    @property
    def shared(self) -> FusedGated:
        """The block."""
        return self._block

    def of_rows(self, x_NH: torch.Tensor) -> torch.Tensor:
        """[N, H] -> [N, H]."""
        return super().of_rows(x_NH) + self._block.of_rows(x_NH)


class ExpertsApart(ExpertsAndBlock):
    """The same where the experts have an input of their own, and all have norms after them (Gemma 4).

    The module that holds the router and the experts is the layer. In the model the router has a norm and scales of its
    own before its product; `router_EH` is that product over the experts' input.
    """

    def __init__(
        self, mixture: ChosenExperts, block: FusedGated, pre: RMSNorm, post: RMSNorm, post_block: RMSNorm
    ) -> None:
        super().__init__(mixture, block)
        self.pre, self.post, self.post_block = pre, post, post_block

    def of_both(self, x_NH: torch.Tensor, stream_NH: torch.Tensor) -> torch.Tensor:
        """[N, H] -> [N, H]. `x_NH`: the block's input; `stream_NH`: the residual stream."""
        layer: Any = self.inner
        _, weights_Nk, chosen_Nk = layer.router(stream_NH)
        experts_NH = layer.experts(rms_norm(stream_NH, self.pre), chosen_Nk, weights_Nk)
        block_NH = rms_norm(self._block.of_rows(x_NH), self.post_block)
        return block_NH + rms_norm(experts_NH, self.post)


class Rotation(enum.Enum):
    """The channels of a head that are rotated together, and what the model's rotary embedding gives for them.

    R channels rotate. They are pairs of halves, i and i + R / 2, or pairs of neighbours, 2 i and 2 i + 1.
    """

    HALVES = enum.auto()
    """Pairs of halves; the model gives an angle for each channel (Llama)."""
    HALVES_BY_PAIR = enum.auto()
    """Pairs of halves; the model gives R / 2 angles, one for each pair (gpt-oss)."""
    NEIGHBOURS = enum.auto()
    """Pairs of neighbours; the model gives an angle for each channel (Cohere)."""
    NEIGHBOURS_REPEATED = enum.auto()
    """Pairs of neighbours; the model gives the pairs' angles twice, one after the other (GLM 4, ERNIE 4.5)."""
    NONE = enum.auto()
    """Nothing rotates, whatever angles the model gives (the layers of SmolLM 3 without positions)."""

    @property
    def of_neighbours(self) -> bool:
        """Whether neighbours are pairs."""
        return self in (Rotation.NEIGHBOURS, Rotation.NEIGHBOURS_REPEATED)

    def angles(self, cos_NR: torch.Tensor, sin_NR: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines that `rotate` takes, from the model's."""
        if self is Rotation.NONE:
            return torch.ones_like(cos_NR), torch.zeros_like(sin_NR)
        if self is Rotation.HALVES_BY_PAIR:
            return torch.cat([cos_NR, cos_NR], dim=1), torch.cat([sin_NR, sin_NR], dim=1)
        if self is Rotation.NEIGHBOURS:
            return torch.cat([cos_NR[:, ::2], cos_NR[:, 1::2]], 1), torch.cat([sin_NR[:, ::2], sin_NR[:, 1::2]], 1)
        return cos_NR, sin_NR


class RowAttention(nn.Module, ABC):
    """An attention over the pages, in transformers' place or in a whole forward."""

    layer_idx: int
    """Its place in the cache."""
    shape: LayerAttention
    key_values: KeyValues = KeyValues.OWN
    """Where its keys and values come from."""

    @abstractmethod
    def products(self) -> list[tuple[str, nn.Module]]:
        """Return the products by name, in the order of their use."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """[B, P, H] -> ([B, P, H], None), as transformers' attention modules."""
        B, P, H = hidden_states.shape
        if position_embeddings is None:
            cos, sin = no_angles(hidden_states, B * P)
        else:
            cos, sin = (angles_by_row(part, B) for part in position_embeddings)
        out_NH = self.attend(hidden_states.reshape(B * P, H), cos, sin, context_of_forward())
        return out_NH.view(B, P, H), None

    @abstractmethod
    def attend(
        self, x_NH: torch.Tensor, cos_NR: torch.Tensor, sin_NR: torch.Tensor, ctx: AttentionContext
    ) -> torch.Tensor:
        """[N, H] -> [N, H]; row b * P + j is position j of sequence b. Rows of prompts are after those of the batch."""


def attend_by_sequence(
    ctx: AttentionContext,
    num_rows: int,
    run: Callable[[slice, torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Attend to each prompt, then to the batch, whose rows may be the next tokens of those prompts.

    `run` returns [n, C] for some rows, their page table and their positions. Returns [num_rows, C], with zeros for
    padding.
    """
    begin = ctx.positions_BP.numel()
    parts = [(slice(0, begin), ctx.page_table_BN, ctx.positions_BP)] if begin else []
    if ctx.prompts is not None:
        prompts, ends = ctx.prompts, itertools.accumulate(ctx.prompts.counts, initial=begin)
        parts[:0] = [
            (
                slice(start, end),
                prompts.page_table_CN[c : c + 1],
                prompts.positions_N[None, start - begin : end - begin],
            )
            for c, (start, end) in enumerate(itertools.pairwise(ends))
        ]
    done = [(part[0], run(*part)) for part in parts]
    if len(done) == 1 and len(done[0][1]) == num_rows:
        return done[0][1]
    out_NC = done[0][1].new_zeros(num_rows, done[0][1].shape[1])
    for rows, out_nC in done:
        out_NC[rows] = out_nC
    return out_NC


class FusedAttention(RowAttention):
    """One product for q, k and v; head norms and rotary in one kernel; attention over the pages; the output product.

    Args:
        sinks_H: float32, the further logit of each query head; None: there is none.
        v_norm: of each value head.
        key_values: what `qkv` gives next to the queries.
        norms_last: the norms of queries and keys come after the rotation.
        q_norm, k_norm: RMSNorms of each head, or of all heads together if the weights have their size.
        query_factors_L: float32, what queries are multiplied by at each position; None: nothing.
        query_gates: after each query head, `qkv` gives as many channels of a gate: what the head attended to is
            multiplied by the sigmoid of it (Qwen 3.5).
    """

    def __init__(
        self,
        qkv: nn.Module,
        output: nn.Module,
        shape: LayerAttention,
        layer_idx: int,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        sinks_H: torch.Tensor | None = None,
        v_norm: RMSNorm | None = None,
        *,
        key_values: KeyValues = KeyValues.OWN,
        rotation: Rotation = Rotation.HALVES,
        norms_last: bool = False,
        query_gates: bool = False,
        query_factors_L: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.sinks_H, self.rotation = sinks_H, rotation
        self.query_gates, self.query_factors_L = query_gates, query_factors_L
        self.qkv, self.output, self.shape, self.layer_idx = qkv, output, shape, layer_idx
        self._qkv, self._output = qkv.forward, output.forward
        heads = (shape.num_heads, shape.num_kv_heads)
        self.q_norm, self.k_norm, self.v_norm, self.key_values = q_norm, k_norm, v_norm, key_values
        whole = q_norm is not None and len(q_norm.weight_H) != shape.head_dim
        self.heads = HeadForm(rotation.of_neighbours, whole, norms_last)
        numbers, norms = (shape.scale, shape.softcap, shape.window), (q_norm, k_norm)
        stores = key_values is not KeyValues.SHARED
        self._core = QkvAttention(heads, shape.head_dim, *numbers, *norms, sinks_H, self.heads, v_norm, stores=stores)
        self.sources: Sources = {}

    def products(self) -> list[tuple[str, nn.Module]]:
        """Return the products by name, in the order of their use."""
        return [("qkv", self.qkv), ("output", self.output)]

    def replace_product(self, name: str, product: nn.Module) -> None:
        """Multiply by `product` instead of the one of that name."""
        setattr(self, name, product)
        self._qkv, self._output = self.qkv.forward, self.output.forward

    def attend(
        self, x_NH: torch.Tensor, cos_NR: torch.Tensor, sin_NR: torch.Tensor, ctx: AttentionContext
    ) -> torch.Tensor:
        """See `RowAttention`."""
        pages, qkv_NC = ctx.pages[self.layer_idx], self._qkv(x_NH)
        if self.key_values is KeyValues.FROM_KEYS:
            keys = self.shape.num_kv_heads * self.shape.head_dim
            qkv_NC = torch.cat([qkv_NC, qkv_NC[:, -keys:]], dim=1)
        gate_NC = None
        if self.query_gates:
            qkv_NC, gate_NC = self._without_gates(qkv_NC)
        if self.query_factors_L is not None:
            queries = self.shape.num_heads * self.shape.head_dim
            qkv_NC[:, :queries] *= self.query_factors_L[_positions_of_rows(ctx, len(x_NH)), None]
        cos_NR, sin_NR = self.rotation.angles(cos_NR, sin_NR)
        if ctx.prompts is None:
            where = (pages, ctx.page_table_BN, ctx.positions_BP, ctx.tree_rows_BRR)
            out_NC = self._core(qkv_NC, cos_NR, sin_NR, *where)
        else:
            out_NC = self._attend_with_prompts(qkv_NC, cos_NR, sin_NR, pages, ctx)
        out_NH: torch.Tensor = self._output(out_NC if gate_NC is None else out_NC * torch.sigmoid(gate_NC))
        return out_NH

    def _without_gates(self, qkv_NC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the queries, keys and values, and the gates of the queries."""
        N, Hq, D = len(qkv_NC), self.shape.num_heads, self.shape.head_dim
        queries_NH2D = qkv_NC[:, : 2 * Hq * D].view(N, Hq, 2, D)
        q_NC, gate_NC = (queries_NH2D[:, :, part].reshape(N, Hq * D) for part in (0, 1))
        return torch.cat([q_NC, qkv_NC[:, 2 * Hq * D :]], dim=1), gate_NC

    def _attend_with_prompts(
        self,
        qkv_NC: torch.Tensor,
        cos_NR: torch.Tensor,
        sin_NR: torch.Tensor,
        pages: KVPages,
        ctx: AttentionContext,
    ) -> torch.Tensor:
        def run(rows: slice, page_table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return self._core(qkv_NC[rows], cos_NR[rows], sin_NR[rows], pages, page_table, positions)

        return attend_by_sequence(ctx, len(qkv_NC), run)


def join_activations(model: nn.Module) -> int:
    """Join the activation of every fused gated block to its product, where that has a kernel; return how many."""
    return sum(module.join_activation() for module in model.modules() if isinstance(module, FusedGated))


def _positions_of_rows(ctx: AttentionContext, num_rows: int) -> torch.Tensor:
    """Return the position of each row [num_rows] of a forward; padding, also after the rows of prompts, has 0."""
    prompts = () if ctx.prompts is None else (ctx.prompts.positions_N,)
    positions_N = torch.cat([ctx.positions_BP.flatten(), *prompts]).clamp(min=0)
    return nn.functional.pad(positions_N, (0, num_rows - len(positions_N)))


def no_angles(x: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines [N, 0]: no channel is rotated. `x` gives device and dtype."""
    none_N0 = x.new_zeros(num_rows, 0)
    return none_N0, none_N0


def angles_by_row(part_BPR: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """Return a rotary embedding's cosines or sines [B or 1, P, R] as [N, R], contiguous."""
    _, P, R = part_BPR.shape
    return part_BPR.expand(num_sequences, P, R).reshape(num_sequences * P, R)
