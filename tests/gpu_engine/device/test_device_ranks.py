"""A model over two ranks with a device each: one graph a rank, and the tokens of one rank on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from gpu_engine.api.request import FinishReason
from gpu_engine.core.engine import Engine
from gpu_engine.core.prefill_graphs import Prefill
from gpu_engine.model.loader import LoadedModel, load_model
from tests.gpu_engine import tiny
from tests.gpu_engine.beams import search, search_all
from tests.gpu_engine.device.device_engine import guided_device_engine
from tests.gpu_engine.device.device_ranks import DeviceRanks
from tests.gpu_engine.device.device_requests import GUIDED, INTERPRETED, SMALL, UNGUIDED, ByChance, on_cpu, on_device
from tests.gpu_engine.harness import (
    Hold,
    answer_all,
    ask,
    config,
    executor_of,
    tokens,
    unguided_engine,
    with_drafts,
)

pytestmark = INTERPRETED

MIX = [*GUIDED, UNGUIDED[0], UNGUIDED[2]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    family = tiny.FAMILIES["llama"]()
    family.num_hidden_layers, family.num_attention_heads, family.num_key_value_heads = 1, 2, 2
    family.head_dim = family.hidden_size // family.num_attention_heads
    return str(tiny.save(family, tmp_path_factory.mktemp("two") / "heads"))


@pytest.fixture(scope="module")
def whole(folder: str) -> LoadedModel:
    return load_model(config(model=folder, fuse_parts=False))


@pytest.fixture
def ranks(folder: str, tmp_path: Path) -> Iterator[DeviceRanks]:
    two = DeviceRanks(folder, tmp_path / "store")
    yield two
    two.end()


@pytest.fixture(scope="module")
def expected(whole: LoadedModel) -> list[list[int]]:
    return on_cpu(whole, [make() for make in MIX])


@pytest.mark.parametrize("num_drafts", [0, pytest.param(7, marks=pytest.mark.slow)])
def test_guided_and_free_tokens_are_those_of_one_rank_and_each_rank_replays_graphs(
    folder: str, ranks: DeviceRanks, expected: list[list[int]], num_drafts: int
) -> None:
    """The whole model drafts on rank 0, so it is right."""
    fields = {"draft_model": folder} if num_drafts else {}
    with guided_device_engine(ranks.model, on_device(num_drafts, **fields)) as (engine, _, stream):
        executor = executor_of(engine)
        assert isinstance(executor.prefill, Prefill)
        at_start = executor.prefill.launches.total()
        if num_drafts:
            executor.runner.budget = ByChance()
        assert answer_all(engine, [make() for make in MIX]) == expected
        assert stream.failure is ranks.stream.failure is None
        stats, counts = engine.stats(), executor.runner.launcher.stats
        num_steps, num_prefills = counts.replays, executor.prefill.launches.total() - at_start
    assert (stats.accepted_draft_tokens > 5) == (num_drafts > 0)
    assert counts.eager_steps == 0
    assert ranks.stream.eager == [], "the other rank enqueues graphs only"
    assert sum(graph.replays for graph in ranks.follower.graphs.values()) == num_steps + num_prefills
    assert {graph.kinds.count("kernel") for graph in ranks.follower.graphs.values()} == {1}
    # The ids, both sums of the only layer, and the logits of a step.
    assert ranks.link.met == 4 * num_steps + 3 * num_prefills


@pytest.mark.slow
def test_a_cancelled_request_and_copied_pages_change_no_token_of_others(
    whole: LoadedModel, ranks: DeviceRanks, expected: list[list[int]]
) -> None:
    """Beams run eagerly, and copy pages; then another engine of rank 0 has another cache."""
    beam = partial(search, tokens(21, 3), max_tokens=6, width=2)
    with unguided_engine(whole, with_drafts(0, **SMALL)) as engine:
        found = search_all(engine, [beam()])[0].tokens
    for _ in range(2):
        with guided_device_engine(ranks.model, on_device(0)) as (engine, _, stream):
            cancel_in_the_middle(engine)
            assert answer_all(engine, [make() for make in MIX[:2]]) == expected[:2]
            assert search_all(engine, [beam()])[0].tokens == found
            assert stream.failure is ranks.stream.failure is None
    assert "kernel" in ranks.stream.eager


def cancel_in_the_middle(engine: Engine) -> None:
    endless = ask(tokens(7, 5), max_tokens=50, ignore_eos=True)
    hold = Hold(engine, lambda: len(endless.tokens) >= 2)
    endless.submit(engine)
    with hold.reached():
        assert engine.abort(endless.request.request_id)
    assert endless.wait().finish is FinishReason.ABORTED
