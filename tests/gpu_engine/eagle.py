"""EAGLE3 heads for the tiny Llama: one that was trained on its answers, and one of random weights.

Invariant: both are made from fixed seeds, in the public format, over a pruned vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from gpu_engine.drafters.heads.eagle3_files import save_head
from gpu_engine.drafters.heads.eagle3_head import Eagle3Config, Eagle3Head
from tests.gpu_engine.tiny import VOCAB
from tools.training.trainer import Recipe, Training, new_head
from tools.training.unroll import Sequence

DRAFT_VOCAB = 200


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
    head = new_head(net, _config(net.config), torch.arange(DRAFT_VOCAB))
    folder.mkdir()
    recipe = Recipe(epochs=1, batch_size=4, learning_rate=5e-3, depth=3, seed=0)
    training = Training(head, recipe, folder, updates=60)
    data = [_sequence(net, head.config.aux_layers, torch.randint(0, DRAFT_VOCAB, (8,))) for _ in range(16)]
    embedding = net.get_input_embeddings().weight
    for update in range(60):
        training.update(embedding, data[update % 4 :: 4])
    training.save(torch.float32)


def _sequence(net: torch.nn.Module, layers: tuple[int, ...], ids_n: torch.Tensor) -> Sequence:
    """Return `ids_n` with 24 greedy tokens of the target after them, and the hidden states of all."""
    prompt = len(ids_n)
    for _ in range(24):
        ids_n = torch.cat([ids_n, net(ids_n[None]).logits[0, -1, :256].argmax()[None]])
    states = net(ids_n[None], output_hidden_states=True).hidden_states
    return Sequence(ids_n, torch.cat([states[layer][0] for layer in layers], dim=-1), prompt)
