"""The small operators, native and in Triton, have the results of plain torch, which do not depend on other rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels import fused as native
from kernels.fused import Activation, HeadForm, NormKind, RMSNorm
from kernels.fused_arguments import EVERYWHERE
from tests.kernels import fused_reference as reference

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


class Ops:
    """The operators of one target, and numbers on its device."""

    def __init__(self, target: torch.device | None, dtype: torch.dtype) -> None:
        self.device, self.dtype, self.ops = target or torch.device("cpu"), dtype, native
        self.native = target is None
        if target is not None:
            from kernels.cuda import fused  # a CPU install has no Triton

            self.ops = fused  # type: ignore[assignment]

    def rand(self, *shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
        return made.to(self.device, dtype or self.dtype)

    def norm(self, width: int, kind: NormKind = NormKind.ROUND_THEN_SCALE, seed: int = 9, eps: float = 1e-5) -> RMSNorm:
        return RMSNorm(self.rand(width, seed=seed), eps, kind)

    def assert_near(self, got: torch.Tensor, want: torch.Tensor) -> None:
        """Assert a distance of a few ulp; in bfloat16 native kernels have equal bits, but for rare roundings."""
        assert got.shape == want.shape
        if not self.native:
            tolerance = 1e-5 if self.dtype == F32 else 2**-7
            torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
        elif self.dtype == F32:
            torch.testing.assert_close(got, want, atol=1e-6, rtol=2e-6)
        else:
            assert (got != want).float().mean() < 0.005
            torch.testing.assert_close(got.float(), want.float(), atol=1e-6, rtol=2**-6)


@pytest.fixture(params=["float32", "half"])
def ops(request: pytest.FixtureRequest, target: torch.device | None) -> Ops:
    """Triton's interpreter multiplies the bits of bfloat16, so its half precision is the other one."""
    half = BF16 if target is None else F16
    return Ops(target, F32 if request.param == "float32" else half)


@pytest.mark.parametrize(("shape", "channels"), [((1, 1), 64), ((3, 4), 20), ((2, 17), 128)])
def test_angles_are_the_rows_of_both_tables(ops: Ops, shape: tuple[int, int], channels: int) -> None:
    tables = [ops.rand(90, channels, seed=seed) for seed in (1, 2)]
    positions = torch.randint(0, 90, shape, generator=torch.Generator().manual_seed(3)).to(ops.device, torch.int32)
    positions[-1, -1] = -1
    places = positions.clamp(min=0).long().view(-1)
    for got, table in zip(ops.ops.angles_at(positions, *tables), tables, strict=True):
        assert got.is_contiguous()
        assert torch.equal(got, table[places])


@pytest.mark.parametrize("kind", NormKind)
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (5, 64), (3, 1000), (3, 5)])
def test_norms_equal_the_reference(ops: Ops, kind: NormKind, rows: int, width: int) -> None:
    norm, x = ops.norm(width, kind), ops.rand(rows, width + 3, scale=3.0)[:, :width] + 0.5
    ops.assert_near(ops.ops.rms_norm(x, norm), reference.rms_norm(x, norm))
    x, delta = x.contiguous(), ops.rand(rows, width, seed=1)
    total = x + delta
    ops.assert_near(ops.ops.add_rms_norm(x, delta, norm), reference.rms_norm(total, norm))
    assert torch.equal(x, total)


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(
    ("rows", "heads", "head_dim", "turned"),
    [(1, (9, 3), 64, 64), (5, (4, 2), 16, 16), (4, (4, 1), 128, 96), (3, (2, 2), 80, 20)],
)
def test_rotate_equals_the_reference(
    ops: Ops, with_norm: bool, rows: int, heads: tuple[int, int], head_dim: int, turned: int
) -> None:
    end = (sum(heads) + heads[1]) * head_dim
    qkv, angle = ops.rand(rows, end + 16), ops.rand(rows, turned, seed=2, scale=10.0, dtype=F32)
    cos, sin = angle.cos().to(ops.dtype), angle.sin().to(ops.dtype)
    kind = NormKind.ONE_PLUS_SCALE if ops.native else NormKind.ROUND_THEN_SCALE
    norms = [ops.norm(head_dim, kind, seed, eps) if with_norm else None for seed, eps in ((4, 1e-6), (5, 0.5))]
    want = reference.rotate(qkv, cos, sin, heads, head_dim, *norms)
    ops.ops.rotate(qkv, cos, sin, heads=heads, head_dim=head_dim, q_norm=norms[0], k_norm=norms[1])
    assert torch.equal(qkv[:, sum(heads) * head_dim :], want[:, sum(heads) * head_dim :])
    if ops.native and ops.dtype != F32 and not with_norm:
        assert torch.equal(qkv, want)
    elif ops.native and with_norm:
        torch.testing.assert_close(qkv.float(), want.float(), atol=1e-5 if ops.dtype == F32 else 0.05, rtol=0.02)
        assert (qkv != want).float().mean() < (1.0 if ops.dtype == F32 else 0.01)
    else:
        ops.assert_near(qkv, want)


