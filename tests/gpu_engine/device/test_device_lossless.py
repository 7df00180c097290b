"""Every way to draft over a recorded device has the tokens of an engine on a CPU without drafts.

A row is one engine: its settings, what the grammar process proposes or refuses, and what the engine's counters say.
Not responsible for: drafters and events on a CPU (see tests/gpu_engine/test_lossless.py), trees of known branches (see
test_trees.py), what a decoupled model's streams do (see test_device_decoupled.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.request import FinishReason
from gpu_engine.core.draft_budget import DraftBudget
from gpu_engine.core.engine import Engine
from gpu_engine.model.loader import LoadedModel
from shared_mem.channel import Record
from shared_mem.layout import Stage, parent_of
from tests.fakes import EOS
from tests.gpu_engine.device.device_engine import (
    RecordedDevice,
    answer_over_a_loss,
    device_engine,
    guided_device_engine,
)
from tests.gpu_engine.device.device_requests import GUIDED, INTERPRETED, UNGUIDED, ByChance, on_cpu, on_device
from tests.gpu_engine.device.recorded_stream import RecordedStream
from tests.gpu_engine.drafters.proposals import Proposes
from tests.gpu_engine.harness import PATIENCE_S, Answer, answer_all, ask, executor_of, tokens
from tests.gpu_engine.step.random_budget import RandomBudget
from tests.gpu_engine.toy_sidecar import Automaton, ToyGrammar

pytestmark = INTERPRETED

LONGER = [
    partial(ask, tokens(20, 1, repeat=8), grammar="14", max_tokens=30),
    partial(ask, tokens(7, 2), max_tokens=6, ignore_eos=True),
    partial(ask, tokens(11, 3), grammar="17", max_tokens=12, temperature=1.0, seed=3),
    partial(ask, tokens(57, 4), grammar="30", max_tokens=40),
    partial(ask, tokens(9, 5), grammar="1", max_tokens=9),
    partial(ask, tokens(8, 6), grammar="13", max_tokens=20, temperature=0.5, seed=6),
]
"""Requests that end by a stop token, by `max_tokens` and by the model's length; one is unguided."""


@pytest.fixture(scope="module")
def longer_tokens(llama: LoadedModel) -> list[list[int]]:
    emitted = on_cpu(llama, [make() for make in LONGER])
    assert [len(ids) for ids in emitted] == [15, 6, 12, 7, 2, 14]
    return emitted


def rest_of(expected: list[list[int]], emitted: list[int]) -> list[int]:
    return next((ids[len(emitted) :] for ids in expected if ids[: len(emitted)] == emitted), [])


def half_wrong(expected: list[list[int]]) -> Proposes:
    """Return a proposer of two right tokens after an odd number of tokens, and otherwise of wrong ones."""
    return lambda automaton, emitted: rest_of(expected, emitted)[:2] if len(emitted) % 2 else [len(emitted), 65, 66]


def one_right(expected: list[list[int]]) -> Proposes:
    return lambda automaton, emitted: rest_of(expected, emitted)[:1]


def up_to_two_right(expected: list[list[int]]) -> Proposes:
    return lambda automaton, emitted: rest_of(expected, emitted)[: len(emitted) % 3]


def sometimes(expected: list[list[int]]) -> Proposes:
    """Return a proposer of the whole rest and more, of right tokens and then wrong ones, of wrong ones, or of none."""

    def proposes(automaton: Automaton, emitted: list[int]) -> list[int]:
        rest = rest_of(expected, emitted) if emitted else []
        return ([*rest, 65, 66], [*rest[:5], 67, 68], [len(emitted), 65, 66], [])[len(emitted) % 4]

    return proposes


def right_or_nothing(expected: list[list[int]]) -> Proposes:
    propose = sometimes(expected)
    return lambda automaton, emitted: propose(automaton, emitted)[:5] if len(emitted) % 4 == 1 else []


@dataclass(frozen=True)
class Row:
    """One engine of the table."""

    num_drafts: int
    fields: dict[str, Any] = field(default_factory=dict)
    """Settings; `draft_model` is "same", "other" or "head", and `drafter` is set last."""
    fast: bool = False
    free: bool = False
    """The requests are without grammars."""
    longer: bool = False
    count: int | None = None
    """The number of requests, or None for all."""
    proposes: Callable[[list[list[int]]], Proposes] | None = None
    budget: Callable[[], DraftBudget] | None = None
    refused: int = 0
    """Every so many records of a tree get no row."""
    lost: bool = False
    """The grammar process is lost in a step, and starts again."""
    warms_up: bool = False
    accepted: int = 0
    """More drafts than this are accepted, without jump-forward tokens."""
    share: float = 0.0
    """More than this share of drafts is accepted, without jump-forward tokens."""
    jumps: int = 0
    """More jump-forward tokens than this are accepted."""
    longest: int = 0
    """The largest number of drafts that a step verified, or 0."""


