"""Trains an EAGLE3 head: its initial weights, its loss, one update, its checkpoint.

Invariant: after the first save the folder holds a head in the public format and a complete checkpoint.
Not responsible for: the choice of data, and reports (see train_eagle3.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gpu_engine.drafters.heads.eagle3_files import save_head
from gpu_engine.drafters.heads.eagle3_head import Eagle3Config, Eagle3Head
from tools.training.unroll import Sequence as TrainingSequence
from tools.training.unroll import unroll


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The hyperparameters of one training."""

    epochs: int
    batch_size: int
    learning_rate: float
    depth: int
    """Number of drafts that the loss looks ahead; draft j has the weight 0.8 ** j."""
    seed: int
    mixed: bool = True
    """Compute products in bfloat16; weights, gradients and the optimiser state stay float32."""


def new_head(net: Any, config: Eagle3Config, vocabulary: torch.Tensor) -> Eagle3Head:
    """Return a head whose initial weights are those of the target's last layer, applied to its last fused hidden state.

    Args:
        net: the target, a transformers model.
        config: of the head.
        vocabulary: int64 [Vd], the target ids that the head can propose.

    A weight whose shape differs from the target's starts at random.
    """
    head = Eagle3Head(config)
    head.choose_vocabulary(vocabulary)
    last, layer, H = net.get_decoder().layers[-1], head.midlayer, config.hidden_size
    with torch.no_grad():
        head.lm_head.weight.copy_(net.get_output_embeddings().weight[vocabulary].float())
        head.fc.weight.zero_()
        head.fc.weight[:, -config.target_hidden_size :].copy_(torch.eye(H, config.target_hidden_size))
        pairs: list[tuple[nn.Module, Any]] = [
            (head.norm, net.get_decoder().norm),
            (layer.hidden_norm, last.input_layernorm),
        ]
        pairs += [(layer.post_attention_layernorm, last.post_attention_layernorm)]
        pairs += [(getattr(layer.mlp, name), getattr(last.mlp, name)) for name in ("gate_proj", "up_proj", "down_proj")]
        pairs += [(layer.self_attn.o_proj, last.self_attn.o_proj)]
        for ours, theirs in pairs:
            _copy_if_equal_shape(ours.weight, theirs.weight)
        for name in ("q_proj", "k_proj", "v_proj"):
            ours, theirs = getattr(layer.self_attn, name), getattr(last.self_attn, name)
            if _copy_if_equal_shape(ours.weight[:, H:], theirs.weight):
                ours.weight[:, :H].mul_(0.1)
    return head


def _copy_if_equal_shape(ours: Any, theirs: Any) -> bool:
    if ours.shape != theirs.shape:
        return False
    ours.copy_(theirs.float())
    return True


def loss_of(head: Eagle3Head, embedding: torch.Tensor, sequence: TrainingSequence, depth: int) -> torch.Tensor:
    """Return the weighted mean over depths of the cross-entropy against the answer's tokens.

    Positions whose token is not in the head's vocabulary are ignored. A loss without any position is 0 and has no
    gradient.
    """
    to_draft = torch.full((head.config.vocab_size,), -1, device=embedding.device)
    to_draft[head.target_ids] = torch.arange(head.config.draft_vocab_size, device=embedding.device)
    total, weight = torch.zeros((), device=embedding.device), 0.0
    for j, (logits_mD, wanted_m) in enumerate(unroll(head, embedding, sequence, depth)):
        draft_m = to_draft[wanted_m]
        share = 0.8**j
        if bool((draft_m >= 0).any()):
            total = total + share * functional.cross_entropy(logits_mD.float(), draft_m, ignore_index=-1)
            weight += share
    return total / weight if weight else total


class Training:
    """A head with its optimiser. `folder` holds the head, the checkpoint and the history;
    `updates` is the planned number."""

    def __init__(self, head: Eagle3Head, recipe: Recipe, folder: Path, updates: int) -> None:
        self.head, self.recipe, self.folder, self.updates = head, recipe, folder, updates
        self._optimizer = torch.optim.AdamW(
            head.parameters(), recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, self._rate)
        self.done = 0
        self.history: list[dict[str, float]] = []

    def _rate(self, update: int) -> float:
        """Return the factor of the learning rate:
        a linear warm-up over 5% of the updates, then a cosine down to 0.1."""
        warm = max(1, self.updates // 20)
        if update < warm:
            return (update + 1) / warm
        return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (update - warm) / max(1, self.updates - warm)))

    def update(self, embedding: torch.Tensor, sequences: Sequence[TrainingSequence]) -> float:
        """Make one update on a batch of sequences, and return its loss."""
        total = 0.0
        for sequence in sequences:
            with torch.autocast(embedding.device.type, torch.bfloat16, enabled=self.recipe.mixed):
                loss = loss_of(self.head, embedding, sequence, self.recipe.depth) / len(sequences)
            if loss.requires_grad:
                loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.done += 1
        return total

    def save(self, dtype: torch.dtype) -> None:
        """Write the head in `dtype`, and a checkpoint in float32."""
        state = {
            "head": self.head.state_dict(), "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(), "done": self.done, "updates": self.updates,
        }  # fmt: skip
        draft = self.folder / "training.new"
        torch.save(state, draft)
        draft.rename(self.folder / "training.pt")
        (self.folder / "history.json").write_text(json.dumps(self.history, indent=1) + "\n")
        served = Eagle3Head(self.head.config)
        served.load_state_dict(self.head.state_dict())
        save_head(served.to(dtype), self.folder)

    def resume(self) -> bool:
        """Load the last checkpoint, if there is one; return whether. Raises ValueError for one of another plan."""
        path = self.folder / "training.pt"
        if not path.exists():
            return False
        state = torch.load(path, weights_only=True)
        if state["updates"] != self.updates:
            raise ValueError(
                f"{path}: was begun for {state['updates']} updates, not {self.updates}; give another --out"
            )
        self.head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        self.done = state["done"]
        self.history = json.loads((self.folder / "history.json").read_text())
        return True
