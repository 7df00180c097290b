"""Tiny models whose layers differ, and a drafter whose drafts are right as often as a seed says.

Layers differ where some are recurrent, and where the heads of attention have several sizes.

Not responsible for: requests and engines (see harness.py).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from gpu_engine.core.cpu_executor import cpu_executor
from gpu_engine.core.engine import Engine
from gpu_engine.drafters.build import DrafterParts
from gpu_engine.model.loader import LoadedModel
from gpu_engine.step.buffers import StepBatch
from gpu_engine.step.launches import place_of
from gpu_engine.step.prompt_rows import Chunks, Hidden
from kernels.accept import StepTensors
from tests.fakes import EOS
from tests.gpu_engine import tiny
from tests.gpu_engine.harness import with_drafts
from tests.gpu_engine.model.recurrent.families import CONFIGS


def configuration(family: str) -> PreTrainedConfig:
    """Return the configuration of a tiny model of a family, with the tokens of `tiny`'s tokenizer."""
    if family not in CONFIGS:
        return (tiny.FAMILIES | tiny.OWN_FORWARD)[family]()
    shape = CONFIGS[family]()
    shape.vocab_size, shape.bos_token_id, shape.eos_token_id, shape.pad_token_id = tiny.VOCAB, 257, EOS, None
    return shape


def save(family: str, folder: Path, seed: int = 0) -> Path:
    """Write a tiny model of a family to `folder`."""
    return tiny.save(configuration(family), folder, seed=seed)


class Oracle:
    """Drafts what follows in `texts`, up to a wrong token at a place that its seed draws, and as many as it draws."""

    layers: tuple[int, ...] = ()

    def __init__(self, texts: Sequence[list[int]], seed: int, parts: DrafterParts) -> None:
        self._texts, self._random, self._stream = texts, random.Random(seed), parts.stream
        self._most = parts.config.num_drafts
        self.counts = list[int]()
        """Right drafts of each proposal."""

    def prefill(self, chunks: Chunks, hidden: Hidden) -> None:
        """Do nothing."""

    def propose(self, batch: StepBatch, step: StepTensors, page_table_BN: torch.Tensor, hidden: Hidden) -> None:
        """Write the drafts of the lanes that go on."""
        slot = batch.slot
        for b, at in enumerate(place_of(batch).tolist()):
            if not batch.lane.drafting_B[b]:
                continue
            length = int(slot.length_S[at])
            history = slot.history_SL[at, :length].tolist()
            text = next((text for text in self._texts if text[:length] == history), history)
            most = min(self._most, int(slot.draft_limit_S[at]), int(slot.params.max_length_S[at]) - length - 1)
            drafts = text[length : length + self._random.randint(0, max(0, most))]
            self.counts.append(len(drafts))
            if drafts and self._random.random() < 0.7:
                wrong = self._random.randrange(len(drafts))
                drafts[wrong] = (drafts[wrong] + 1) % 256
                self.counts[-1] = wrong
            slot.drafts_SR[at, : len(drafts)] = torch.tensor(drafts, dtype=torch.int32)
            slot.num_drafts_S[at] = len(drafts)


def engine_of_oracle(
    model: LoadedModel, texts: Sequence[list[int]], seed: int, num_drafts: int, **fields: Any
) -> Engine:
    """Return an engine whose drafts come from an `Oracle`."""
    settings = with_drafts(num_drafts, **{"jump_forward_tokens": 0, **fields})
    build = partial(cpu_executor, drafter_builders={"ngram": partial(Oracle, texts, seed)})
    return Engine(settings, model, build_executor=build)
