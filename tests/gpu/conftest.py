"""All tests of this folder need a CUDA device. Eager loading of kernels is set before CUDA is initialised."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_engine.model.loader import load_kernels_eagerly, load_model
from tests.gpu.on_gpu import GUIDED, UNGUIDED, Models
from tests.gpu_engine import tiny
from tests.gpu_engine.harness import UNHURRIED_MS, answer_each, config, unguided_engine, with_drafts
from tests.gpu_engine.toy_sidecar import guided_engine

load_kernels_eagerly()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tiny.save(tiny.FAMILIES["llama"](), tmp_path_factory.mktemp("rounds"), rounds=True)
    return Models(load_model(config(model=str(folder))), load_model(config(model=str(folder), device="cuda")))


@pytest.fixture(scope="session")
def unguided_tokens(models: Models) -> list[list[int]]:
    with unguided_engine(models.cpu, with_drafts(0)) as engine:
        return answer_each(engine, [make() for make in UNGUIDED])


@pytest.fixture(scope="session")
def guided_tokens(models: Models) -> list[list[int]]:
    with guided_engine(models.cpu, with_drafts(0, row_timeout_ms=UNHURRIED_MS)) as (engine, _):
        return answer_each(engine, [make() for make in GUIDED])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            assert item.get_closest_marker("gpu") is not None, f"{item.nodeid}: everything in tests/gpu is marked gpu"
