"""A draft model apart from the step: lossless, at the target's own noise, bounded, and exchanged while requests run."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.errors import ExchangeRefused, InvalidRequest, LockstepError, ShuttingDown, UnknownModel
from gpu_engine.core.engine import Engine
from gpu_engine.drafters.decoupled import TAIL, DraftModel
from gpu_engine.model.loader import LoadedModel, ModelNotSupported, load_model
from tests.gpu_engine.drafters.exchanges import exchanging
from tests.gpu_engine.harness import (
    Answer,
    Hold,
    answer_all,
    answer_each,
    ask,
    config,
    tokens,
    unguided_engine,
    with_drafts,
)

MIX = [
    partial(ask, tokens(12, 1), max_tokens=40),
    partial(ask, tokens(70, 2), max_tokens=30, temperature=0.7, seed=2),
    partial(ask, tokens(33, 3), max_tokens=50, temperature=1.2, seed=3, top_p=0.9),
    partial(ask, tokens(20, 4), max_tokens=40, repetition_penalty=1.3, presence_penalty=0.4),
    partial(ask, tokens(9, 5), max_tokens=45, bad_token_ids=(40, 41, 42)),
]


def made() -> list[Answer]:
    return [make() for make in MIX]


def decoupled(draft_model: str, **fields: object) -> EngineConfig:
    return config(drafter="decoupled", draft_model=draft_model, **fields)


@pytest.fixture(scope="module")
def expected(llama: LoadedModel) -> list[list[int]]:
    with unguided_engine(llama, with_drafts(0)) as engine:
        return answer_each(engine, made())


def test_the_target_as_its_own_draft_model_is_always_right(llama: LoadedModel, expected: list[list[int]]) -> None:
    """It draws with the target's noise, penalties and bans, from the target's logits."""
    with unguided_engine(llama, decoupled(llama.name)) as engine:
        assert answer_all(engine, made()) == expected
        stats = engine.stats()
    assert stats.draft_tokens == stats.accepted_draft_tokens > 150
    with unguided_engine(llama, decoupled(llama.name, num_draft_tokens=3)) as engine:
        answer_each(engine, [ask(tokens(6, 1), max_tokens=41, ignore_eos=True)])
        stats = engine.stats()
    assert stats.steps == 1 + 40 // 4, "one token, then K + 1 of them in each step"
    assert not any(stats.drafts_per_step.counts[4:])


class Watched(DraftModel):
    """A draft model that records what it reads."""

    reads: list[tuple[int, int, int]]
    """(slot, first position, tokens) of each fill."""
    rows: list[tuple[int, int]]
    """(slot, position) of each row of each forward."""

    @classmethod
    def of(cls, draft: DraftModel) -> Watched:
        made = cls(draft.model, draft.d2t_V, draft.pages, draft.table_SN)
        object.__setattr__(made, "reads", [])
        object.__setattr__(made, "rows", [])
        return made

    def fill(self, slot: int, ids: np.ndarray, start: int) -> None:
        self.reads.append((slot, start, len(ids)))
        super().fill(slot, ids, start)

    def logits(self, slots: Any, ids_BT: np.ndarray, positions_BT: np.ndarray) -> torch.Tensor:
        lanes = zip(slots, positions_BT.tolist(), strict=True)
        self.rows.extend((slot, position) for slot, row in lanes for position in row if position >= 0)
        return super().logits(slots, ids_BT, positions_BT)


def watched(engine: Engine) -> Watched:
    drafter = engine.executor.decoupled
    assert drafter is not None
    drafter.draft = draft = Watched.of(drafter.draft)
    return draft


def test_a_long_text_is_read_in_parts_that_a_step_allows(llama: LoadedModel) -> None:
    """`max_batched_tokens` is 16 here."""
    with unguided_engine(llama, decoupled(llama.name)) as engine:
        draft = watched(engine)
        proposals: list[int] = []
        drafter: Any = engine.executor.decoupled
        propose = drafter._propose

        def counted(batch: object) -> None:
            before = len(draft.reads)
            propose(batch)
            proposals.append(sum(count for _, _, count in draft.reads[before:]))

        drafter._propose = counted
        answer_all(engine, [ask(tokens(100, seed), max_tokens=40, ignore_eos=True) for seed in range(2)])
        assert engine.stats().accepted_draft_tokens > 10
    assert max(proposals) == 16
    assert sum(proposals) >= 2 * (100 - TAIL)


def test_nothing_of_a_slots_earlier_sequence_is_used(llama: LoadedModel) -> None:
    """The same prompt again: the model reads all of it again, and drafts only from that."""
    found = []
    with unguided_engine(llama, decoupled(llama.name)) as engine:
        draft = watched(engine)
        for _ in range(2):
            answer_each(engine, [ask(tokens(30, 1), max_tokens=20, temperature=0.9, seed=1)])
            read = {place for _, start, count in draft.reads for place in range(start, start + count)}
            assert read | {place for _, place in draft.rows} >= set(range(30))
            found.append(draft.reads.copy())
            draft.reads.clear()
            draft.rows.clear()
    assert found[0] == found[1]


def test_drafts_beyond_what_was_verified_are_computed_once(llama: LoadedModel) -> None:
    """Steps that verify one draft of seven use the others later."""
    with unguided_engine(llama, decoupled(llama.name, step_rows=2, max_batch_size=1)) as engine:
        draft = watched(engine)
        answer_each(engine, [ask(tokens(6, 1), max_tokens=41, ignore_eos=True)])
        stats = engine.stats()
    assert stats.accepted_draft_tokens == stats.draft_tokens > 15
    assert len(draft.rows) <= 6 + 41 + 7


# -- exchange --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_drafts", [pytest.param(3, marks=pytest.mark.slow), 7])
def test_an_exchange_changes_no_token_of_running_requests(
    llama: LoadedModel, draft_models: dict[str, str], expected: list[list[int]], num_drafts: int
) -> None:
    dirs = (str(Path(llama.name).parent),)
    settings = decoupled(draft_models["other"], num_draft_tokens=num_drafts, draft_dirs=dirs)
    with unguided_engine(llama, settings) as engine:
        answers = made()
        hold = Hold(engine, lambda: all(len(answer.tokens) >= 2 for answer in answers[:4]))
        for answer in answers:
            answer.submit(engine)
        with hold.reached():
            assert not all(answer.over for answer in answers)
            before = engine.stats()
            thread, results = exchanging(engine, llama.name)
            assert engine.draft_models.name == draft_models["other"]
        assert [answer.wait().tokens for answer in answers] == expected
        thread.join(60)
        assert engine.draft_models.name == llama.name
        assert [info.name for info in results] == [llama.name]  # type: ignore[attr-defined]
        after = engine.stats()
        assert after.accepted_draft_tokens > before.accepted_draft_tokens
        # From here on the target drafts for itself.
        assert answer_all(engine, made()) == expected
        last = engine.stats()
    wrong = [s.draft_tokens - s.accepted_draft_tokens for s in (before, after, last)]
    assert wrong[0] > 0
    assert wrong[1] - wrong[0] <= 4 * num_drafts, "at the exchange the four slots had drafts of the former model"
    assert wrong[2] == wrong[1]


def test_a_closed_engine_ends_an_exchange_that_waits(llama: LoadedModel, draft_models: dict[str, str]) -> None:
    settings = decoupled(llama.name, draft_dirs=(str(Path(draft_models["other"]).parent),))
    engine = Engine(settings, replace(llama, max_model_len=settings.max_model_len))
    thread, results = exchanging(engine, draft_models["other"])  # the engine's thread never runs
    engine.close()
    thread.join(60)
    assert [type(result) for result in results] == [ShuttingDown]
    with pytest.raises(ShuttingDown):
        engine.draft_models.exchange(draft_models["other"])


@pytest.fixture(scope="module")
def foreign(llama: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a draft model with one more token in its vocabulary."""
    folder = tmp_path_factory.mktemp("foreign") / "model"
    shutil.copytree(llama.name, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][-1], "id": 290, "content": "<|more|>"})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_what_cannot_draft_is_refused_at_start(llama: LoadedModel, foreign: Path) -> None:
    with pytest.raises(ModelNotSupported, match=r"^draft_model: its tokenizer is not that of "):
        Engine(decoupled(str(foreign)), llama)
    with pytest.raises(ModelNotSupported, match=r"^draft_dirs: /none is no directory"):
        Engine(decoupled(llama.name, draft_dirs=("/none",)), llama)


