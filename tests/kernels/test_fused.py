"""The native small operators have the results of plain torch, which do not depend on the other rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.fused import Activation, NormKind, RMSNorm, add_rms_norm, gated, rms_norm, rotate
from tests.kernels import fused_reference as reference

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def rand(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def norm_of(width: int, dtype: torch.dtype, kind: NormKind = NormKind.ROUND_THEN_SCALE, seed: int = 9) -> RMSNorm:
    return RMSNorm(rand(width, dtype=dtype, seed=seed), 1e-5, kind)


def assert_nearly_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    """Assert a distance of a few ulp in float32, and in bfloat16 equal bits except for a rare rounding the other
    way."""
    assert got.shape == want.shape
    if got.dtype == torch.float32:
        torch.testing.assert_close(got, want, atol=1e-6, rtol=2e-6)
    else:
        assert (got != want).float().mean() < 0.005
        torch.testing.assert_close(got.float(), want.float(), atol=1e-6, rtol=2**-6)


@DTYPES
@pytest.mark.parametrize("kind", NormKind)
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (7, 64), (33, 1000), (3, 5)])
def test_rms_norm_equals_reference(dtype: torch.dtype, kind: NormKind, rows: int, width: int) -> None:
    norm, x = norm_of(width, dtype, kind), rand(rows, width + 3, dtype=dtype, scale=3.0)[:, :width]
    assert_nearly_bits(rms_norm(x, norm), reference.rms_norm(x, norm))


@DTYPES
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (33, 1000), (3, 5)])
def test_add_rms_norm_equals_reference(dtype: torch.dtype, rows: int, width: int) -> None:
    norm, x, delta = norm_of(width, dtype), rand(rows, width, dtype=dtype), rand(rows, width, dtype=dtype, seed=1)
    total = x + delta
    assert_nearly_bits(add_rms_norm(x, delta, norm), reference.rms_norm(total, norm))
    assert torch.equal(x, total)


@DTYPES
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(
    ("rows", "heads", "head_dim", "turned"),
    [(1, (9, 3), 64, 64), (5, (4, 2), 16, 16), (40, (8, 1), 128, 96), (3, (2, 2), 80, 20)],
)
def test_rotate_equals_reference(
    dtype: torch.dtype, with_norm: bool, rows: int, heads: tuple[int, int], head_dim: int, turned: int
) -> None:
    qkv = rand(rows, (sum(heads) + heads[1]) * head_dim + 16, dtype=dtype)
    angle = rand(rows, turned, dtype=torch.float32, seed=2, scale=10.0)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    norms = [norm_of(head_dim, dtype, NormKind.ONE_PLUS_SCALE, seed) if with_norm else None for seed in (4, 5)]
    want = reference.rotate(qkv, cos, sin, heads, head_dim, *norms)
    rotate(qkv, cos, sin, heads=heads, head_dim=head_dim, q_norm=norms[0], k_norm=norms[1])
    end = sum(heads) * head_dim
    assert torch.equal(qkv[:, end:], want[:, end:])
    if with_norm:
        torch.testing.assert_close(qkv.float(), want.float(), atol=1e-5 if dtype == torch.float32 else 0.05, rtol=0.02)
        assert (qkv != want).float().mean() < (1.0 if dtype == torch.float32 else 0.01)
    elif dtype == torch.bfloat16:
        assert torch.equal(qkv, want)
    else:
        torch.testing.assert_close(qkv, want, atol=1e-6, rtol=1e-6)


@DTYPES
@pytest.mark.parametrize("act", Activation)
@pytest.mark.parametrize(("rows", "width"), [(1, 1536), (9, 96), (40, 1000), (3, 5)])
def test_gated_equals_reference(dtype: torch.dtype, act: Activation, rows: int, width: int) -> None:
    x = rand(rows, 2 * width, dtype=dtype, scale=3.0)
    got, want = gated(x, act), reference.gated(x, act)
    if act == Activation.SILU:
        assert_nearly_bits(got, want)
    else:
        # torch's own operator loses digits in 1 + tanh near 0.
        torch.testing.assert_close(got.float(), want.float(), atol=1e-5, rtol=2**-6 if dtype != torch.float32 else 2e-6)


def test_gated_has_no_overflow_at_the_ends() -> None:
    gate, up = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4]]), torch.ones(1, 5)
    for act in Activation:
        got = gated(torch.cat([gate, up], 1), act)
        torch.testing.assert_close(got, torch.tensor([[0.0, 0.0, 0.0, 100.0, 1e4]]), atol=1e-30, rtol=1e-6)


@DTYPES
@pytest.mark.parametrize("name", ["norm", "add", "rotate", "gated"])
def test_a_row_has_the_same_bits_for_any_number_of_rows(dtype: torch.dtype, name: str) -> None:
    rows, norm = 64, norm_of(576, dtype)
    x, more = rand(rows, 576, dtype=dtype), rand(rows, 576, dtype=dtype, seed=1)
    head = norm_of(64, dtype)
    cos, sin = rand(rows, 64, dtype=dtype, seed=2), rand(rows, 64, dtype=dtype, seed=3)

    def turned(rows: slice) -> torch.Tensor:
        qkv = x[rows].clone()
        rotate(qkv, cos[rows], sin[rows], heads=(6, 2), head_dim=64, q_norm=head, k_norm=head)
        return qkv

    run: Callable[[slice], torch.Tensor] = {
        "norm": lambda rows: rms_norm(x[rows], norm),
        "add": lambda rows: add_rms_norm(x[rows].clone(), more[rows], norm),
        "rotate": turned,
        "gated": lambda rows: gated(x[rows], Activation.SILU),
    }[name]
    whole = run(slice(0, rows))
    for part in (slice(0, 1), slice(5, 6), slice(3, 20)):
        assert torch.equal(run(part), whole[part])
