"""Branches of known trees, over a recorded stream, are accepted and change no token.

Not responsible for: trees of the lookup under a grammar and of heads (see test_device_lossless.py).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import pytest
import torch

from gpu_engine.drafters.build import BUILDERS
from gpu_engine.model.loader import LoadedModel
from gpu_engine.step.buffers import StepBatch
from gpu_engine.step.prompt_rows import Chunks, Hidden
from gpu_engine.step.stream import Stream
from kernels.accept import StepTensors
from shared_mem.channel import Record
from shared_mem.layout import Stage, parent_of
from tests.gpu_engine.device.device_engine import (
    RecordedDevice,
    after_three_tokens,
    answer_over_a_loss,
    device_engine,
    guided_device_engine,
)
from tests.gpu_engine.device.device_requests import GUIDED, INTERPRETED, UNGUIDED, on_cpu, on_device
from tests.gpu_engine.device.recorded_stream import opaque
from tests.gpu_engine.harness import (
    Answer,
    answer_all,
    ask,
    executor_of,
)
from tests.gpu_engine.tiny import VOCAB

pytestmark = INTERPRETED

PARENTS = (0, 0, 2, 2, 4)
"""Of the drafts of `KnownTree`: two after the last token, two after the second one, and one after the last of
these."""


class KnownTree:
    """Drafts a tree whose second branches are the tokens of known answers, and whose first ones are not."""

    layers: tuple[int, ...] = ()

    def __init__(self, stream: Stream, answers: dict[tuple[int, ...], list[int]]) -> None:
        self._stream, self._answers = stream, answers

    def prefill(self, chunks: Chunks, hidden: Hidden) -> None:
        """Do nothing: the history is enough."""

    def propose(self, batch: StepBatch, step: StepTensors, page_table_BN: torch.Tensor, hidden: Hidden) -> None:
        """Enqueue one launch."""
        self._stream.kernel(opaque(self._propose), batch)

    def _propose(self, batch: StepBatch) -> None:
        slot = batch.slot
        assert slot.parents_SR is not None
        for b, s in enumerate(batch.slots_B.tolist()):
            if s < 0 or not batch.lane.drafting_B[b]:
                continue
            length, prompt = int(slot.length_S[s]), int(slot.params.prompt_length_S[s])
            text = slot.history_SL[s, :length].tolist()
            right = [*self._answers[tuple(text[:prompt])][length - prompt :], 1, 1, 1][:3]
            wrong = [(token + 1) % VOCAB for token in right]
            drafts = [wrong[0], right[0], wrong[1], right[1], right[2]]
            slot.drafts_SR[s, : len(drafts)] = torch.tensor(drafts)
            slot.parents_SR[s, : len(drafts)] = torch.tensor(PARENTS)
            room = int(slot.params.max_length_S[s]) - length - 1
            slot.num_drafts_S[s] = max(0, min(len(drafts), int(slot.draft_limit_S[s]), batch.max_rows - 1, room))


def known_trees(requests: Sequence[partial[Answer]], answers: list[list[int]]) -> RecordedDevice:
    """Return a device whose drafter is a `KnownTree` of these answers."""
    known = {tuple(make().request.prompt_ids): ids for make, ids in zip(requests, answers, strict=True)}
    assert len(known) == len(requests)
    return RecordedDevice(drafter_builders={**BUILDERS, "ngram": lambda parts: KnownTree(parts.stream, known)})


@pytest.mark.parametrize(
    "fields",
    [{}, pytest.param({"overlap": False, "enforce_eager": True}, marks=pytest.mark.slow)],
    ids=["graph", "eager"],
)
def test_accepted_branches_change_no_token(
    llama: LoadedModel, unguided_tokens: list[list[int]], fields: dict[str, bool]
) -> None:
    """Greedy and sampled, with penalties, biases, filters and bad words. A lane in the middle of a tree has another
    next to it, and slots are assigned again."""
    count = 2 if fields else len(UNGUIDED)
    requests, expected = UNGUIDED[:count], unguided_tokens[:count]
    with device_engine(llama, on_device(5, draft_tree="on", **fields), known_trees(requests, expected)) as (engine, _):
        assert answer_all(engine, [make() for make in requests]) == expected
        # A step emits up to four tokens: three drafts of the second branches and one of its own.
        assert engine.stats().accepted_draft_tokens > sum(map(len, expected)) // 3


@pytest.mark.slow
def test_branches_of_the_lookup_change_no_token(llama: LoadedModel) -> None:
    """Text of four tokens in random order: runs are short, and each was continued in several ways."""
    words, draw = [70, 80, 81, 90], random.Random(3)
    sampled = {"temperature": 1.0, "ignore_eos": True, "logit_bias": tuple((token, 12.0) for token in words)}
    prompts = [draw.choices(words, k=24) for _ in range(2)]
    requests = [partial(ask, prompt, max_tokens=14, seed=seed, **sampled) for seed, prompt in enumerate(prompts)]
    expected = on_cpu(llama, [make() for make in requests])
    trees: list[list[list[int]]] = []
    with device_engine(llama, on_device(5, draft_tree="on", overlap=False)) as (engine, _):
        tree = executor_of(engine).runner.launcher.lane.tree  # type: ignore[attr-defined]
        answers = [make(on_event=lambda _: trees.append(tree.parent_BR.tolist())) for make in requests]
        assert answer_all(engine, answers) == expected
        assert engine.stats().accepted_draft_tokens > 0
    branches = [row for parents_BR in trees for row in parents_BR if row != [0, *range(5)]]
    assert len(branches) > 3


@pytest.mark.parametrize(
    ("sync", "refused"),
    [*(pytest.param(sync, 0, marks=pytest.mark.slow) for sync in ("host_callback", "device_flag")), ("device_flag", 3)],
)
def test_accepted_branches_under_a_grammar_change_no_token(
    llama: LoadedModel, guided_tokens: list[list[int]], sync: str, refused: int
) -> None:
    """Every `refused`-th record gets no row, so that its lane verifies the same tree again."""
    settings = on_device(5, draft_tree="on", sync=sync, max_batch_size=4)
    with guided_device_engine(llama, settings, known_trees(GUIDED, guided_tokens)) as (engine, grammar, _):
        if refused:
            grammar.sidecar.refuse = lambda record: len(grammar.sidecar.records) % refused == 0
        assert answer_all(engine, [make() for make in GUIDED]) == guided_tokens
        stats, records = engine.stats(), grammar.sidecar.records
        assert (stats.deferred_rows > 0) == (refused > 0)
    assert stats.accepted_draft_tokens > sum(map(len, guided_tokens)) // 3
    drafts = [draft for record in records if record.stage == Stage.TREE for draft in record.drafts]
    assert any(parent_of(draft) == 0 for draft in drafts)
    assert max(map(parent_of, drafts)) == max(PARENTS)


def is_branched(record: Record) -> bool:
    """Return whether the record has a tree in which two drafts have one parent."""
    parents = [parent_of(draft) for draft in record.drafts]
    return record.stage == Stage.TREE and len({*parents}) < len(parents)


@pytest.mark.slow
def test_a_sidecar_that_is_lost_in_a_tree_changes_no_token(llama: LoadedModel, guided_tokens: list[list[int]]) -> None:
    """The record of the tree is read, and never answered."""
    fields = {"draft_tree": "on", "sync": "device_flag", "row_timeout_ms": 300.0, "draft_timeout_ms": 300.0}
    settings = on_device(5, max_batch_size=4, **fields)
    with guided_device_engine(llama, settings, known_trees(GUIDED, guided_tokens)) as (engine, grammar, stream):

        def in_a_tree(record: Record) -> bool:
            return is_branched(record) and after_three_tokens(record)

        found = answer_over_a_loss(engine, grammar, [make() for make in GUIDED], in_a_tree)
        assert found == guided_tokens
        assert stream.failure is None
