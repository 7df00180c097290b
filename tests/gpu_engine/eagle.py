"""EAGLE3 heads for the tiny Llama: one that was trained on its answers, and one of random weights.

Invariant: both are made from fixed seeds, in the public format, over a pruned vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig

from gpu_engine.drafters.heads.eagle3_files import save_head
from gpu_engine.drafters.heads.eagle3_head import Eagle3Config, Eagle3Head
from tests.gpu_engine.eagle_unroll import Sequence, unroll
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


def make_head(seed: int = 0, **changed: Any) -> Eagle3Head:
    torch.manual_seed(seed)
    head = Eagle3Head(replace(Eagle3Config.of_target(target_config(), draft_vocab_size=VD), **changed))
    head.choose_vocabulary(torch.randperm(V)[:VD])
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return head.eval()


def _config(target: object) -> Eagle3Config:
    return Eagle3Config.of_target(target, draft_vocab_size=DRAFT_VOCAB)


def save_random(target: Path, folder: Path) -> None:
    """Write a head of random weights."""
    net = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    torch.manual_seed(3)
    head = Eagle3Head(_config(net.config))
    head.choose_vocabulary(torch.randperm(VOCAB)[:DRAFT_VOCAB])
    save_head(head, folder)


def save_trained(target: Path, folder: Path) -> None:
    """Write a head that was trained on a few greedy answers of the target."""
    net = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval().requires_grad_(False)
    torch.manual_seed(4)
    # The ids from 256 on end an answer or have no text.
    head = _new_head(net, torch.arange(DRAFT_VOCAB))
    data = [_sequence(net, head.config.aux_layers, torch.randint(0, DRAFT_VOCAB, (8,))) for _ in range(16)]
    embedding, optimizer = net.get_input_embeddings().weight, torch.optim.AdamW(head.parameters(), 5e-3)
    for update in range(60):
        optimizer.zero_grad()
        sum((_loss(head, embedding, sequence) for sequence in data[update % 4 :: 4]), torch.zeros(())).backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
    save_head(head, folder)


def _new_head(net: Any, vocabulary: torch.Tensor) -> Eagle3Head:
    """Return a head that begins with the target's output head, and its last hidden state."""
    head = Eagle3Head(_config(net.config))
    head.choose_vocabulary(vocabulary)
    width, target_width = head.config.hidden_size, head.config.target_hidden_size
    with torch.no_grad():
        head.lm_head.weight.copy_(net.get_output_embeddings().weight[vocabulary])
        head.norm.weight.copy_(net.get_decoder().norm.weight)
        head.fc.weight.zero_()
        head.fc.weight[:, -target_width:].copy_(torch.eye(width, target_width))
    return head


def _loss(head: Eagle3Head, embedding: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """Return the cross-entropy against the answer's tokens, three drafts deep; draft j has the weight 0.8 ** j."""
    loss = torch.zeros(())
    for j, (logits_mD, wanted_m) in enumerate(unroll(head, embedding, sequence, 3)):
        if bool((known_m := wanted_m < DRAFT_VOCAB).any()):
            loss = loss + 0.8**j * functional.cross_entropy(logits_mD[known_m], wanted_m[known_m])
    return loss


def _sequence(net: torch.nn.Module, layers: tuple[int, ...], ids_n: torch.Tensor) -> Sequence:
    """Return `ids_n` with 24 greedy tokens of the target after them, and the hidden states of all."""
    prompt = len(ids_n)
    for _ in range(24):
        ids_n = torch.cat([ids_n, net(ids_n[None]).logits[0, -1, :256].argmax()[None]])
    states = net(ids_n[None], output_hidden_states=True).hidden_states
    return Sequence(ids_n, torch.cat([states[layer][0] for layer in layers], dim=-1), prompt)


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
