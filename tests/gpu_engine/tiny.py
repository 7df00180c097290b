"""Tiny real models of several families, saved as a user would have them: weights, config and a byte-level tokenizer.

Invariant: everything is drawn from a fixed seed, so a family's files are the same in every run. Weights are larger
than an initialiser's, so that different inputs give different answers.
Not responsible for: fixtures (see conftest.py) and engines (see harness.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    ArceeConfig,
    AutoModelForCausalLM,
    BloomConfig,
    Cohere2Config,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    DiffLlamaConfig,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4Config,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    HunYuanDenseV1Config,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MiniMaxM2Config,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

from tests.fakes import EOS, byte_tokenizer

VOCAB = 300
"""Columns of the logits; ids from 258 on have no token, as in a padded vocabulary."""
WINDOW = 24
"""Sliding window of the families that have one: shorter than the tests' sequences, and no multiple of a page."""
ROUND = 7
"""Number of ids in a repeating circle of `save`."""

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 257,
    "eos_token_id": EOS,
    "pad_token_id": None,
}
_LAYERS: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SHAPE),
    "mistral": lambda: MistralConfig(**_SHAPE, head_dim=32, sliding_window=WINDOW),
    "qwen2": lambda: Qwen2Config(**_SHAPE, tie_word_embeddings=True),
    "qwen2 sliding": lambda: Qwen2Config(**_SHAPE, use_sliding_window=True, **_LAYERS),
    "qwen3": lambda: Qwen3Config(**_SHAPE, head_dim=32),
    "phi3": lambda: Phi3Config(**_SHAPE, partial_rotary_factor=0.5),
    "gemma": lambda: GemmaConfig(**_SHAPE, head_dim=32, tie_word_embeddings=False),
    "gemma2": lambda: Gemma2Config(
        **_SHAPE,
        **_LAYERS,
        tie_word_embeddings=False,
        head_dim=256,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=8.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(**_SHAPE, **_LAYERS, tie_word_embeddings=False, head_dim=32),
    "granite": lambda: GraniteConfig(**_SHAPE, embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=2.0),
    "smollm3": lambda: SmolLM3Config(**_SHAPE, no_rope_layers=[1, 0], tie_word_embeddings=False),
    "olmo2": lambda: Olmo2Config(**_SHAPE),
    "exaone4": lambda: Exaone4Config(**_SHAPE, **_LAYERS, head_dim=32),
    "glm4": lambda: Glm4Config(**_SHAPE, head_dim=32, partial_rotary_factor=0.5, attention_bias=True),
    "ernie4_5": lambda: Ernie4_5Config(**_SHAPE, head_dim=32, use_bias=True, tie_word_embeddings=False),
    "cohere": lambda: CohereConfig(**_SHAPE, logit_scale=0.5, tie_word_embeddings=False),
    "cohere2": lambda: Cohere2Config(**_SHAPE, **_LAYERS, logit_scale=0.5, tie_word_embeddings=False),
    "hunyuan": lambda: HunYuanDenseV1Config(**_SHAPE, head_dim=32),
    "ministral3": lambda: ministral3(),
    "arcee": lambda: ArceeConfig(**_SHAPE),
    "gemma4 small": lambda: gemma4_small(),
    "gemma4": lambda: gemma4(head_dim=256, global_head_dim=512),
    "gemma4 moe": lambda: gemma4_moe(),
}
"""The model families whose forward is one loop over fused parts, each with a function that returns a small
configuration."""

_WITHOUT_GATE: dict[str, Any] = {
    name: value for name, value in _SHAPE.items() if name not in ("intermediate_size", "num_key_value_heads")
}
_WEIGHTED_NORMS = frozenset(
    {
        *("cohere", "cohere2", "exaone4", "gemma4_text", "glm4", "glm4_moe", "hunyuan_v1_dense"),
        *("minimax_m2", "olmo2", "olmoe"),
    }
)
"""Families whose norms have other forms than Llama's, and so random weights."""
_BIASED = frozenset({"gpt2", "gpt_bigcode", "gpt_neox", "opt", "phi", "stablelm", "starcoder2"})

