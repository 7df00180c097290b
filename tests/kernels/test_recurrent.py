"""Recurrent layers: their numbers, and the bits of a row however its sequence is cut into forwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn.functional import silu

from kernels import recurrent as native
from kernels.recurrent import Gate, RecurrentKernels
from kernels.recurrent_rows import RecurrentRows
from tests.kernels.recurrent_reference import FEW_ROWS, LAYERS, MAX_PENDING, ROWS, Layer, Sequence, ints, step, whole
from tests.kernels.vector_units import assert_same_on_every_unit


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def kernels(target: torch.device | None) -> Iterator[RecurrentKernels]:
    """The native kernels, and Triton's with every tensor on their device."""
    if target is None:
        yield native
        return
    from kernels.cuda import recurrent  # a CPU install has no Triton

    with target:
        yield recurrent


@pytest.mark.parametrize("kind", LAYERS)
def test_numbers_are_those_of_a_loop_in_float64(kernels: RecurrentKernels, kind: str) -> None:
    torch.manual_seed(3)
    layer = LAYERS[kind](kernels)
    x_NW = torch.randn(ROWS if kernels is native else FEW_ROWS, layer.width)
    torch.testing.assert_close(whole(layer, x_NW).double(), layer.reference(x_NW), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_row_has_the_same_bits_however_its_sequence_is_cut(kernels: RecurrentKernels, kind: str) -> None:
    """In chunks and in verifications of any number of drafts, of which the rejected ones leave no trace; in a batch
    with others and with padding."""
    take_in_parts(LAYERS[kind](kernels), ROWS if kernels is native else FEW_ROWS)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_row_has_the_same_bits_for_any_number_of_threads(kind: str) -> None:
    torch.set_num_threads(3)
    take_in_parts(LAYERS[kind](native), ROWS)


@pytest.mark.parametrize("kind", LAYERS)
def test_every_vector_unit_gives_the_same_bits(kind: str) -> None:
    torch.manual_seed(3)
    layer = LAYERS[kind](native)
    x_NW = torch.randn(FEW_ROWS, layer.width)

    def run() -> torch.Tensor:
        take_in_parts(layer, FEW_ROWS)  # equal to `whole`, row by row
        return whole(layer, x_NW)

    assert_same_on_every_unit(run)


def take_in_parts(layer: Layer, num_rows: int) -> None:
    sequences = [Sequence(layer, place, seed, num_rows) for seed, place in enumerate((2, 0, 3))]
    memory = layer.memory(4, MAX_PENDING)
    untouched = [part[1].clone() for part in (*memory.states, memory.pending_SRW)]
    while running := [sequence for sequence in sequences if sequence.done < num_rows]:
        assert not step(layer, memory, running).any()
    for part, before in zip((*memory.states, memory.pending_SRW), untouched, strict=True):
        assert torch.equal(part[1], before)


def test_a_forward_that_commits_no_row_writes_the_rows_that_it_takes_again(kernels: RecurrentKernels) -> None:
    """They are accepted, and their inputs are overwritten."""
    torch.manual_seed(5)
    layer = LAYERS["delta rule"](kernels)
    x_NW = torch.randn(9, layer.width)
    memory, one = layer.memory(1, MAX_PENDING), ints(0)
    for first, end, redo, commit in ((0, 7, 0, 4), (6, 8, 2, 0), (6, 9, 0, 3)):
        rows = RecurrentRows.rectangle(
            end - first, one, fresh_L=ints(int(first == 0)), redo_L=ints(redo), commit_L=ints(commit)
        )
        out = layer.run(x_NW[first:end], rows, memory)
    assert torch.equal(out, whole(layer, x_NW)[6:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", Gate)
def test_gated_norms(kernels: RecurrentKernels, kind: Gate, dtype: torch.dtype) -> None:
    """Two rows of heads share a row of gates, whose rows are strided; each half of a row has its own norm."""
    torch.manual_seed(6)
    x_NV, gate_PG = torch.randn(6, 44), torch.randn(3, 100).to(dtype)[:, :88]
    weight_V = None if kind is Gate.ONLY else torch.randn(44)
    got = kernels.gated_norm(x_NV, gate_PG, weight_V, kind, eps=1e-5, groups=2)
    if kernels is native:
        assert_same_on_every_unit(lambda: native.gated_norm(x_NV, gate_PG, weight_V, kind, eps=1e-5, groups=2))
    gates = silu(gate_PG.double().reshape(6, 44))
    x = x_NV.double() * gates if kind is not Gate.AFTER_NORM else x_NV.double()
    if weight_V is not None:
        halves = x.view(6, 2, 22)
        x = (halves * torch.rsqrt(halves.pow(2).mean(-1, keepdim=True) + 1e-5)).view(6, 44) * weight_V.double()
    want = x * gates if kind is Gate.AFTER_NORM else x
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)
