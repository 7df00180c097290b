"""The shape of a decoder from its Hugging Face config, and the numbers of weights that follow from it.

Invariant: counts are of weights, not of bytes. They are exact for the families whose layers are four projections of
attention and three of a gated MLP, dense or in experts (Llama, Mistral, Qwen2, Qwen3, Mixtral, Qwen3-MoE).
Not responsible for: the bytes of a weight (see memory.py), other kinds of layers, which `of` refuses by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_UNKNOWN = ("kv_lora_rank", "state_size", "ssm_state_size", "linear_num_key_heads", "hybrid_override_pattern")
"""Keys of configs whose layers keep something else than keys and values of heads."""


class UnknownShape(ValueError):
    """A config lacks a number that the model's shape needs, or has layers of another kind; the message names the
    key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What memory and step time depend on. All numbers are of one model, before it is split over GPUs."""

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    """Width of a dense MLP, or of one expert."""
    vocab: int
    """Columns of the logits, padding included."""
    tied: bool = False
    """The output head is the embedding."""
    num_experts: int = 0
    """0: a dense MLP."""
    experts_per_token: int = 0
    shared_experts: int = 0
    """Experts of the same width that every token uses."""
    attention_bias: bool = False
    qk_norm: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any], name: str = "") -> ModelShape:
        """Return the shape that a `config.json` describes.

        Raises:
            UnknownShape: a key is missing, or the formulas do not cover this kind of layer.

        """
        config = config.get("text_config") or config
        for key in _UNKNOWN:
            if config.get(key):
                raise UnknownShape(f"{key}: the config describes layers that are not known here")

        def number(*keys: str) -> int:
            for key in keys:
                if config.get(key) is not None:
                    return int(config[key])
            raise UnknownShape(f"{keys[0]}: the config has no such number")

        heads, hidden = number("num_attention_heads"), number("hidden_size")
        experts = int(
            config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts") or 0
        )
        width = number("moe_intermediate_size", "intermediate_size") if experts else number("intermediate_size")
        kind = str(config.get("model_type", ""))
        return cls(
            name=name or kind,
            num_layers=number("num_hidden_layers"),
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            intermediate=width,
            vocab=number("vocab_size"),
            tied=bool(config.get("tie_word_embeddings", False)),
            num_experts=experts,
            experts_per_token=number("num_experts_per_tok") if experts else 0,
            shared_experts=int(config.get("n_shared_experts") or 0),
            attention_bias=bool(config.get("attention_bias", kind == "qwen2")),
            qk_norm=kind in ("qwen3", "qwen3_moe"),
        )

    @property
    def attention_weights(self) -> int:
        """Weights of one layer's query, key, value and output products."""
        return self.hidden * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)

    @property
    def expert_weights(self) -> int:
        """Weights of one gated MLP, or of one expert."""
        return 3 * self.hidden * self.intermediate

    @property
    def mlp_weights(self) -> int:
        """Weights of one layer's MLP, all experts included, without the router."""
        return self.expert_weights * max(1, self.num_experts + self.shared_experts)

    @property
    def product_weights(self) -> int:
        """Weights of the products of all layers: what a quantisation makes smaller."""
        return self.num_layers * (self.attention_weights + self.mlp_weights)

    @property
    def embedding_weights(self) -> int:
        """Weights of the input embedding; the output head has as many."""
        return self.vocab * self.hidden

    @property
    def small_weights(self) -> int:
        """Norms, biases and routers, which stay in the model's dtype."""
        norms = self.hidden * (2 * self.num_layers + 1)
        biases = self.num_layers * self.head_dim * (self.num_heads + 2 * self.num_kv_heads) * self.attention_bias
        qk = 2 * self.num_layers * self.head_dim * self.qk_norm
        return norms + biases + qk + self.num_layers * self.hidden * self.num_experts

    @property
    def num_weights(self) -> int:
        """All weights: the number that a model is called after."""
        heads = 1 if self.tied else 2
        return self.product_weights + heads * self.embedding_weights + self.small_weights

    def read_experts(self, num_rows: int) -> float:
        """Return how many experts of a layer a forward of so many rows is expected to read, shared ones included.

        Each row takes `experts_per_token` of E experts at random, so an expert is left out with a chance of
        (1 - k / E) ** rows. Real routers are less even, and read fewer.
        """
        if not self.num_experts:
            return 1.0
        left_out = (1 - self.experts_per_token / self.num_experts) ** num_rows
        return self.num_experts * (1 - left_out) + self.shared_experts

    @property
    def row_weights(self) -> int:
        """Weights of all layers that one row is multiplied with; the head is not among them."""
        experts = self.experts_per_token + self.shared_experts if self.num_experts else 1
        return self.num_layers * (self.attention_weights + experts * self.expert_weights)

    @property
    def kv_numbers(self) -> int:
        """Numbers of a token's keys and values, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def _shape(name: str, sizes: tuple[int, ...], **more: Any) -> ModelShape:
    keys = ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "intermediate", "vocab")
    numbers: dict[str, Any] = dict(zip(keys, sizes, strict=True))
    return ModelShape(name=name, **numbers, **more)


PRESETS = {
    shape.name: shape
    for shape in (
        _shape("embedded", (30, 576, 9, 3, 64, 1536, 49_152), tied=True),
        _shape("llama-8b", (32, 4096, 32, 8, 128, 14_336, 128_256)),
        _shape("llama-70b", (80, 8192, 64, 8, 128, 28_672, 128_256)),
        _shape("qwen3-32b", (64, 5120, 64, 8, 128, 25_600, 151_936), qk_norm=True),
        _shape("mixtral-8x7b", (32, 4096, 32, 8, 128, 14_336, 32_000), num_experts=8, experts_per_token=2),
        _shape(
            "qwen3-30b-a3b",
            (48, 2048, 32, 4, 128, 768, 151_936),
            num_experts=128,
            experts_per_token=8,
            qk_norm=True,
        ),
    )
}
"""Shapes from the models' published config.json; `embedded` is SmolLM2-135M-Instruct, `llama` is Llama 3.1."""


def load_shape(model: str) -> ModelShape:
    """Return the shape of a preset, of a `config.json`, or of a directory with one.

    Raises:
        UnknownShape: there is no such preset or file, or it is not understood.

    """
    if model in PRESETS:
        return PRESETS[model]
    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    if not path.is_file():
        raise UnknownShape(f"model: {model!r} is no config.json and none of {', '.join(PRESETS)}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UnknownShape(f"model: {path}: {error}") from error
    return ModelShape.of(config, path.parent.name)