OWN_FORWARD: dict[str, Callable[[], PreTrainedConfig]] = {
    "gpt2": lambda: GPT2Config(**_WITHOUT_GATE, tie_word_embeddings=False),
    "gpt2 by layer": lambda: GPT2Config(
        **_WITHOUT_GATE, tie_word_embeddings=False, scale_attn_by_inverse_layer_idx=True
    ),
    "gpt_neox": lambda: GPTNeoXConfig(**_WITHOUT_GATE, intermediate_size=96, rotary_pct=0.5),
    "gpt_neox sequential": lambda: GPTNeoXConfig(**_WITHOUT_GATE, intermediate_size=96, use_parallel_residual=False),
    "opt": lambda: OPTConfig(**_WITHOUT_GATE, ffn_dim=96, word_embed_proj_dim=64, tie_word_embeddings=False),
    "opt 350m": lambda: OPTConfig(
        **_WITHOUT_GATE, ffn_dim=96, word_embed_proj_dim=32, do_layer_norm_before=False, tie_word_embeddings=False
    ),
    "stablelm": lambda: StableLmConfig(**_SHAPE, use_qkv_bias=True),
    "stablelm 2": lambda: StableLmConfig(**_SHAPE, use_parallel_residual=True, qk_layernorm=True),
    "nemotron": lambda: NemotronConfig(**_SHAPE),
    "gpt_bigcode": lambda: GPTBigCodeConfig(**_WITHOUT_GATE, tie_word_embeddings=False),
    "phi": lambda: PhiConfig(**_SHAPE),
    "starcoder2": lambda: Starcoder2Config(**_SHAPE, tie_word_embeddings=False),
    "qwen3_moe": lambda: qwen3_moe(),
    "llama with heads of 20": lambda: LlamaConfig(**_SHAPE, head_dim=20),
    "gpt_oss": lambda: gpt_oss(),
    "gemma3n": lambda: gemma3n(),
    "llama4": lambda: llama4(),
    "deepseek_v2": lambda: deepseek_v2(),
    "deepseek_v3": lambda: deepseek_v3(),
    "minimax_m2": lambda: MiniMaxM2Config(**_SHAPE, head_dim=32, num_local_experts=4, num_experts_per_tok=2),
    "mixtral": lambda: MixtralConfig(**_SHAPE, num_local_experts=4, num_experts_per_tok=2),
}
"""Further model families that the engine serves, by transformers' own forward over our attention."""


def bloom() -> PreTrainedConfig:
    """Return a family with position biases and its own attention."""
    return BloomConfig(vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=4)


def gpt_oss() -> PreTrainedConfig:
    """Return a family with attention sinks."""
    return GptOssConfig(**_SHAPE, **_LAYERS, head_dim=32, num_local_experts=4, num_experts_per_tok=2)


def ministral3() -> PreTrainedConfig:
    """Return a family whose queries grow with their position, from position 32 on."""
    yarn = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 16.0, "original_max_position_embeddings": 32}
    scales = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
    return Ministral3Config(**_SHAPE, head_dim=32, rope_parameters={**yarn, **scales})


def llama4(**options: Any) -> PreTrainedConfig:
    """Return a family with chunks, and a layer without rotation whose queries grow with their position."""
    experts: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2}
    layers: dict[str, Any] = {"no_rope_layers": [1, 0], "attention_chunk_size": WINDOW, "intermediate_size_mlp": 96}
    return Llama4TextConfig(**_SHAPE, **experts, **layers, head_dim=32, floor_scale=8, **options)


