"""The DFlash draft head as a module (z-lab, "DFlash: Block Diffusion for Flash Speculative Decoding", 2026).

A few decoder layers in the form of Qwen 3 draft a block in one forward. The block's rows are the embedding of the last
token and, after it, of mask tokens; the output at row j is the head's word on the token at j. Before the block
each layer sees the target's own text: hidden states of some target layers are fused to one for each position, and a
layer's key and value of that position come from it directly. In a layer with full attention the rows of a block see
each other; in a causal layer, such as one with a sliding window, a row sees none after it.

Invariant: names equal the names of the public checkpoints, so `state_dict` is the file. Embedding and output head are
the target's. Not responsible for: files (see dflash_files.py), its use as a draft net (see dflash.py).

Shapes: N rows, H hidden size, T fused target layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import LlamaConfig

from gpu_engine.drafters.heads.parts import Angles, GatedMlp, HeadNorm, rotate

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, q [N, heads, head_dim], k and v [N, kv_heads, head_dim] of the block's rows) -> [N, heads * head_dim]; rotary
is applied already."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What a layer's rows see of the context and of their block."""

    causal: bool
    window: int
    """In tokens; 0: none. A layer with one is causal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig:
    """What config.json of a head says."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    """Rows of the blocks that the head was trained on: the last token and the drafts."""
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    """The outputs of these target layers are fused; that of the last layer after the target's final norm."""
    kinds: tuple[LayerKind, ...]
    """One a layer."""
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    attention_bias: bool
    input_embedding_scale: float
    output_multiplier: float
    logits_softcap: float
    """0: none."""

    @property
    def max_drafts(self) -> int:
        """Drafts of a whole block."""
        return self.block_size - 1

    def rope_config(self) -> LlamaConfig:
        """Return what transformers' rotary embedding is made from."""
        rope = {"rope_type": "default"} | dict(self.rope_scaling or {}) | {"rope_theta": self.rope_theta}
        return LlamaConfig(
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters=rope,
        )


class DFlashAttention(nn.Module):
    """Projections, and norms of each head."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.shape, bias = (heads, kv_heads, width), config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, heads * width, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * width, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * width, bias=bias)
        self.o_proj = nn.Linear(heads * width, config.hidden_size, bias=bias)
        self.q_norm = HeadNorm(width, config.rms_norm_eps)
        self.k_norm = HeadNorm(width, config.rms_norm_eps)

    def queries(self, x_NH: torch.Tensor, cos_ND: torch.Tensor, sin_ND: torch.Tensor) -> torch.Tensor:
        """Return [N, heads, head_dim]."""
        heads, _, width = self.shape
        return rotate(self.q_norm(self.q_proj(x_NH).view(-1, heads, width)), cos_ND, sin_ND)

    def keys(self, x_NH: torch.Tensor, cos_ND: torch.Tensor, sin_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, [N, kv_heads, head_dim] each, of rows of a block or of fused states."""
        _, kv_heads, width = self.shape
        k_NGD = rotate(self.k_norm(self.k_proj(x_NH).view(-1, kv_heads, width)), cos_ND, sin_ND)
        return k_NGD, self.v_proj(x_NH).view(-1, kv_heads, width)


class DFlashLayer(nn.Module):
    """A decoder layer, over the rows of a block."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.self_attn = DFlashAttention(config)
        self.mlp = GatedMlp(config.hidden_size, config.intermediate_size)
        self.input_layernorm = HeadNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = HeadNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x_NH: torch.Tensor, cos_ND: torch.Tensor, sin_ND: torch.Tensor, layer: int, attend: Attend
    ) -> torch.Tensor:
        """Return the next hidden states, [N, H]."""
        h_NH, attention = self.input_layernorm(x_NH), self.self_attn
        q_NHD = attention.queries(h_NH, cos_ND, sin_ND)
        x_NH = x_NH + attention.o_proj(attend(layer, q_NHD, *attention.keys(h_NH, cos_ND, sin_ND)))
        out: torch.Tensor = x_NH + self.mlp(self.post_attention_layernorm(x_NH))
        return out


class DFlashHead(nn.Module):
    """The head."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = HeadNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList([DFlashLayer(config) for _ in config.kinds])
        self.norm = HeadNorm(config.hidden_size, config.rms_norm_eps)
        self.angles = Angles(config.rope_config())

    def context(self, states_NF: torch.Tensor, positions_N: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each layer's keys and values of positions whose target states, [N, T * H], are known."""
        fused_NH = self.hidden_norm(self.fc(states_NF))
        angles = self.angles(positions_N, fused_NH)
        return [cast(DFlashLayer, layer).self_attn.keys(fused_NH, *angles) for layer in self.layers]

    def forward(self, embeds_NH: torch.Tensor, positions_N: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Return what the target's output head turns into logits, [N, H], for the rows of blocks."""
        angles, x_NH = self.angles(positions_N, embeds_NH), embeds_NH
        for at, layer in enumerate(self.layers):
            x_NH = layer(x_NH, *angles, at, attend)
        out: torch.Tensor = self.norm(x_NH)
        return out

    def scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the target's head's logits as the head wants them."""
        config = self.config
        if config.output_multiplier != 1.0:
            logits = logits * config.output_multiplier
        cap = config.logits_softcap
        return torch.tanh(logits / cap) * cap if cap else logits
