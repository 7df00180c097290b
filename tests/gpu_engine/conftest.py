"""Models of the core's tests, loaded once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers.utils import logging as transformers_logging

from gpu_engine.model.loader import LoadedModel, load_model
from tests.fakes import EOS
from tests.gpu_engine import eagle, tiny
from tests.gpu_engine.core.guided_requests import legal, made
from tests.gpu_engine.harness import UNHURRIED_MS, answer_each, config, with_drafts
from tests.gpu_engine.toy_sidecar import guided_engine

transformers_logging.disable_progress_bar()


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a family's name to its folder."""
    folders: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in folders:
            shape = (tiny.FAMILIES | tiny.OWN_FORWARD)[family]()
            folders[family] = tiny.save(shape, tmp_path_factory.mktemp("model"))
        return folders[family]

    return folder


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A tiny Llama in float32 that repeats itself. Engines of the tests run one after another, so they may share it."""
    folder = tiny.save(tiny.FAMILIES["llama"](), tmp_path_factory.mktemp("rounds"), rounds=True)
    return load_model(config(model=str(folder)))


@pytest.fixture(scope="session")
def draft_models(llama: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of draft models: "same" is the tiny Llama itself, and "other" sometimes agrees with it; two EAGLE3 heads.

    "circle eagle3" knows the tiny Llama's repeating answers; drafts of "random eagle3" are rarely accepted.
    Both cover two thirds of the vocabulary.
    """
    other = tiny.save(tiny.FAMILIES["llama"](), tmp_path_factory.mktemp("other"), rounds=True, seed=1)
    circle, random = (tmp_path_factory.mktemp(name) / "eagle3" for name in ("circle", "random"))
    eagle.save_circle(Path(llama.name), circle)
    eagle.save_random(Path(llama.name), random)
    return {"same": llama.name, "other": str(other), "circle eagle3": str(circle), "random eagle3": str(random)}


@pytest.fixture(scope="session")
def guided_tokens(llama: LoadedModel) -> list[list[int]]:
    """The tokens of `guided_requests.made`: one request at a time, and one token a step."""
    answers = made()
    with guided_engine(llama, with_drafts(0, row_timeout_ms=UNHURRIED_MS)) as (engine, _):
        answer_each(engine, answers)
    for answer in answers:
        if answer.request.grammar is not None:
            assert legal(answer)
            assert answer.finish is not None
            assert answer.finish.name == ("STOP" if answer.tokens[-1] == EOS else "GRAMMAR_INCOMPLETE")
    assert [len(answer.tokens) for answer in answers] == [51, 60, 41, 30, 50, 2, 49]
    return [answer.tokens for answer in answers]


@pytest.fixture(params=[False, True], ids=["sequential", "overlapped"])
def overlap(request: pytest.FixtureRequest) -> bool:
    """Whether a step is launched before the outputs of the step before it are processed."""
    return bool(request.param)
