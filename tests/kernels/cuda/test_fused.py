"""The small operators in Triton have the results of plain torch, which do not depend on the other rows."""

from __future__ import annotations

import pytest
import torch

from kernels.cuda import fused
from kernels.fused import Activation, NormKind, RMSNorm
from tests.kernels import fused_reference as reference

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16])


def rand(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(device, dtype)


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = 1e-5 if got.dtype == torch.float32 else 2**-9
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("shape", "channels"), [((1, 1), 64), ((3, 4), 20), ((2, 17), 128)])
def test_angles_are_the_rows_of_both_tables(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int], channels: int
) -> None:
    cos, sin = (rand(90, channels, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
    positions = torch.randint(0, 90, shape, generator=torch.Generator().manual_seed(3)).to(device, torch.int32)
    positions[-1, -1] = -1
    places = positions.clamp(min=0).long().view(-1)
    for got, table in zip(fused.angles_at(positions, cos, sin), (cos, sin), strict=True):
        assert got.is_contiguous()
        assert torch.equal(got, table[places])


@DTYPES
@pytest.mark.parametrize("kind", NormKind)
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (5, 64), (3, 1000)])
def test_norms_equal_reference(device: torch.device, dtype: torch.dtype, kind: NormKind, rows: int, width: int) -> None:
    norm = RMSNorm(rand(width, dtype=dtype, device=device, seed=9), 1e-5, kind)
    x = rand(rows, width + 3, dtype=dtype, device=device, scale=3.0)[:, :width]
    delta = rand(rows, width, dtype=dtype, device=device, seed=1)
    assert_near(fused.rms_norm(x, norm), reference.rms_norm(x, norm))
    total = x + delta
    assert_near(fused.add_rms_norm(x, delta, norm), reference.rms_norm(total, norm))
    assert torch.equal(x, total)


@DTYPES
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(
    ("rows", "heads", "head_dim", "turned"), [(1, (9, 3), 64, 64), (4, (4, 1), 128, 96), (3, (2, 2), 80, 20)]
)
def test_rotate_equals_reference(
    device: torch.device,
    dtype: torch.dtype,
    with_norm: bool,
    rows: int,
    heads: tuple[int, int],
    head_dim: int,
    turned: int,
) -> None:
    qkv = rand(rows, (sum(heads) + heads[1]) * head_dim + 16, dtype=dtype, device=device)
    angle = rand(rows, turned, dtype=torch.float32, device=device, seed=2, scale=10.0)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    kind = NormKind.ROUND_THEN_SCALE
    norms = [
        RMSNorm(rand(head_dim, dtype=dtype, device=device, seed=seed), eps, kind) if with_norm else None
        for seed, eps in ((4, 1e-6), (5, 0.5))
    ]
    want = reference.rotate(qkv, cos, sin, heads, head_dim, *norms)
    fused.rotate(qkv, cos, sin, heads=heads, head_dim=head_dim, q_norm=norms[0], k_norm=norms[1])
    assert torch.equal(qkv[:, sum(heads) * head_dim :], want[:, sum(heads) * head_dim :])
    torch.testing.assert_close(qkv, want, atol=1e-5 if dtype == torch.float32 else 2**-7, rtol=2**-8)


@DTYPES
@pytest.mark.parametrize("act", Activation)
@pytest.mark.parametrize(("rows", "width"), [(1, 1536), (3, 1000), (2, 5)])
def test_gated_equals_reference(
    device: torch.device, dtype: torch.dtype, act: Activation, rows: int, width: int
) -> None:
    x = rand(rows, 2 * width, dtype=dtype, device=device, scale=3.0)
    assert_near(fused.gated(x, act), reference.gated(x, act))


def test_a_row_has_the_same_bits_for_any_number_of_rows(device: torch.device) -> None:
    x = rand(6, 576, dtype=torch.float32, device=device)
    norm = RMSNorm(rand(576, dtype=torch.float32, device=device, seed=1), 1e-5, NormKind.ONE_PLUS_SCALE)
    normed, active = fused.rms_norm(x, norm), fused.gated(x, Activation.SILU)
    for part in (slice(0, 1), slice(2, 5)):
        assert torch.equal(fused.rms_norm(x[part], norm), normed[part])
        assert torch.equal(fused.gated(x[part], Activation.SILU), active[part])
