"""EAGLE3 heads for the tiny Llama: one that knows its circles, and one of random weights.

Invariant: both are the same in every run, in the public format, over a pruned vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from gpu_engine.drafters.heads.eagle3_head import Eagle3Config, Eagle3Head, default_aux_layers
from tests.gpu_engine.tiny import VOCAB

DRAFT_VOCAB = 200

V, VD, H = 64, 20, 64
"""Vocabulary, draft vocabulary and hidden size of `make_head`."""


def target_config(**changed: Any) -> LlamaConfig:
    shape: dict[str, Any] = {
        "vocab_size": V, "hidden_size": H, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128,
    }  # fmt: skip
    return LlamaConfig(**(shape | changed))


def shape_for(target: Any, draft_vocab_size: int) -> Eagle3Config:
    """Return a head's shape for a transformers config of a target."""
    return Eagle3Config(
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=float(target.rope_parameters["rope_theta"]),
        max_position_embeddings=target.max_position_embeddings,
        aux_layers=default_aux_layers(target.num_hidden_layers),
    )


def choose_vocabulary(head: Eagle3Head, target_ids: torch.Tensor) -> None:
    """Make `target_ids`, int64 [Vd] and distinct, the draft vocabulary, in ascending order."""
    ids_D = target_ids.sort().values
    head.d2t.copy_(ids_D - torch.arange(len(ids_D)))
    head.t2d.zero_()[ids_D] = True


def save_head(head: Eagle3Head, directory: Path) -> None:
    """Write config.json and model.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    config = asdict(head.config)
    layers = config.pop("aux_layers")
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers)},
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    tensors = {name: tensor.detach().contiguous() for name, tensor in head.state_dict().items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def make_head(seed: int = 0, **changed: Any) -> Eagle3Head:
    torch.manual_seed(seed)
    head = Eagle3Head(replace(shape_for(target_config(), VD), **changed))
    choose_vocabulary(head, torch.randperm(V)[:VD])
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return head.eval()


def save_random(target: Path, folder: Path) -> None:
    """Write a head of random weights."""
    net = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    torch.manual_seed(3)
    head = Eagle3Head(shape_for(net.config, DRAFT_VOCAB))
    choose_vocabulary(head, torch.randperm(VOCAB)[:DRAFT_VOCAB])
    save_head(head, folder)


def save_circle(target: Path, folder: Path) -> None:
    """Write a head that says after each token the next one of its circle, as the target mostly does.

    Equal embeddings attend to each other only. Half of their channels are copied to the head's output, of which the
    target's output head makes the next token. The target's hidden states are not read.
    """
    net = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    head = Eagle3Head(replace(shape_for(net.config, DRAFT_VOCAB), norm_before_residual=True))
    # The ids from 256 on end an answer or have no text.
    choose_vocabulary(head, torch.arange(DRAFT_VOCAB))
    attention, (heads, kv_heads, width) = head.midlayer.self_attn, head.midlayer.self_attn.shape
    with torch.no_grad():
        for name, weight in head.named_parameters():
            weight.fill_(float("norm" in name and "hidden" not in name))
        head.lm_head.weight.copy_(net.get_output_embeddings().weight[:DRAFT_VOCAB])
        for channel in range(kv_heads * width):
            attention.k_proj.weight[channel, channel] = attention.v_proj.weight[channel, channel] = 1.0
            # Some query heads share a key-value head, and the first of them is read.
            group, place = divmod(channel, width)
            first = group * (heads // kv_heads) * width + place
            attention.q_proj.weight[first, channel] = 8.0
            attention.o_proj.weight[channel, first] = 1.0
    save_head(head, folder)


class PlainAttention:
    """Causal attention that stores all keys and values that it has been given."""

    def __init__(self, head: Eagle3Head) -> None:
        self.heads, self.groups, self.width = head.midlayer.self_attn.shape
        self.k: list[torch.Tensor] = []
        self.v: list[torch.Tensor] = []

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = []
        for row in range(len(q)):
            self.k.append(k[row])
            self.v.append(v[row])
            keys, values = (torch.stack(x).repeat_interleave(self.heads // self.groups, 1) for x in (self.k, self.v))
            share = torch.einsum("hd,nhd->hn", q[row], keys).mul(self.width**-0.5).softmax(-1)
            out.append(torch.einsum("hn,nhd->hd", share, values).flatten())
        return torch.stack(out)
