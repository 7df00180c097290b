"""The widened model in each kind: the numbers that the gguf package reads are near those that were rounded."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from tools.requantise import KINDS, MIXED, kind_of, rounded, wide, widened

ERRORS = {
    **{"q4_0": 0.1, "q4_1": 0.09, "q5_0": 0.05, "q5_1": 0.045, "q8_0": 0.01},
    **{"q2_k": 0.4, "q3_k": 0.2, "q4_k": 0.09, "q5_k": 0.045, "q6_k": 0.025},
    **{"iq4_nl": 0.1, "iq4_xs": 0.1, "mxfp4": 0.15, "f16": 1e-3, "bf16": 3e-3},
}
"""Kind -> the largest relative error of normal numbers: that of its bits."""


@pytest.mark.parametrize(("kind", "error"), ERRORS.items())
def test_a_matrix_is_rounded_with_the_error_of_its_bits(kind: str, error: float) -> None:
    x_NK = (np.random.default_rng(0).standard_normal((32, 768)) * 0.03).astype(np.float32)
    x_NK[4:6] = 0
    read_NK = dequantize(rounded(x_NK, kind), GGMLQuantizationType[kind.upper()])
    assert np.linalg.norm(read_NK - x_NK) < error * np.linalg.norm(x_NK)
    assert np.abs(read_NK[4:6]).max() == 0


def test_every_kind_has_an_error_here_and_a_mix_has_two() -> None:
    assert set(ERRORS) | set(MIXED) == set(KINDS)
    assert kind_of("q4_k_m", "token_embd.weight", 30) == "q6_k"
    assert {kind_of("q4_k_m", f"blk.{layer}.ffn_down.weight", 30) for layer in range(30)} == {"q4_k", "q6_k"}


@pytest.mark.parametrize(
    ("part", "shape", "wide_shape"),
    [
        ("token_embd", (320, 576), (320, 768)),
        ("blk.3.attn_q", (576, 576), (768, 768)),
        ("blk.3.attn_k", (192, 576), (256, 768)),
        ("blk.3.attn_v", (192, 576), (256, 768)),
        ("blk.3.attn_output", (576, 576), (768, 768)),
        ("blk.3.ffn_up", (1536, 576), (1536, 768)),
        ("blk.3.ffn_gate", (1536, 576), (1536, 768)),
        ("blk.3.ffn_down", (576, 1536), (768, 1536)),
    ],
)
def test_a_widened_matrix_is_the_matrix_with_zeros_up_to_whole_blocks(
    part: str, shape: tuple[int, int], wide_shape: tuple[int, int]
) -> None:
    x_NK = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    wide_NK = wide(f"{part}.weight", x_NK)
    assert wide_NK.shape == wide_shape
    assert np.array_equal(wide_NK[: shape[0], : shape[1]], x_NK)
    assert np.count_nonzero(wide_NK) == np.count_nonzero(x_NK)


@pytest.mark.slow
@pytest.mark.model
def test_the_widened_models_inputs_are_whole_blocks() -> None:
    tensors, fields = widened()
    assert {tensor.shape[-1] % 256 for tensor in tensors.values()} == {0}
    assert len(tensors) == 9 * fields["llama.block_count"] + 2


def test_a_widened_norm_counts_the_zeros() -> None:
    draw = np.random.default_rng(0)
    x_K, own_K = (draw.standard_normal(576).astype(np.float32) for _ in range(2))
    weight_K = wide("blk.3.attn_norm.weight", own_K)
    wide_K = np.concatenate([x_K, np.zeros(192, np.float32)])
    normed_K = wide_K / np.sqrt(np.square(wide_K).mean()) * weight_K
    assert np.allclose(normed_K[:576], x_K / np.sqrt(np.square(x_K).mean()) * own_K, rtol=1e-5)
    assert not normed_K[576:].any()
