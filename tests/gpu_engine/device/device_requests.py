"""Requests and settings of engines whose device is a recorded stream."""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Sequence
from functools import partial

import pytest

from gpu_engine.api.config import EngineConfig
from gpu_engine.core.draft_budget import DraftBudget, Plan, Proposal, Shape
from gpu_engine.model.loader import LoadedModel
from tests.gpu_engine.harness import Answer, answer_each, ask, tokens, unguided_engine, with_drafts
from tests.gpu_engine.toy_sidecar import guided_engine

INTERPRETED = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton: pip install .[dev]"),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="for Triton's interpreter; tests/gpu is for a device"
    ),
    # The interpreter computes with numpy, which warns about values that masks or a select discard.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
"""Marks of a module whose kernels run in Triton's interpreter."""

SMALL = {"max_batch_size": 2, "max_model_len": 64, "max_batched_tokens": 32, "row_timeout_ms": 20_000.0}

PATIENT = {"draft_timeout_ms": 20_000.0, "fuse_parts": False}

BIASES = tuple((token, 1.5 - token % 4) for token in range(0, 300, 13))

UNGUIDED = [
    partial(ask, [*range(196, 203)] * 2, max_tokens=9),
    partial(
        ask, tokens(9, 2), max_tokens=6, temperature=0.8, top_p=0.9, seed=2**64 - 3, ignore_eos=True, logit_bias=BIASES
    ),
    partial(
        ask,
        tokens(38, 3, repeat=9),
        max_tokens=6,
        temperature=0.4,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        seed=4,
    ),
    partial(
        ask, tokens(6, 4), max_tokens=8, temperature=0.6, top_k=9, bad_token_ids=(65, 66), bad_words=((70, 71),), seed=5
    ),
]
"""More requests than there are slots, so that slots are assigned again."""

GUIDED = [
    partial(ask, tokens(20, 1, repeat=8), grammar="8", max_tokens=30),
    partial(ask, tokens(7, 2), max_tokens=6, ignore_eos=True),
    partial(ask, tokens(11, 3), grammar="7", max_tokens=30, temperature=1.0, seed=3, logit_bias=BIASES),
]


def on_device(num_drafts: int, **fields: object) -> EngineConfig:
    return with_drafts(num_drafts, device="cuda", **{**SMALL, **PATIENT, **fields})


def on_cpu(model: LoadedModel, answers: list[Answer], **fields: object) -> list[list[int]]:
    """Answer each request by itself on a CPU, without drafts, and return the tokens."""
    settings = with_drafts(0, **{**SMALL, **fields})
    if any(answer.request.grammar is not None for answer in answers):
        with guided_engine(model, settings) as (engine, _):
            return answer_each(engine, answers)
    with unguided_engine(model, settings) as engine:
        return answer_each(engine, answers)


class ByChance(DraftBudget):
    """Verifies and proposes by chance; drafts of an earlier step may be out of date."""

    def __init__(self) -> None:
        super().__init__()
        self._rng = random.Random(1)
        self.steps: set[tuple[bool, bool]] = set()

    def choose(self, proposals: Sequence[Proposal], shapes: Sequence[Shape] | None, *, guided: bool) -> Plan:
        verifies, proposes = self._rng.random() < 0.5, self._rng.random() < 0.5
        self.steps.add((verifies, proposes))
        limits = tuple(self._rng.randint(1, 3) * verifies for _ in proposals)
        return Plan(tuple(proposals), limits, guided, proposes=proposes)