def test_what_cannot_be_exchanged_is_refused_and_the_model_before_drafts_on(
    llama: LoadedModel, foreign: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    outside, missing = tmp_path / ".." / "..", tmp_path / "none"
    refusals: list[tuple[object, type[LockstepError], str]] = [
        (foreign, InvalidRequest, f"path: its tokenizer is not that of {llama.name}, so its drafts mean other tokens"),
        ("/etc", InvalidRequest, "path: '/etc' is not below draft_dirs of the server"),
        (outside, InvalidRequest, "is not below draft_dirs of the server"),
        (missing, UnknownModel, f"path: {missing} is not there"),
        (tmp_path / "empty", InvalidRequest, "has no config.json"),
    ]
    settings = decoupled(llama.name, draft_dirs=(str(foreign.parent), str(tmp_path)))
    with unguided_engine(llama, settings) as engine:
        for path, kind, message in refusals:
            with pytest.raises(kind, match=re.escape(message)):
                engine.draft_models.exchange(str(path))
        assert engine.draft_models.name == llama.name
        assert answer_all(engine, made()) == expected
        assert engine.stats().accepted_draft_tokens == engine.stats().draft_tokens > 100


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"drafter": "decoupled"}, "this server exchanges no draft model (its setting draft_dirs is empty)"),
        ({"drafter": "ngram", "draft_model": ""}, "drafter is ngram; only decoupled exchanges its model"),
        ({"drafter": "model"}, "drafter is model; only decoupled exchanges its model"),
    ],
)
def test_a_server_that_exchanges_nothing_says_so(llama: LoadedModel, fields: dict[str, str], message: str) -> None:
    engine = Engine(config(**{"draft_model": llama.name, **fields}), llama)
    try:
        with pytest.raises(ExchangeRefused, match=re.escape(f"path: {message}")):
            engine.draft_models.exchange("/models/other")
    finally:
        engine.close()


@pytest.mark.slow
def test_loading_beside_an_engine_leaves_the_default_dtype_alone(llama: LoadedModel) -> None:
    """transformers sets it for all threads while it loads, and a step may make tensors without a dtype."""

    def dtypes_while_loading(*, beside: bool) -> set[torch.dtype]:
        seen: set[torch.dtype] = set()

        def profile(frame: FrameType, event: str, argument: object) -> None:
            if event == "return":
                seen.add(torch.get_default_dtype())

        sys.setprofile(profile)
        try:
            loaded = load_model(replace(config(model=llama.name), dtype="bfloat16"), beside=beside)
        finally:
            sys.setprofile(None)
        assert loaded.dtype == next(loaded.net.parameters()).dtype == torch.bfloat16
        return seen

    assert dtypes_while_loading(beside=True) == {torch.float32}
    assert torch.bfloat16 in dtypes_while_loading(beside=False), "else this test sees nothing"
