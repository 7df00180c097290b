"""Models with recurrent layers on a CUDA device have the tokens of a CPU in float32."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_engine.model.loader import load_model
from tests.gpu.on_gpu import GUIDED, SYNCS, UNGUIDED, Models, on_gpu
from tests.gpu_engine import hybrids
from tests.gpu_engine.harness import (
    UNHURRIED_MS,
    answer_all,
    answer_each,
    config,
    unguided_engine,
    with_drafts,
)
from tests.gpu_engine.toy_sidecar import guided_engine

pytestmark = pytest.mark.gpu

FAMILIES = ("lfm2", "qwen3_5", "bamba", "jamba dense")
"""Short convolutions, delta nets, and the mixers of Mamba 2 and 1."""


@pytest.fixture(scope="module", params=FAMILIES)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = str(hybrids.save(request.param, Path(tmp_path_factory.mktemp("hybrid"))))
    return Models(load_model(config(model=folder)), load_model(config(model=folder, device="cuda")))


@pytest.mark.parametrize("num_drafts", [0, 3, 7])
def test_hybrids_have_the_tokens_of_a_cpu(models: Models, num_drafts: int) -> None:
    """At once, and then again from the prefix cache."""
    with unguided_engine(models.cpu, with_drafts(0)) as engine:
        expected = answer_each(engine, [make() for make in UNGUIDED])
    with unguided_engine(models.gpu, on_gpu(num_drafts)) as engine:
        assert answer_all(engine, [make() for make in UNGUIDED]) == expected
        assert answer_each(engine, [make() for make in UNGUIDED]) == expected
        stats = engine.stats()
    assert stats.cached_tokens > 0
    assert (stats.draft_tokens > stats.accepted_draft_tokens > 0) == (num_drafts > 0)


@pytest.mark.parametrize("sync", SYNCS)
def test_guided_hybrids_have_the_tokens_of_a_cpu(models: Models, sync: str) -> None:
    with guided_engine(models.cpu, with_drafts(0, row_timeout_ms=UNHURRIED_MS)) as (engine, _):
        expected = answer_each(engine, [make() for make in GUIDED])
    with guided_engine(models.gpu, on_gpu(3, sync=sync)) as (engine, _):
        assert answer_all(engine, [make() for make in GUIDED]) == expected
        assert engine.stats().deferred_rows == 0