@pytest.mark.parametrize(("heads", "head_dim"), [((4, 2), 80), ((3, 1), 32)])
def test_rotate_norms_the_values_alone_where_it_is_asked_to(ops: Ops, heads: tuple[int, int], head_dim: int) -> None:
    end = (sum(heads) + heads[1]) * head_dim
    qkv, angle = ops.rand(3, end + 16, scale=3.0), ops.rand(3, head_dim, seed=2, scale=10.0, dtype=F32)
    cos, sin = angle.cos().to(ops.dtype), angle.sin().to(ops.dtype)
    norms = [ops.norm(head_dim, NormKind.SCALE_THEN_ROUND, seed, eps) for seed, eps in ((4, 1e-6), (5, 0.5), (6, 0.1))]
    run = {"heads": heads, "head_dim": head_dim, "q_norm": norms[0], "k_norm": norms[1], "v_norm": norms[2]}
    if not ops.native:
        with pytest.raises(TypeError):
            ops.ops.rotate(qkv, cos, sin, **run)  # type: ignore[arg-type]
        return
    want = reference.rotate(qkv, cos, sin, heads, head_dim, *norms[:2], v_norm=norms[2])
    ops.ops.rotate(qkv, cos, sin, **run)  # type: ignore[arg-type]
    assert torch.equal(qkv[:, end:], want[:, end:])
    torch.testing.assert_close(qkv.float(), want.float(), atol=1e-5 if ops.dtype == F32 else 0.05, rtol=0.02)
    assert (qkv != want).float().mean() < (1.0 if ops.dtype == F32 else 0.01)


FORMS = [HeadForm(neighbours=True), HeadForm(whole_norms=True), HeadForm(norms_last=True), HeadForm(True, True, True)]


@pytest.mark.parametrize("wide_angles", [False, True])
@pytest.mark.parametrize("form", [HeadForm(), *FORMS])
@pytest.mark.parametrize(
    ("rows", "heads", "head_dim", "turned"), [(3, (9, 3), 64, 64), (5, (4, 1), 80, 36), (2, (3, 3), 32, 0)]
)
def test_other_forms_of_heads_equal_the_reference(
    ops: Ops, form: HeadForm, rows: int, heads: tuple[int, int], head_dim: int, turned: int, wide_angles: bool
) -> None:
    if not ops.native:
        pytest.skip("only a CPU has them")
    end = (sum(heads) + heads[1]) * head_dim
    qkv, angle = ops.rand(rows, end), ops.rand(rows, turned, seed=2, scale=10.0, dtype=F32)
    dtype = F32 if wide_angles else ops.dtype
    widths = [number * head_dim if form.whole_norms else head_dim for number in heads]
    numbers = zip(widths, (4, 5), (1e-6, 0.5), strict=True)
    norms = [ops.norm(width, NormKind.SCALE_THEN_ROUND, seed, eps) for width, seed, eps in numbers]
    run = {"heads": heads, "head_dim": head_dim, "q_norm": norms[0], "k_norm": norms[1], "form": form}
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    want = reference.rotate(qkv, cos, sin, heads, head_dim, *norms, form)
    native.rotate(qkv, cos, sin, **run)  # type: ignore[arg-type]
    assert torch.equal(qkv[:, sum(heads) * head_dim :], want[:, sum(heads) * head_dim :])
    torch.testing.assert_close(qkv.float(), want.float(), atol=1e-5 if ops.dtype == F32 else 0.05, rtol=0.02)
    if ops.dtype != F32:
        assert (qkv != want).float().mean() < 0.01


@pytest.mark.parametrize("form", FORMS)
def test_no_other_form_reaches_a_device(form: HeadForm) -> None:
    qkv, angles = (torch.empty(1, columns, device="meta") for columns in (4 * 32, 32))
    with pytest.raises(AssertionError, match="HeadForm"):
        native.rotate(qkv, angles, angles, heads=(2, 1), head_dim=32, form=form)


