"""Tokens and their log-probabilities keep their bits whatever the library rounds, and would not if it multiplied more
than 16 rows.

Each answer of an engine with drafts, other requests or other chunks is compared with the answer of an engine without
drafts to the request by itself. One rounding seldom changes a token; it changes the bits of each log-probability.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from gpu_engine.core.draft_budget import EveryDraft
from gpu_engine.model.loader import LoadedModel
from tests.gpu_engine.device.conftest import small_llama
from tests.gpu_engine.device.device_engine import device_engine
from tests.gpu_engine.device.device_requests import INTERPRETED, on_device
from tests.gpu_engine.device.rounding import Library, load_rounded
from tests.gpu_engine.harness import Answer, answer_each, ask, config, executor_of, held, tokens
from tests.kernels.ordered_sums import ordered_sums

pytestmark = [*INTERPRETED, pytest.mark.slow]

EXACT: dict[str, Any] = {"ignore_eos": True, "logprobs": 0}
REQUESTS: list[Callable[[], Answer]] = [
    partial(ask, tokens(60, 1, repeat=40), max_tokens=20, **EXACT),
    partial(ask, tokens(24, 2, repeat=12), max_tokens=20, **EXACT),
    partial(ask, tokens(9, 4), max_tokens=24, **EXACT, temperature=0.5, seed=4),
]
SIZES = {"max_model_len": 128, "max_batch_size": 3}
EAGER = {"enforce_eager": True, "overlap": False}


@pytest.fixture(scope="module")
def exact() -> Iterator[None]:
    with ordered_sums():
        yield


@dataclass(frozen=True)
class Way:
    """An engine whose products have other numbers of rows than a lonely step's."""

    num_drafts: int
    fields: dict[str, Any] = field(default_factory=dict)
    rows: tuple[int, ...] = ()
    """Numbers of rows of some of its products."""
    preempts: bool = False
    """The KV cache has no room for all sequences."""
    rounds: int = 1
    """How often all requests are answered, the later times from the prefix cache."""


WAYS = {
    "drafts of three sequences": Way(7, {"max_batched_tokens": 16}, (24, 8)),
    "a whole prompt": Way(3, {"max_batched_tokens": 128} | EAGER, (128, 12)),
    "trees": Way(7, {"max_batched_tokens": 16, "draft_tree": "on"}, (24,)),
    "preempted": Way(7, {"max_batched_tokens": 64, "max_model_len": 80, "kv_cache_tokens": 80}, (24,), preempts=True),
    "from the prefix cache": Way(7, {"max_batched_tokens": 64, "prefix_cache": True}, (24,), rounds=2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose likeliest tokens are close to each other."""
    return str(small_llama(tmp_path_factory.mktemp("close"), rounds=False))


Bits = list[tuple[int, float]]
"""Each token with its log-probability."""


def bits_of(answer: Answer) -> Bits:
    return list(zip(answer.tokens, [entry.logprob for entry in answer.logprobs], strict=True))


def answers_of(model: LoadedModel, way: Way) -> list[Bits]:
    """Answer all requests at once; which steps they share follows from the settings, never from time."""
    with device_engine(model, on_device(way.num_drafts, **SIZES | way.fields)) as (engine, _):
        executor_of(engine).runner.budget = EveryDraft()
        for _ in range(way.rounds):
            answers = [make() for make in REQUESTS]
            with held(engine):
                for answer in answers:
                    answer.submit(engine)
            found = [bits_of(answer.wait()) for answer in answers]
        assert (engine.stats().preemptions > 0) == way.preempts
        assert way.rounds == 1 or answers[0].telemetry.cached_tokens > 0
    return found


@pytest.fixture(scope="module")
def alone(folder: str, exact: None) -> list[Bits]:
    """The tokens of each request by itself, in chunks of 16 and without drafts."""
    model = load_rounded(config(model=folder, fuse_parts=False), library := Library())
    settings = on_device(0, max_batched_tokens=16, **SIZES | EAGER | {"max_batch_size": 1})
    with device_engine(model, settings) as (engine, _):
        answers = [make() for make in REQUESTS]
        answer_each(engine, answers)
    assert set(library.kernel_rows) == {1, 32}, "steps, and chunks of 16 in the smallest shape"
    return [bits_of(answer) for answer in answers]


@pytest.mark.parametrize("name", WAYS)
def test_tokens_do_not_depend_on_the_librarys_rounding(folder: str, alone: list[Bits], name: str) -> None:
    model = load_rounded(config(model=folder, fuse_parts=False), library := Library())
    assert answers_of(model, WAYS[name]) == alone
    assert library.kernel_rows >= {*WAYS[name].rows}


@pytest.mark.parametrize("name", ["drafts of three sequences", "a whole prompt"])
def test_tokens_differ_where_the_library_multiplies_more_than_16_rows(
    folder: str, alone: list[Bits], name: str
) -> None:
    """The products of an earlier version: it shows that the test before would notice."""
    model = load_rounded(config(model=folder, fuse_parts=False), library := Library())
    library.above = 16
    assert answers_of(model, WAYS[name]) != alone
    assert max(library.kernel_rows) <= 16 < max(rows for _, rows in library.calls)
