"""A model over several processes: its ranks, or the engines that share its experts.

Not responsible for: loading one process's part (see ../loader.py), what a part has (see shards.py, shared_experts.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gpu_engine.api.config import EngineConfig
from gpu_engine.model.fused_forward import FusedForward
from gpu_engine.model.loaded_model import LoadedModel
from gpu_engine.model.parallel.collectives import Collectives
from gpu_engine.model.parallel.forward import LeadingForward, add_over_ranks
from gpu_engine.model.parallel.peers import Peers
from gpu_engine.model.parallel.ranks import Ranks, RankSet
from gpu_engine.model.parallel.rendezvous import Place
from gpu_engine.model.parallel.shards import Shard
from gpu_engine.model.parallel.shared_experts import fingerprint, mixtures_of, share_experts

LoadShard = Callable[[Shard], tuple[LoadedModel, FusedForward]]
"""Loads one rank's part of a model; returns it with its forward, which does not add over the ranks yet."""


def load_divided(config: EngineConfig, load_shard: LoadShard) -> LoadedModel:
    """Start the other ranks, and return the model over all of them, as rank 0 drives it."""
    ranks = Ranks.start(config)
    try:
        model, forward = load_shard(Shard(0, config.tensor_parallel_size))
        collectives = ranks.connect(model.device)
    except BaseException:
        ranks.close()
        raise
    return lead(model, forward, collectives, ranks)


def lead(model: LoadedModel, forward: FusedForward, collectives: Collectives, ranks: RankSet) -> LoadedModel:
    """Return rank 0's part as the whole model: its forward has the other ranks run theirs."""
    add_over_ranks(forward, collectives)
    model.fused = replace(model.fused, forward=LeadingForward(forward, collectives, model.vocab_size))
    model.ranks = ranks
    return model


def join_engines(config: EngineConfig, model: LoadedModel) -> None:
    """Wait for the other engines of the group, and leave them their part of the experts."""
    mixtures_of(model)  # refuses, before the wait, a model whose experts cannot be shared
    place = Place(config.data_parallel_rank, config.data_parallel_attention, Path(config.data_parallel_dir))
    peers = Peers(place, fingerprint(model), model.device)
    share_experts(model, Shard(place.rank, place.size), peers)
    model.ranks = peers
