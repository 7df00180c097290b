"""The EAGLE3 draft head as a module.

The head is one decoder layer (Li et al. 2025, "EAGLE-3"). It fuses the hidden states of three target layers into one,
and attends over pairs of the hidden state at position p and the token at position p + 1. From the second draft on, the
layer's own output replaces the target's hidden state. The head may have its own vocabulary, a subset of the target's:
draft id d is target id d + d2t[d].

Invariant: parameters have the names of the public checkpoints, so a file's tensors are the `state_dict`.

Not responsible for: files (see eagle3_files.py), use as a draft net (see eagle3.py), training.

Shapes: N rows, H hidden size of the head, Ht hidden size of the target, Vd draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig

from gpu_engine.drafters.heads.parts import Angles, GatedMlp, HeadNorm, rotate

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(q [N, heads, head_dim], k and v [N, kv_heads, head_dim]) -> [N, heads * head_dim]; rotary is applied already."""

FUSED_LAYERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """What config.json of a head says."""

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int = 2048
    norm_before_residual: bool = False
    """The residual of the layer is the hidden state after `hidden_norm`, as some later heads have it."""
    aux_layers: tuple[int, int, int] = (0, 0, 0)
    """The hidden states before these target layers are fused."""

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


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Return the layers that the public heads were trained on: a low, a middle and a high one."""
    return (min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, 0))


class Eagle3Attention(nn.Module):
    """Projections over [embedding; hidden state]."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.shape = (heads, kv_heads, width)
        self.q_proj = nn.Linear(2 * config.hidden_size, heads * width, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_heads * width, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_heads * width, bias=False)
        self.o_proj = nn.Linear(heads * width, config.hidden_size, bias=False)

    def forward(self, x_N2H: torch.Tensor, cos_ND: torch.Tensor, sin_ND: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Return the layer's attention output, [N, H]."""
        heads, kv_heads, width = self.shape
        q_NHD = rotate(self.q_proj(x_N2H).view(-1, heads, width), cos_ND, sin_ND)
        k_NGD = rotate(self.k_proj(x_N2H).view(-1, kv_heads, width), cos_ND, sin_ND)
        out: torch.Tensor = self.o_proj(attend(q_NHD, k_NGD, self.v_proj(x_N2H).view(-1, kv_heads, width)))
        return out


class Eagle3Layer(nn.Module):
    """The decoder layer."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = Eagle3Attention(config)
        self.mlp = GatedMlp(config.hidden_size, config.intermediate_size)
        self.hidden_norm = HeadNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = HeadNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = HeadNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, embeds_NH: torch.Tensor, hidden_NH: torch.Tensor, cos_ND: torch.Tensor, sin_ND: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:  # fmt: skip
        """Return the next hidden state, [N, H]."""
        normed_NH = self.hidden_norm(hidden_NH)
        x_N2H = torch.cat([self.input_layernorm(embeds_NH), normed_NH], dim=-1)
        residual_NH = normed_NH if self.norm_before_residual else hidden_NH
        out_NH: torch.Tensor = residual_NH + self.self_attn(x_N2H, cos_ND, sin_ND, attend)
        out_NH = out_NH + self.mlp(self.post_attention_layernorm(out_NH))
        return out_NH


class Eagle3Head(nn.Module):
    """The head. The target owns the token embedding."""

    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(FUSED_LAYERS * config.target_hidden_size, config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = HeadNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.angles = Angles(config.rope_config())

    @property
    def target_ids(self) -> torch.Tensor:
        """int64 [Vd]: the target's id of each draft id."""
        ids_D: torch.Tensor = self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)
        return ids_D

    def fuse(self, aux_NF: torch.Tensor) -> torch.Tensor:
        """Return the fused hidden state, [N, H], of three concatenated ones, [N, 3 Ht]."""
        out: torch.Tensor = self.fc(aux_NF)
        return out

    def forward(
        self, embeds_NH: torch.Tensor, hidden_NH: torch.Tensor, positions_N: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Return the hidden state that replaces the target's at the next position, [N, H]."""
        out: torch.Tensor = self.midlayer(embeds_NH, hidden_NH, *self.angles(positions_N, hidden_NH), attend)
        return out

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Return scores over the draft vocabulary, [N, Vd]."""
        out: torch.Tensor = self.lm_head(self.norm(hidden_NH))
        return out