EAGER = {"overlap": False, "enforce_eager": True}
HOST, FLAG = {"sync": "host_callback"}, {"sync": "device_flag"}
PADDED = {"max_batch_size": 4}
"""Three lanes are padded to four."""
SAME = {"draft_model": "same", "draft_masks": "on"}
APART = {"drafter": "decoupled", "draft_model": "other"}
TREE = {"draft_tree": "on"}
OWN = {"draft_device": "cuda:1"}
SHORT = {"row_timeout_ms": 300.0, "draft_timeout_ms": 300.0}

ROWS = {
    "n-grams": Row(3, free=True, accepted=3),
    "n-grams, eager": Row(3, EAGER, free=True, count=2, accepted=3),
    "n-grams, host functions": Row(3, HOST | PADDED, fast=True),
    "n-grams, flags": Row(3, FLAG | PADDED),
    "by chance, host functions": Row(3, HOST, budget=ByChance),
    "by chance, flags": Row(3, FLAG, budget=ByChance),
    "any captured shape": Row(7, {"drafter": "ngram"}, longer=True, budget=partial(RandomBudget, seed=2)),
    "lost": Row(3, SHORT, fast=True, lost=True),
    "warmed up, host functions": Row(1, HOST | {"max_batch_size": 1}, count=1, warms_up=True),
    "warmed up, flags": Row(1, FLAG | {"max_batch_size": 1}, fast=True, count=1, warms_up=True),
    "warmed up without a grammar process": Row(1, {"max_batch_size": 1}, free=True, count=1, warms_up=True),
    "warmed up, eager": Row(1, EAGER | {"max_batch_size": 1}, free=True, count=1, warms_up=True),
    "jump forward, host functions": Row(3, HOST | PADDED, proposes=half_wrong, jumps=3),
    "jump forward, flags": Row(3, FLAG | PADDED, fast=True, proposes=half_wrong, jumps=3),
    "jump forward alone": Row(3, HOST | PADDED | {"drafter": "grammar"}, proposes=half_wrong, jumps=3),
    # Captured steps verify drafts that the host never saw, the first of a sequence with none.
    "every draft": Row(2, PADDED | {"verifies_every_draft": True}),
    "every draft, eager": Row(2, PADDED | {"verifies_every_draft": True, "enforce_eager": True}),
    "draft model": Row(2, PADDED | SAME, share=0.8),
    "draft model after jump forward": Row(2, PADDED | SAME, proposes=one_right, share=0.8, jumps=3),
    "many jump forward, host functions": Row(
        2, HOST | {"jump_forward_tokens": 7}, longer=True, proposes=sometimes, jumps=12, longest=7
    ),
    "many jump forward, flags": Row(
        1,
        FLAG | {"jump_forward_tokens": 7, "drafter": "grammar"},
        longer=True,
        proposes=sometimes,
        jumps=12,
        longest=7,
    ),
    **{
        f"{model} after many jump forward, masks {masks}": Row(
            2,
            {"draft_model": model, "draft_masks": masks, "jump_forward_tokens": 5},
            longer=True,
            proposes=sometimes,
            jumps=12,
            longest=5,
        )
        for model, masks in (("same", "on"), ("same", "off"), ("head", "on"))
    },
    "draft model reads jump forward": Row(
        2, SAME | {"jump_forward_tokens": 5}, longer=True, proposes=right_or_nothing, accepted=4, share=0.79
    ),
    "decoupled, no drafts": Row(0, APART, free=True),
    "decoupled, eager": Row(3, APART | EAGER, free=True, accepted=3),
    "decoupled": Row(7, APART, free=True, accepted=3),
    "decoupled, measured choice": Row(3, APART, free=True, budget=lambda: DraftBudget(by_length=False, computes=True)),
    "decoupled under a grammar": Row(
        7, APART | PADDED | FLAG | {"jump_forward_tokens": 7}, proposes=one_right, jumps=3
    ),
    "decoupled under a grammar on its device": Row(
        3, APART | PADDED | HOST | OWN | {"jump_forward_tokens": 3}, proposes=one_right, jumps=3
    ),
    "decoupled by chance": Row(3, APART | {"draft_model": "same"}, budget=ByChance),
    "decoupled by chance on its device": Row(3, APART | OWN | {"draft_model": "same"}, budget=ByChance),
    "decoupled, lost": Row(3, APART | PADDED | SHORT, lost=True),
    "tree of the lookup, host functions": Row(3, TREE | PADDED | HOST, jumps=3),
    "tree of the lookup, flags": Row(3, TREE | PADDED | FLAG, fast=True, jumps=3),
    # A random head shares the noise alone, which is enough for some drafts of sampled answers.
    "tree of a head": Row(15, TREE | {"draft_model": "head"}, free=True, count=2),
    "tree of a head, eager": Row(2, TREE | EAGER | {"draft_model": "head"}, free=True, count=2),
    # Jump-forward tokens are the trunk of the tree. A lane without its row verifies the same tree again.
    "tree of a head under a grammar, refused": Row(
        4, TREE | FLAG | {"draft_model": "head"}, proposes=up_to_two_right, jumps=3, refused=3
    ),
    "tree of a head under a grammar": Row(7, TREE | HOST | {"draft_model": "head"}, proposes=up_to_two_right, jumps=3),
}