def test_angles_of_another_dtype_are_refused_on_a_device(ops: Ops) -> None:
    if ops.native or ops.dtype == F32:
        pytest.skip("a device in half precision")
    qkv, angles = ops.rand(1, 4 * 32), ops.rand(1, 32, dtype=F32)
    with pytest.raises(AssertionError):
        ops.ops.rotate(qkv, angles, angles, heads=(2, 1), head_dim=32)


@pytest.mark.parametrize("act", EVERYWHERE)
@pytest.mark.parametrize(("rows", "width"), [(1, 1536), (9, 96), (3, 1000), (3, 5)])
def test_gated_equals_the_reference(ops: Ops, act: Activation, rows: int, width: int) -> None:
    x = ops.rand(rows, 2 * width, scale=3.0)
    got, want = ops.ops.gated(x, act), reference.gated(x, act)
    if act == Activation.SILU or not ops.native:
        ops.assert_near(got, want)
    else:
        # torch's own operator loses digits in 1 + tanh near 0.
        torch.testing.assert_close(got.float(), want.float(), atol=1e-5, rtol=2**-6 if ops.dtype != F32 else 2e-6)
    ends = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4, 1.0, 1.0, 1.0, 1.0, 1.0]], device=ops.device)
    if ops.dtype == F32:
        exact = torch.tensor([[0.0, 0.0, 0.0, 100.0, 1e4]], device=ops.device)
        torch.testing.assert_close(ops.ops.gated(ends, act), exact, atol=1e-30, rtol=1e-6)


@pytest.mark.parametrize(("rows", "width"), [(1, 1536), (9, 96), (3, 5)])
def test_gate_and_up_of_gpt_oss_are_bounded(ops: Ops, rows: int, width: int) -> None:
    act, x = Activation.SWIGLU_OAI, ops.rand(rows, 2 * width, scale=8.0)
    if not ops.native:
        with pytest.raises(AssertionError):
            ops.ops.gated(x, act)
        return
    want = reference.gated(x.float(), act)  # in few bits torch rounds what the sigmoid makes larger
    torch.testing.assert_close(ops.ops.gated(x, act).float(), want, atol=1e-5, rtol=2e-6 if ops.dtype == F32 else 2**-6)
    nothing = torch.tensor([[float("nan"), 1.0, 1.0, float("nan")]], dtype=ops.dtype)
    assert ops.ops.gated(nothing, act).isnan().all(), "a bound does not hide what is no number"
    ends = torch.tensor([[-1e4, 1e4, 1e4, 0.0, 1.0, 1e4, -1e4, 1e4]], dtype=ops.dtype)
    exact = torch.tensor([[0.0, 56.0, -42.0, 0.0]], dtype=ops.dtype)
    torch.testing.assert_close(ops.ops.gated(ends, act), exact, atol=1e-30, rtol=1e-4 if ops.dtype == F32 else 2**-7)


def test_a_square_has_no_gate(ops: Ops) -> None:
    x = ops.rand(3, 96, scale=3.0)
    assert torch.equal(native.gated(x, Activation.RELU_SQUARED), torch.relu(x).square())


@pytest.mark.parametrize("name", ["norm", "add", "rotate", "gated"])
def test_a_row_has_the_same_bits_for_any_number_of_rows(ops: Ops, name: str) -> None:
    rows = 64 if ops.native else 20
    x, more, norm, head = ops.rand(rows, 576), ops.rand(rows, 576, seed=1), ops.norm(576), ops.norm(64)
    cos, sin = ops.rand(rows, 64, seed=2), ops.rand(rows, 64, seed=3)

    def turned(rows: slice) -> torch.Tensor:
        qkv = x[rows].clone()
        ops.ops.rotate(qkv, cos[rows], sin[rows], heads=(6, 2), head_dim=64, q_norm=head, k_norm=head)
        return qkv

    run: dict[str, Callable[[slice], Any]] = {
        "norm": lambda rows: ops.ops.rms_norm(x[rows], norm),
        "add": lambda rows: ops.ops.add_rms_norm(x[rows].clone(), more[rows], norm),
        "rotate": turned,
        "gated": lambda rows: ops.ops.gated(x[rows], Activation.SILU),
    }
    whole = run[name](slice(0, rows))
    for part in (slice(0, 1), slice(5, 6), slice(3, 20)):
        assert torch.equal(run[name](part), whole[part])
