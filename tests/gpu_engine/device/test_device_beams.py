"""Beam searches whose steps run over a recorded stream are those of a CPU."""

from __future__ import annotations

from functools import partial

import pytest

from gpu_engine.model.loader import LoadedModel
from tests.gpu_engine.beams import search, search_all
from tests.gpu_engine.device.device_engine import device_engine, guided_device_engine
from tests.gpu_engine.device.device_requests import INTERPRETED
from tests.gpu_engine.harness import ask, executor_of, tokens, unguided_engine, with_drafts
from tests.gpu_engine.toy_sidecar import guided_engine

pytestmark = INTERPRETED

SMALL = {"max_batch_size": 4, "max_model_len": 64, "max_batched_tokens": 32, "row_timeout_ms": 20_000.0}
ON_DEVICE = {"device": "cuda", "draft_timeout_ms": 20_000.0, "fuse_parts": False}
FREE = partial(search, tokens(17, 2), 3, max_tokens=7, repetition_penalty=1.2, logit_bias=((65, 1.5),))
GUIDED = partial(search, tokens(17, 3), 3, max_tokens=9, grammar="6")
OTHER = partial(ask, tokens(9, 5), max_tokens=5, ignore_eos=True)


def test_a_search_beside_an_ordinary_sequence(llama: LoadedModel) -> None:
    with unguided_engine(llama, with_drafts(0, **SMALL)) as engine:
        (expected,), plain = search_all(engine, [FREE()]), OTHER()
        plain.submit(engine)
        plain.wait()
    with device_engine(llama, with_drafts(1, **SMALL, **ON_DEVICE)) as (engine, _):
        found, other = FREE(), OTHER()
        other.submit(engine)
        search_all(engine, [found])
        assert other.wait().tokens == plain.tokens
        counts = executor_of(engine).runner.launcher.stats  # type: ignore[attr-defined]
        assert counts.eager_steps > 0
    assert found.tokens == expected.tokens
    assert found.scores == pytest.approx(expected.scores, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["host_callback", "device_flag"])
def test_a_guided_search(llama: LoadedModel, sync: str) -> None:
    with guided_engine(llama, with_drafts(0, **SMALL)) as (engine, _):
        (expected,) = search_all(engine, [GUIDED()])
    with guided_device_engine(llama, with_drafts(0, **SMALL, **ON_DEVICE, sync=sync)) as (engine, grammar, _):
        (found,) = search_all(engine, [GUIDED()])
        assert grammar.forks
        assert len(grammar.opened) == 1
    assert found.tokens == expected.tokens
    assert found.scores == pytest.approx(expected.scores, rel=1e-5)