def qwen3_moe() -> PreTrainedConfig:
    """Return a family whose blocks are four experts and a router."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    return Qwen3MoeConfig(**_SHAPE, head_dim=32, **experts)


def mamba() -> PreTrainedConfig:
    """Return a family without attention."""
    return MambaConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2)


def gemma3n() -> PreTrainedConfig:
    """Return a family whose last layers have the keys and values of earlier ones."""
    layers: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}
    return Gemma3nTextConfig(
        **{**_SHAPE, **layers, "num_hidden_layers": 4},
        head_dim=32,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=16,
        laurel_rank=8,
        activation_sparsity_pattern=[0.5, 0.0, 0.5, 0.0],
    )


_TWO_SIZES: dict[str, Any] = {
    **_SHAPE,
    "sliding_window": WINDOW,
    "vocab_size_per_layer_input": VOCAB,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": False,
}


def gemma4_small() -> PreTrainedConfig:
    """Return a family whose layers have heads of two sizes, in the form of Gemma 4's E2B and E4B: the last layers have
    the keys and values of earlier ones and wider blocks, and embeddings come by layer."""
    return Gemma4TextConfig(
        **{**_TWO_SIZES, "num_hidden_layers": 6},
        layer_types=["sliding_attention", "full_attention"] * 3,
        head_dim=32,
        global_head_dim=64,
        hidden_size_per_layer_input=32,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
    )


def gemma4(**options: Any) -> PreTrainedConfig:
    """Return the same in the form of Gemma 4's 31B: layers with full attention have fewer and wider key heads, whose
    values are the keys."""
    return Gemma4TextConfig(
        **{**_TWO_SIZES, "num_hidden_layers": 3},
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        **{"head_dim": 32, "global_head_dim": 64, **options},
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
    )


def gemma4_moe() -> PreTrainedConfig:
    """Return the same in the form of Gemma 4's 26B-A4B: experts next to the block of each layer."""
    return gemma4(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=32)


def diffllama() -> PreTrainedConfig:
    """Return a family whose layers call attention twice, with the same keys and other values."""
    return DiffLlamaConfig(**_SHAPE)


def gptj() -> PreTrainedConfig:
    """Return a family whose attention cannot be replaced."""
    return GPTJConfig(**_WITHOUT_GATE, rotary_dim=8)


_LATENT: dict[str, Any] = {
    **_SHAPE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}


def deepseek_v2() -> PreTrainedConfig:
    """Return a family whose keys and values have different sizes."""
    return DeepseekV2Config(**_LATENT, q_lora_rank=None, n_shared_experts=1, topk_method="greedy")


def deepseek_v3() -> PreTrainedConfig:
    """Return the same with compressed queries and groups of experts."""
    return DeepseekV3Config(**_LATENT, q_lora_rank=24, n_shared_experts=1, n_group=2, topk_group=1)


def save(config: PreTrainedConfig, folder: Path, *, rounds: bool = False, seed: int = 0) -> Path:
    """Write a float32 model with random weights, and the tokenizer, to `folder`.

    With `rounds` most answers repeat a circle of `ROUND` ids, so that the n-gram drafter finds matches.
    """
    torch.manual_seed(seed)
    gain = 1.1 if rounds else 2.0
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                # Gemma multiplies its embeddings by 8, the root of the hidden size.
                embedding = 1.0 / 8 if "gemma" in config.model_type else 1.0
                weight.normal_(
                    0.0,
                    embedding
                    if "embed" in name or name.endswith(("wte.weight", "wpe.weight"))
                    else gain / weight.shape[-1] ** 0.5,
                )
            elif name.endswith(("router.scale", "per_expert_scale")) or (
                "norm" in name and config.model_type in _WEIGHTED_NORMS
            ):
                weight.uniform_(0.5, 1.5)
                if name.endswith(("q_norm.weight", "k_norm.weight")) and config.model_type == "gemma4_text":
                    weight.mul_(0.3)  # it does not scale the products of queries and keys
            elif "bias" in name or "sinks" in name:
                # Biases after every norm and product: larger ones would be the same for every input.
                weight.normal_(0.0, 0.1 if config.model_type in _BIASED else 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
            elif name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.3, 0.3)
        if rounds:
            ids = torch.arange(VOCAB)
            after = torch.where(ids % ROUND == ROUND - 1, ids - ROUND + 1, ids + 1).clamp(max=VOCAB - 1)
            head = model.get_output_embeddings().weight
            head[after] = model.get_input_embeddings().weight * 0.18
    model.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token="<|end|>", bos_token="<|start|>")
    tokenizer.save_pretrained(folder)
    return folder


def generate(folder: Path, prompt: list[int], max_tokens: int) -> list[int]:
    """Return transformers' own greedy answer of `max_tokens` tokens, with its own attention."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=EOS
    )
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer
