"""A drafting network writes keys only to the pages of their own sequence."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gpu_engine.core.engine import Engine
from gpu_engine.core.executor import lookahead
from gpu_engine.drafters.nets import DraftNet
from gpu_engine.model.loader import LoadedModel
from gpu_engine.step.buffers import StepBatch
from gpu_engine.step.prompt_rows import Chunks, Hidden
from tests.gpu_engine.harness import answer_all, ask, config, running, tokens, with_drafts


@dataclass(eq=False)
class WatchedNet:
    """A draft net that records the positions that its later links write."""

    net: DraftNet
    engine: Engine
    page_size: int
    writes: int = 0
    beyond: list[tuple[int, int, int]] = field(default_factory=list)
    """(slot, position, pages of its sequence) of each write past the last page that the sequence owns."""

    def __post_init__(self) -> None:
        self.layers, self.d2t_V = self.net.layers, self.net.d2t_V
        self.batch: StepBatch | None = None

    def prefill(self, chunks: Chunks, hidden: Hidden) -> None:
        self.net.prefill(chunks, hidden)

    def first(
        self, batch: StepBatch, place_B: torch.Tensor, going_B: torch.Tensor, wants_BL: torch.Tensor,
        page_table_BN: torch.Tensor, hidden: Hidden,
    ) -> torch.Tensor:  # fmt: skip
        self.batch = batch
        return self.net.first(batch, place_B, going_B, wants_BL, page_table_BN, hidden)

    def next(self, ids_B1: torch.Tensor, positions_B1: torch.Tensor, page_table_BN: torch.Tensor) -> torch.Tensor:
        assert self.batch is not None
        owned = {each.slot: each.pages for each in self.engine.sequence_stats()}
        for slot, position in zip(self.batch.slots_B.tolist(), positions_B1[:, 0].tolist(), strict=True):
            if position >= 0:
                self.writes += 1
                if position >= owned[slot] * self.page_size:
                    self.beyond.append((slot, position, owned[slot]))
        return self.net.next(ids_B1, positions_B1, page_table_BN)


def test_a_chain_writes_only_to_the_pages_of_its_sequence(llama: LoadedModel, overlap: bool) -> None:
    settings = with_drafts(
        7, draft_model=llama.name, max_batch_size=6, step_rows=64, overlap=overlap, jump_forward_tokens=0
    )
    engine = Engine(settings, replace(llama, max_model_len=settings.max_model_len))
    drafter: Any = engine.executor.runner.launcher._program.drafter  # type: ignore[attr-defined]
    while not hasattr(drafter, "net"):
        drafter = drafter.next_drafter
    drafter.net = net = WatchedNet(drafter.net, engine, settings.page_size)
    with running(engine):
        answer_all(
            engine, [ask(tokens(10 + seed, seed), max_tokens=90, seed=seed, ignore_eos=True) for seed in range(6)]
        )
        stats = engine.stats()
    assert stats.accepted_draft_tokens == stats.draft_tokens > 300, "the target is its own drafter"
    assert net.writes > 300
    assert net.beyond == []


def test_only_a_network_adds_its_chain_to_the_lookahead() -> None:
    assert lookahead(with_drafts(7), 0) == 8
    assert lookahead(with_drafts(7), 1) == 16
    assert lookahead(with_drafts(7, draft_model="m"), 1) == 16 + 6
    assert lookahead(config(drafter="none"), 1) == 2
