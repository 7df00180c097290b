"""EAGLE3 heads on disk, in the public format: config.json with one layer, and the tensors of `Eagle3Head`.

Invariant: a checkpoint that does not fit the target is refused at load, with the tensor or the setting, and both
values. Not responsible for: the head itself (see eagle3_head.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gpu_engine.drafters.heads.eagle3_head import FUSED_LAYERS, Eagle3Config, Eagle3Head, default_aux_layers
from gpu_engine.drafters.heads.formats import HeadNotUsable, read_config, read_tensors


def load_head(directory: Path, target_config: Any, dtype: torch.dtype) -> Eagle3Head:
    """Return the head of a directory for a target with that transformers config, in eval mode, on the CPU.

    Raises HeadNotUsable.
    """
    config = _read_config(directory, target_config)
    tensors = _read_tensors(directory)
    head = Eagle3Head(config)
    if "d2t" not in tensors and config.draft_vocab_size == config.vocab_size:
        tensors["d2t"] = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
    wanted = head.state_dict()
    if "d2t" in tensors and "t2d" not in tensors and tensors["d2t"].shape == wanted["d2t"].shape:
        ids_D = tensors["d2t"] + torch.arange(config.draft_vocab_size)
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
        tensors["t2d"][ids_D.clamp(0, config.vocab_size - 1)] = True
    for name, tensor in wanted.items():
        if name not in tensors:
            raise HeadNotUsable(f"{directory}: {name} is missing; this is not an EAGLE3 head")
        if tensors[name].shape != tensor.shape:
            raise HeadNotUsable(
                f"{directory}: {name} is {list(tensors[name].shape)}, and {list(tensor.shape)} fits config and target"
            )
    ids_D = tensors["d2t"] + torch.arange(config.draft_vocab_size)
    if int(ids_D.min()) < 0 or int(ids_D.max()) >= config.vocab_size or len(ids_D.unique()) < len(ids_D):
        raise HeadNotUsable(f"{directory}: d2t does not name {len(ids_D)} distinct ids below {config.vocab_size}")
    head.load_state_dict({name: tensors[name] for name in wanted})
    return head.to(dtype).eval()


def _read_config(directory: Path, target_config: Any) -> Eagle3Config:
    path = directory / "config.json"
    said = read_config(directory, "eagle3")
    try:
        rope = dict(said.get("rope_parameters") or said.get("rope_scaling") or {})
        theta = float(rope.pop("rope_theta", said.get("rope_theta", 10000.0)))
        heads = int(said["num_attention_heads"])
        layers = (said.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        config = Eagle3Config(
            hidden_size=int(said["hidden_size"]),
            target_hidden_size=int(said.get("target_hidden_size") or target_config.hidden_size),
            intermediate_size=int(said["intermediate_size"]),
            num_attention_heads=heads,
            num_key_value_heads=int(said.get("num_key_value_heads") or heads),
            head_dim=int(said.get("head_dim") or said["hidden_size"] // heads),
            vocab_size=int(said["vocab_size"]),
            draft_vocab_size=int(said.get("draft_vocab_size") or said["vocab_size"]),
            rms_norm_eps=float(said.get("rms_norm_eps", 1e-5)),
            rope_theta=theta,
            rope_scaling=rope or None,
            max_position_embeddings=said.get("max_position_embeddings") or target_config.max_position_embeddings,
            norm_before_residual=bool(said.get("norm_before_residual", False)),
            aux_layers=tuple(layers) if layers else default_aux_layers(target_config.num_hidden_layers),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise HeadNotUsable(f"{path}: not the config of an EAGLE3 head: {error!r}") from None
    fits = {
        "vocab_size": (config.vocab_size, target_config.vocab_size),
        "target_hidden_size": (config.target_hidden_size, target_config.hidden_size),
        "hidden_size, that of the embedding": (config.hidden_size, target_config.hidden_size),
    }
    for name, (is_, wanted) in fits.items():
        if is_ != wanted:
            raise HeadNotUsable(f"{path}: {name} is {is_}, and the target has {wanted}")
    if len(config.aux_layers) != FUSED_LAYERS or not all(
        0 <= layer < target_config.num_hidden_layers for layer in config.aux_layers
    ):
        raise HeadNotUsable(
            f"{path}: eagle_aux_hidden_state_layer_ids is {list(config.aux_layers)}: three of the target's "
            f"{target_config.num_hidden_layers} layers are needed"
        )
    return config


def _read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Return the tensors by the names of this module; published checkpoints use several spellings."""
    return {
        name.removeprefix("model.").replace("layers.0.", "midlayer.", 1): tensor
        for name, tensor in read_tensors(directory).items()
        # The embedding is the target's own.
        if not name.endswith("embed_tokens.weight")
    }
