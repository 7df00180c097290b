"""What the heads of all formats are made of: norm, rotary angles, gated block.

Not responsible for: attention, which differs by format (see eagle3_head.py, dflash_head.py).

Shapes: N rows, H hidden size, D head size.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


class HeadNorm(nn.Module):
    """Root mean square norm with a weight, in float32 and back (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x_NH: torch.Tensor) -> torch.Tensor:
        """Return the rows of `x_NH` at unit scale, times the weight."""
        out: torch.Tensor = functional.rms_norm(x_NH.float(), x_NH.shape[-1:], None, self.eps).to(x_NH.dtype)
        return out * self.weight


class Angles:
    """Rotary angles. Not a module: frequencies stay in float32 whatever dtype the head is put in."""

    def __init__(self, config: LlamaConfig) -> None:
        rotary = LlamaRotaryEmbedding(config)
        self._inverse_D = rotary.inv_freq.clone()
        self._scale = float(rotary.attention_scaling)

    def __call__(self, positions_N: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, [N, head_dim], in the dtype and on the device of `like`."""
        if self._inverse_D.device != like.device:
            self._inverse_D = self._inverse_D.to(like.device)
        angle_ND = (positions_N[:, None].float() * self._inverse_D).repeat(1, 2)
        cos_ND, sin_ND = angle_ND.cos() * self._scale, angle_ND.sin() * self._scale
        return cos_ND.to(like.dtype), sin_ND.to(like.dtype)


class GatedMlp(nn.Module):
    """Gated SiLU (Shazeer 2020)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x_NH: torch.Tensor) -> torch.Tensor:
        """Return [N, H]."""
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x_NH)) * self.up_proj(x_NH))
        return out


def rotate(x_NHD: torch.Tensor, cos_ND: torch.Tensor, sin_ND: torch.Tensor) -> torch.Tensor:
    """Apply rotary embedding, halves as transformers has them (Su et al. 2021)."""
    left, right = x_NHD.chunk(2, dim=-1)
    return x_NHD * cos_ND[:, None] + torch.cat([-right, left], dim=-1) * sin_ND[:, None]
