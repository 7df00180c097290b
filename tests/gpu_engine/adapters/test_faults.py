"""The grammar process dies, sequences with adapters are preempted or cancelled: no token changes, nothing leaks.

Not responsible for: a real grammar process (see tests/e2e/test_adapters.py).
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from gpu_engine.api.adapters import AdapterKind
from gpu_engine.core.engine import Engine
from gpu_engine.model.loader import LoadedModel, load_model
from shared_mem.channel import Record
from tests.gpu_engine import tiny
from tests.gpu_engine.adapters.files import save_lora, save_prompt
from tests.gpu_engine.harness import (
    PATIENCE_S,
    UNHURRIED_MS,
    Answer,
    answer_all,
    answer_each,
    ask,
    config,
    tokens,
    until_false,
    with_drafts,
)
from tests.gpu_engine.toy_sidecar import guided_engine

PATIENT = {"row_timeout_ms": UNHURRIED_MS}
CASES: list[tuple[str, str, str | None, dict[str, Any]]] = [
    ("a", "", "40", {}),
    ("b", "", "40", {"temperature": 0.8, "seed": 3}),
    ("", "p", "36", {"temperature": 1.0, "seed": 4}),
    ("a", "p", "40", {"repetition_penalty": 1.2}),
    ("", "", "30", {}),
    ("b", "q", None, {"temperature": 0.7, "seed": 5, "ignore_eos": True}),
]
"""(LoRA, prompt adapter, grammar, sampling): more than there are slots."""


@pytest.fixture(scope="module")
def fields(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the settings of an engine with a tiny model and four adapters."""
    folder = tiny.save(tiny.FAMILIES["llama"](), tmp_path_factory.mktemp("model"), rounds=True)
    root: Path = tmp_path_factory.mktemp("adapters")
    files = {
        "a": save_lora(folder, root / "a", seed=1),
        "b": save_lora(folder, root / "b", seed=2, rank=8, targets=("q_proj", "v_proj")),
        "p": save_prompt(root / "p", tokens=20, hidden=64, seed=1),
        "q": save_prompt(root / "q", tokens=3, hidden=64, seed=2),
    }
    return {"model": str(folder), "adapters": tuple(f"{name}={path}" for name, path in files.items()), **PATIENT}


@pytest.fixture(scope="module")
def model(fields: dict[str, Any]) -> LoadedModel:
    return load_model(config(**fields))


def made(engine: Engine) -> list[Answer]:
    """Return the answers of all cases, not yet submitted."""
    found = []
    for number, (lora, prompt, grammar, sampling) in enumerate(CASES):
        virtual = engine.adapters.find(AdapterKind.PROMPT, prompt) if prompt else None
        ids = tokens(30, number, repeat=10)
        answer = ask(
            [*(() if virtual is None else virtual.virtual_ids), *ids], grammar=grammar, max_tokens=60, **sampling
        )
        answer.change(prompt_adapter=virtual)
        answer.change(lora=engine.adapters.find(AdapterKind.LORA, lora) if lora else None)
        found.append(answer)
    return found


def users(engine: Engine) -> list[int]:
    return [use.in_use for use in engine.adapters.listed()]


@pytest.fixture(scope="module")
def expected(model: LoadedModel, fields: dict[str, Any]) -> list[list[int]]:
    """Return the tokens of each case, alone and without drafts."""
    with guided_engine(model, with_drafts(0, **fields)) as (engine, _):
        found = answer_each(engine, made(engine))
        assert users(engine) == [0] * 4
    assert len({tuple(answer) for answer in found}) == len(CASES)
    return found


@pytest.mark.parametrize("num_drafts", [0, 3, 7])
def test_a_killed_grammar_process_changes_no_token(
    num_drafts: int, model: LoadedModel, fields: dict[str, Any], expected: list[list[int]]
) -> None:
    with guided_engine(model, with_drafts(num_drafts, **fields)) as (engine, grammar):
        answers, reached, first = made(engine), threading.Event(), grammar.sidecar

        def die(record: Record) -> None:
            if record.commit_pos + len(record.committed) >= 6:
                first.stopping = True
                reached.set()

        first.before = die
        for answer in answers:
            answer.submit(engine)
        assert reached.wait(PATIENCE_S)
        grammar.lose_sidecar(engine)
        assert not all(answer.over for answer in answers)
        assert max(users(engine)) > 0  # paused sequences keep their adapters
        grammar.restore_sidecar(engine)
        assert [answer.wait().tokens for answer in answers] == expected
        until_false(lambda: users(engine) != [0] * 4)


@pytest.mark.parametrize("num_drafts", [0, 3, 7])
def test_a_preempted_sequence_has_the_same_tokens(
    num_drafts: int, model: LoadedModel, fields: dict[str, Any], expected: list[list[int]]
) -> None:
    small = {**fields, "max_model_len": 128, "kv_cache_tokens": 176}
    with guided_engine(model, with_drafts(num_drafts, **small)) as (engine, _):
        assert answer_all(engine, made(engine)) == expected
        assert engine.stats().preemptions > 0
        until_false(lambda: users(engine) != [0] * 4)


def test_cancelled_sequences_release_their_adapters_while_the_grammar_process_is_gone(
    model: LoadedModel, fields: dict[str, Any], expected: list[list[int]]
) -> None:
    with guided_engine(model, with_drafts(3, **fields)) as (engine, grammar):
        answers, reached, first = made(engine), threading.Event(), grammar.sidecar

        def die(record: Record) -> None:
            if record.commit_pos + len(record.committed) >= 6:
                first.stopping = True
                reached.set()

        first.before = die
        for answer in answers:
            answer.submit(engine)
        assert reached.wait(PATIENCE_S)
        grammar.lose_sidecar(engine)
        for answer in answers[:2]:
            engine.drop(answer.request)
        engine.abort(answers[3].request.request_id)
        answers[3].wait()
        until_false(lambda: users(engine)[0] > 0)  # only those that were cancelled had "a"
        grammar.restore_sidecar(engine)
        assert [answers[at].wait().tokens for at in (2, 4, 5)] == [expected[at] for at in (2, 4, 5)]
        until_false(lambda: users(engine) != [0] * 4)
