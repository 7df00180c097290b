"""Requests and settings of the tests with whole engines on a CUDA device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from gpu_engine.api.config import EngineConfig
from gpu_engine.model.loader import LoadedModel
from tests.gpu_engine.harness import UNHURRIED_MS, ask, tokens, with_drafts

SYNCS = ("host_callback", "device_flag")
PATIENT = {"row_timeout_ms": UNHURRIED_MS, "draft_timeout_ms": UNHURRIED_MS}

UNGUIDED = [
    partial(ask, [*range(196, 203)] * 3, max_tokens=60),
    partial(ask, tokens(1, 2), max_tokens=50, ignore_eos=True),
    partial(ask, tokens(17, 3), temperature=1.0, seed=2**64 - 1, ignore_eos=True),
    partial(ask, tokens(33, 4, repeat=8), temperature=0.7, top_p=0.9, seed=5),
    partial(ask, tokens(16, 5), temperature=0.7, top_k=5, min_p=0.05, seed=6),
    partial(ask, tokens(40, 6, repeat=20), repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    partial(ask, tokens(25, 7, repeat=5), temperature=0.4, bad_token_ids=(65, 66), min_tokens=20, seed=8),
]
GUIDED = [
    partial(ask, tokens(30, 1, repeat=10), grammar="50", max_tokens=90),
    partial(ask, tokens(12, 2), max_tokens=60, ignore_eos=True),
    partial(ask, tokens(20, 3), grammar="40", max_tokens=90, temperature=1.0, seed=3),
    partial(ask, tokens(33, 4), grammar="45", max_tokens=30, temperature=0.5, top_p=0.9),
    partial(ask, tokens(40, 7), grammar="48", max_tokens=90, repetition_penalty=1.3, presence_penalty=0.4),
]


@dataclass(frozen=True)
class Models:
    """One set of weights, loaded on two devices."""

    cpu: LoadedModel
    gpu: LoadedModel


def on_gpu(num_drafts: int, **fields: object) -> EngineConfig:
    return with_drafts(num_drafts, device="cuda", **{**PATIENT, **fields})