@contextmanager
def opened(
    row: Row, llama: LoadedModel, settings: EngineConfig, expected: list[list[int]]
) -> Iterator[tuple[Engine, ToyGrammar | None, RecordedStream]]:
    """Run the engine of a row, and check its launches."""
    device = RecordedDevice(warms_up=row.warms_up)
    with ExitStack() as stack:
        grammar: ToyGrammar | None = None
        if row.free:
            engine, stream = stack.enter_context(device_engine(llama, settings, device))
        else:
            engine, grammar, stream = stack.enter_context(guided_device_engine(llama, settings, device))
            engine.grammar_slots.stall_s = PATIENCE_S  # a refused step takes the interpreter seconds
            sidecar = grammar.sidecar
            if row.proposes is not None:
                sidecar.proposes = row.proposes(expected)
            if row.refused:
                sidecar.refuse = lambda record: record.stage == Stage.TREE and len(sidecar.records) % row.refused == 0
        if row.warms_up:
            assert stream.ran > (40 if settings.enforce_eager else 100)
        if row.budget is not None:
            executor_of(engine).runner.budget = row.budget()
        yield engine, grammar, stream
        assert stream.failure is None
        counts = executor_of(engine).runner.launcher.stats  # type: ignore[attr-defined]
        assert (counts.replays > 0, counts.eager_steps > 0) == (not settings.enforce_eager, settings.enforce_eager)


@pytest.mark.parametrize(
    "name", [name if row.fast else pytest.param(name, marks=pytest.mark.slow) for name, row in ROWS.items()]
)
def test_tokens_equal_those_of_a_cpu(
    llama: LoadedModel,
    other: str,
    head: str,
    unguided_tokens: list[list[int]],
    guided_tokens: list[list[int]],
    longer_tokens: list[list[int]],
    name: str,
) -> None:
    row, fields = ROWS[name], dict(ROWS[name].fields)
    workloads = (UNGUIDED, unguided_tokens), (GUIDED, guided_tokens), (LONGER, longer_tokens)
    requests, expected = (part[: row.count] for part in workloads[0 if row.free else 1 + row.longer])
    if "draft_model" in fields:
        fields["draft_model"] = {"same": llama.name, "other": other, "head": head}[fields["draft_model"]]
    # `on_device` chooses the drafter by the model, so what names another one is set last.
    names = ("drafter", "draft_model", "draft_device") if "drafter" in fields else ()
    last = {name: fields.pop(name) for name in names if name in fields}
    settings = replace(on_device(row.num_drafts, **fields), **last)
    trees, records, grows = list[list[int]](), list[Record](), settings.draft_tree == "on"

    def watch(answer: Answer) -> None:
        if grows and row.free:
            trees.extend(executor_of(engine).runner.launcher.lane.tree.parent_BR.tolist())  # type: ignore[attr-defined]

    answers = [make(on_event=watch) for make in requests]
    with opened(row, llama, settings, expected) as (engine, grammar, _):
        if row.lost:
            assert grammar is not None
            assert answer_over_a_loss(engine, grammar, answers) == expected
        else:
            assert answer_all(engine, answers) == expected
        if isinstance(budget := executor_of(engine).runner.budget, ByChance):
            assert answer_all(engine, [make() for make in requests]) == expected
            assert len(budget.steps) == 4, "of some twelve steps each time, every kind comes"
        stats, records = engine.stats(), grammar.sidecar.records if grammar is not None else []
    for answer, ids in zip(answers, expected, strict=True) if not row.longer else ():
        assert answer.finish is (FinishReason.STOP if ids[-1] == EOS else FinishReason.LENGTH)
    assert row.lost or (stats.deferred_rows > 0) == (row.refused > 0), "a loss between two steps defers no row"
    drawn = stats.draft_tokens - stats.jump_forward_tokens
    accepted = stats.accepted_draft_tokens - stats.accepted_jump_forward_tokens
    assert stats.accepted_jump_forward_tokens >= row.jumps
    assert accepted >= max(row.accepted, row.share * drawn)
    if row.proposes in (half_wrong, sometimes):
        assert stats.jump_forward_tokens > stats.accepted_jump_forward_tokens
    verified = [record for record in records if record.stage == Stage.VERIFY]
    if row.longest:
        assert max(len(record.drafts) for record in verified) == row.longest
    if settings.draft_masks == "on" and row.proposes is None:
        # A stop token has no row after it that could be cached.
        assert {record.need_rows.bit_count() for record in verified if EOS not in record.drafts} == {1}
    if grows and records:
        assert {record.stage for record in records} == {Stage.TREE, Stage.PROPOSE}
        trees = [[0, *map(parent_of, record.drafts)] for record in records if record.stage == Stage.TREE]
    if grows and settings.draft_model == head:
        end = settings.num_draft_tokens + 1
        assert any(max(Counter(tree[1:end]).values(), default=0) > 1 for tree in trees), "a node with two children"
