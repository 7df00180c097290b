"""The recurrent modules of each family against transformers', and the bits of a row however its sequence is cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpu_engine.model.attention import AttentionContext, attending
from gpu_engine.model.linear import pack_linears
from gpu_engine.model.recording import distance
from gpu_engine.model.recurrent.replacement import is_replaced, replace_recurrent
from gpu_engine.model.recurrent.rows import LayerStates, RecurrentForward, RecurrentPools, RecurrentRows
from tests.gpu_engine.model.recurrent.families import HYBRIDS, tiny
from tests.kernels.recurrent_reference import MAX_PENDING, ROWS, Layer, Memory, Sequence, step, whole


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def layer_of(made: Any, width: int, dtype: torch.dtype = torch.float32) -> Layer:
    """Return a module as the tests of kernels take a layer."""

    def run(x_NW: torch.Tensor, rows: RecurrentRows, memory: Memory) -> torch.Tensor:
        pools = RecurrentPools({made.layer_idx: made}, 0, 0)
        pools.layers[made.layer_idx] = LayerStates(memory.states, memory.pending_SRW)
        ctx = AttentionContext([], torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32))
        ctx.recurrent = RecurrentForward(pools, rows)
        with torch.inference_mode(), attending(ctx):
            out: torch.Tensor = made(x_NW[None].to(dtype))[0]
        return out

    return Layer(width, made.state_shapes, made.pending_width, run, lambda x_NW: x_NW)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", HYBRIDS)
def test_outputs_are_those_of_transformers(family: str, dtype: torch.dtype) -> None:
    net, own = tiny(family, dtype), tiny(family, dtype)
    made = replace_recurrent(net)
    originals = {module.layer_idx: module for module in own.modules() if is_replaced(module)}
    assert made.keys() == originals.keys()
    assert made
    x_NW = torch.randn(ROWS, own.config.hidden_size)
    for number, original in originals.items():
        with torch.inference_mode():
            want = original(x_NW[None].to(dtype))[0]
        got = whole(layer_of(made[number], own.config.hidden_size, dtype), x_NW)
        assert got.dtype == dtype
        assert distance(got, want) < (1e-5 if dtype == torch.float32 else 6e-2)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_row_has_the_same_bits_however_its_sequence_is_cut(family: str, num_threads: int) -> None:
    net = tiny(family, torch.bfloat16)
    made: Any = next(iter(replace_recurrent(net).values()))
    pack_linears(made)
    layer = layer_of(made, net.config.hidden_size, torch.bfloat16)
    sequences = [Sequence(layer, place, seed) for seed, place in enumerate((2, 0, 3))]
    torch.set_num_threads(num_threads)
    memory = layer.memory(4, MAX_PENDING)
    while running := [sequence for sequence in sequences if sequence.done < ROWS]:
        step(layer, memory, running)
