"""Shapes of a prefill: few, and one for everything that may be prefilled together."""

from __future__ import annotations

import pytest

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.prefill_shapes import STEP, PrefillShapes


@pytest.mark.parametrize(
    ("budget", "lanes", "longest", "count"),
    [(256, 16, 256, 15), (2048, 16, 2048, 60), (300, 3, 300, 15), (100, 8, 64, 3), (16, 4, 16, 1)],
)
def test_what_fits_has_a_shape_that_is_one_of_a_few(budget: int, lanes: int, longest: int, count: int) -> None:
    shapes = PrefillShapes(budget, lanes, longest)
    assert len(shapes.every) == count
    seen = set()
    for sequences in range(1, lanes + 2):
        for length in range(1, longest + 1):
            shape = shapes.of(sequences, length)
            if shape is None:
                assert sequences * length > budget / 2.5 or sequences * STEP > budget / 2 or sequences > lanes
                continue
            B, P = shape
            assert sequences <= B < 2 * sequences
            assert length <= P
            assert P % STEP == 0
            assert P - length < max(STEP, P / 5)
            assert sequences == 1 or budget >= B * P
            seen.add(shape)
    assert seen == set(shapes.every)
    assert shapes.of(lanes + 1, 1) is None
    tokens = [B * P for B, P in shapes.every]
    assert tokens == sorted(tokens, reverse=True)


def test_a_cpu_prefills_one_sequence_at_a_time_and_a_gpu_several() -> None:
    assert EngineConfig(device="cpu").prefill_shapes.of(2, 1) is None
    assert EngineConfig(device="cuda").prefill_shapes.of(8, 32) == (8, 32)
    assert EngineConfig(device="cuda", max_batch_size=2).prefill_shapes.of(3, 1) is None
    assert max(EngineConfig(device="cuda", max_model_len=64).prefill_shapes.every) == (16, 32)
    assert {P for _, P in EngineConfig(device="cuda", max_model_len=64).prefill_shapes.every} == {32, 64}
