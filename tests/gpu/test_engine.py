"""A whole engine on a GPU: captured steps say what eager ones say, whatever the drafter, the sync and the overlap."""

from __future__ import annotations

from functools import partial

import pytest

from gpu_engine.model.loader import LoadedModel, load_model
from tests.fakes import EOS
from tests.gpu_engine.core import tiny
from tests.gpu_engine.core.harness import answer_all, ask, config, free_engine, tokens, with_drafts
from tests.gpu_engine.core.toy_sidecar import guided_engine

pytestmark = pytest.mark.gpu

SYNCS = ("host_callback", "device_flag")
PATIENT = {"row_timeout_ms": 20_000.0, "draft_timeout_ms": 20_000.0}
FREE = [
    partial(ask, tokens(20, 1, repeat=8), max_tokens=40),
    partial(ask, tokens(9, 2), max_tokens=30, temperature=0.8, top_p=0.9, seed=2**64 - 3, ignore_eos=True),
    partial(ask, tokens(38, 3, repeat=9), max_tokens=30, temperature=0.4, repetition_penalty=1.3, seed=4),
    partial(ask, tokens(6, 4), max_tokens=30, temperature=0.6, top_k=9, bad_token_ids=(65, 66), seed=5),
    partial(ask, tokens(70, 6), max_tokens=20, ignore_eos=True),
]
"""More than there are slots."""
GUIDED = [
    partial(ask, tokens(20, 1, repeat=8), grammar="25", max_tokens=60),
    partial(ask, tokens(7, 2), max_tokens=20, ignore_eos=True),
    partial(ask, tokens(11, 3), grammar="19", max_tokens=60, temperature=1.0, seed=3),
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A tiny Llama in float32 on the device; its name is its folder."""
    folder = tiny.save(tiny.FAMILIES["llama"](), tmp_path_factory.mktemp("rounds"), rounds=True)
    return load_model(config(model=str(folder), dtype="float32", device="cuda"))


def say_free(model: LoadedModel, num_drafts: int, **fields: object) -> list[list[int]]:
    with free_engine(model, with_drafts(num_drafts, device="cuda", dtype="float32", **fields)) as engine:
        return answer_all(engine, [make() for make in FREE])


@pytest.fixture(scope="module")
def eager(llama: LoadedModel) -> list[list[int]]:
    return say_free(llama, 0, enforce_eager=True, overlap=False)


@pytest.mark.parametrize("overlap", [False, True], ids=["behind", "ahead"])
@pytest.mark.parametrize("num_drafts", [0, 3, 7])
def test_captured_steps_say_what_eager_ones_say(
    llama: LoadedModel, eager: list[list[int]], num_drafts: int, overlap: bool
) -> None:
    assert say_free(llama, num_drafts, overlap=overlap) == eager


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("drafter", ["none", "ngram", "model"])
def test_guided_answers_are_those_of_eager_steps(llama: LoadedModel, sync: str, drafter: str) -> None:
    said = {}
    for eager in (True, False):
        fields = {"device": "cuda", "dtype": "float32", "sync": sync, "enforce_eager": eager, **PATIENT}
        if drafter == "model":
            settings = config(drafter="model", draft_model=llama.name, num_draft_tokens=3, **fields)
        else:
            settings = with_drafts(3 if drafter == "ngram" else 0, **fields)
        with guided_engine(llama, settings) as (engine, _):
            said[eager] = answer_all(engine, [make() for make in GUIDED])
            assert engine.stats().deferred_rows == 0
    assert said[False] == said[True]
    assert said[False][0][-1] == said[False][2][-1] == EOS
    assert [len(ids) for ids in said[False]] == [26, 20, 20]
