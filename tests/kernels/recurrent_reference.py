"""Recurrent layers over plain torch in float64, a row after the other, and the same layers over the kernels."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import silu, softplus

from kernels.recurrent import ConvActivation, MatrixRecurrence, RecurrentKernels, SelectiveScan, ShortConv
from kernels.recurrent_rows import NO_PLACE, RecurrentRows

MAX_PENDING = 4
ROWS = 60
"""Rows of a sequence."""
FEW_ROWS = 11
"""The same in Triton's interpreter."""


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """The places of a layer."""

    states: tuple[torch.Tensor, ...]
    pending_SRW: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A layer whose input is a row of a convolution's channels and of what controls the recurrence."""

    width: int
    state_shapes: tuple[tuple[int, ...], ...]
    pending_width: int
    run: Callable[[torch.Tensor, RecurrentRows, Memory], torch.Tensor]
    """Returns the output of the rows [N, width] of a forward."""
    reference: Callable[[torch.Tensor], torch.Tensor]
    """Returns the output of the rows of one sequence, in float64."""

    def memory(self, places: int, max_pending: int) -> Memory:
        """Return places that hold anything but zeros."""
        return Memory(
            tuple(torch.full((places, *shape), 7.0) for shape in self.state_shapes),
            torch.full((places, max_pending, self.pending_width), 7.0),
        )


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def whole(layer: Layer, x_NW: torch.Tensor) -> torch.Tensor:
    """Return the output of a sequence in one forward, all rows of which are committed."""
    rows = RecurrentRows.rectangle(len(x_NW), ints(0), fresh_L=ints(1), redo_L=ints(0), commit_L=ints(len(x_NW)))
    return layer.run(x_NW, rows, layer.memory(1, MAX_PENDING))


class Sequence:
    """A sequence that is taken a few rows at a time; some of them are drafts, of which some are wrong."""

    def __init__(self, layer: Layer, place: int, seed: int, num_rows: int = ROWS) -> None:
        random_numbers = torch.Generator(torch.get_default_device()).manual_seed(seed)
        self.x_NW = torch.randn(num_rows, layer.width, generator=random_numbers)
        self.want = whole(layer, self.x_NW)
        self.place, self.done, self.redo = place, 0, 0
        self._random = random.Random(seed)

    def next(self) -> tuple[torch.Tensor, int, int]:
        """Return the next rows with padding after them, those to commit, and the drafts that are right."""
        left = len(self.x_NW) - self.done
        if self._random.random() < 0.4:
            commit, drafts = min(left, self._random.randint(1, 9)), 0
        else:
            commit, drafts = 1, self._random.randint(0, MAX_PENDING)
        right = min(self._random.randint(0, drafts), left - commit)
        rows = self.x_NW[self.done : self.done + commit + right]
        others = torch.full((drafts - right + self._random.randint(0, 3), rows.shape[1]), 100.0)
        return torch.cat([rows, others]), commit, right


def step(layer: Layer, memory: Memory, running: list[Sequence]) -> torch.Tensor:
    """Take the next rows of each sequence and compare their bits; return the output of the padding, which is a lane
    after the first sequence, and rows after the last one."""
    parts = [sequence.next() for sequence in running]
    counts, places, fresh, redo, commit = [], [], [], [], []
    for sequence, (rows, committed, _) in zip(running, parts, strict=True):
        counts += [len(rows), 2] if not counts else [len(rows)]
        lanes = 2 if len(counts) == 2 and not places else 1
        places += [sequence.place, NO_PLACE][:lanes]
        fresh += [int(sequence.done == 0), 0][:lanes]
        redo += [sequence.redo, 0][:lanes]
        commit += [committed, 0][:lanes]
    first = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    x_NW = torch.full((int(first[-1]) + 3, layer.width), float("nan"))
    real = [lane for lane, place in enumerate(places) if place != NO_PLACE]
    for lane, (rows, _, _) in zip(real, parts, strict=True):
        x_NW[first[lane] : first[lane + 1]] = rows
    out = layer.run(x_NW, RecurrentRows(first, ints(*places), ints(*fresh), ints(*redo), ints(*commit)), memory)
    for sequence, lane, (_, committed, right) in zip(running, real, parts, strict=True):
        count = committed + right
        got = out[first[lane] : first[lane] + count]
        assert torch.equal(got, sequence.want[sequence.done : sequence.done + count])
        # The next forward begins after the committed rows and the right drafts.
        sequence.done, sequence.redo = sequence.done + count, right
    return torch.cat([out[first[1] : first[2]], out[first[-1] :]])


def convolved(conv: ShortConv, x_NC: torch.Tensor) -> torch.Tensor:
    """Return the convolution of the rows of one sequence."""
    taps = len(conv.weight_TC)
    padded = torch.cat([torch.zeros(taps - 1, x_NC.shape[1], dtype=x_NC.dtype), x_NC])
    out = sum(padded[t : t + len(x_NC)] * conv.weight_TC[t].double() for t in range(taps))
    assert isinstance(out, torch.Tensor)
    if conv.bias_C is not None:
        out = out + conv.bias_C.double()
    return silu(out) if conv.act is ConvActivation.SILU else out


def conv_layer(kernels: RecurrentKernels, channels: int, taps: int, dtype: torch.dtype, *, biased: bool) -> Layer:
    """Return a convolution without more, over inputs in `dtype`."""
    bias = torch.randn(channels) if biased else None
    conv = ShortConv(torch.randn(taps, channels), bias, ConvActivation.SILU if biased else ConvActivation.NONE)

    def run(x_NW: torch.Tensor, rows: RecurrentRows, memory: Memory) -> torch.Tensor:
        x_NC = torch.cat([x_NW, x_NW], dim=1).to(dtype)[:, channels:]  # rows that are strided
        return kernels.short_conv(conv, x_NC, rows, memory.states[0], memory.pending_SRW, out_dtype=torch.float32)

    def reference(x_NW: torch.Tensor) -> torch.Tensor:
        return convolved(conv, x_NW.to(dtype).double())

    return Layer(channels, (conv.state_shape,), channels, run, reference)


def matrix_layer(
    kernels: RecurrentKernels, heads: int, key_heads: int, keys: int, values: int, *, delta: bool
) -> Layer:
    """Return a convolution and the recurrence over a matrix of each head."""
    of_keys, channels = key_heads * keys, 2 * key_heads * keys + heads * values
    conv = ShortConv(torch.randn(4, channels), torch.randn(channels), ConvActivation.SILU)
    low, high = (0.0, float("inf")) if delta else (0.3, 1.5)
    recurrence = MatrixRecurrence(
        a_H=-torch.rand(heads) - 0.1,
        bias_H=torch.randn(heads),
        keys=keys,
        values=values,
        key_heads=key_heads,
        q_at=0,
        k_at=of_keys,
        v_at=2 * of_keys,
        delta=delta,
        skip_H=None if delta else torch.randn(heads),
        dt_limits=(low, high),
    )

    def run(x_NW: torch.Tensor, rows: RecurrentRows, memory: Memory) -> torch.Tensor:
        tail, state = memory.states
        mixed = kernels.short_conv(
            conv, x_NW[:, :channels], rows, tail, memory.pending_SRW, out_dtype=torch.float32, emits_redo=True
        )
        control = x_NW[:, channels:].contiguous()
        return kernels.matrix_recurrence(recurrence, mixed, control, rows, state, memory.pending_SRW, saved_at=channels)

    def reference(x_NW: torch.Tensor) -> torch.Tensor:
        x = x_NW.double()
        mixed, control = convolved(conv, x[:, :channels]), x[:, channels:]
        state, outs = torch.zeros(heads, keys, values, dtype=torch.float64), []
        for row, of_row in zip(mixed, control, strict=True):
            q, k = (
                row[at : at + of_keys].view(key_heads, keys).repeat_interleave(heads // key_heads, dim=0)
                for at in (0, of_keys)
            )
            v = row[2 * of_keys :].view(heads, values)
            dt = softplus(of_row[:heads] + recurrence.bias_H.double()).clamp(low, high)
            state = state * torch.exp(dt * recurrence.a_H.double())[:, None, None]
            if delta:
                q, k = (part * torch.rsqrt((part * part).sum(-1, keepdim=True) + 1e-6) for part in (q, k))
                q = q * keys**-0.5
                d = torch.sigmoid(of_row[heads:])[:, None] * (v - (k[:, None] @ state)[:, 0])
            else:
                d = dt[:, None] * v
            state = state + k[:, :, None] * d[:, None]
            y = (q[:, None] @ state)[:, 0]
            if recurrence.skip_H is not None:
                y = y + recurrence.skip_H.double()[:, None] * v
            outs.append(y.reshape(-1))
        return torch.stack(outs)

    width = channels + recurrence.control_width
    return Layer(width, (conv.state_shape, recurrence.state_shape), width, run, reference)


def scan_layer(kernels: RecurrentKernels, channels: int, states: int) -> Layer:
    """Return a convolution and the selective scan."""
    conv = ShortConv(torch.randn(4, channels), None, ConvActivation.SILU)
    scan = SelectiveScan(-torch.rand(states, channels) - 0.1, torch.randn(channels))

    def run(x_NW: torch.Tensor, rows: RecurrentRows, memory: Memory) -> torch.Tensor:
        tail, state = memory.states
        x_MI = kernels.short_conv(
            conv, x_NW[:, :channels], rows, tail, memory.pending_SRW, out_dtype=torch.float32, emits_redo=True
        )
        control = x_NW[:, channels:].contiguous()
        return kernels.selective_scan(scan, x_MI, control, rows, state, memory.pending_SRW, saved_at=channels)

    def reference(x_NW: torch.Tensor) -> torch.Tensor:
        x = x_NW.double()
        mixed, control = convolved(conv, x[:, :channels]), x[:, channels:]
        state, outs = torch.zeros(states, channels, dtype=torch.float64), []
        for row, of_row in zip(mixed, control, strict=True):
            dt, b, c = softplus(of_row[:channels]), of_row[channels : channels + states], of_row[channels + states :]
            state = state * torch.exp(dt * scan.a_EI.double()) + b[:, None] * (dt * row)
            outs.append(c @ state + scan.skip_I.double() * row)
        return torch.stack(outs)

    return Layer(
        channels + scan.control_width,
        (conv.state_shape, scan.state_shape),
        channels + scan.pending_width,
        run,
        reference,
    )


LAYERS: dict[str, Callable[[RecurrentKernels], Layer]] = {
    "convolution": lambda kernels: conv_layer(kernels, 70, 3, torch.float32, biased=False),
    "convolution in bfloat16": lambda kernels: conv_layer(kernels, 96, 4, torch.bfloat16, biased=True),
    "delta rule": lambda kernels: matrix_layer(kernels, 4, 2, 18, 40, delta=True),
    "matrix": lambda kernels: matrix_layer(kernels, 4, 2, 16, 24, delta=False),
    "scan": lambda kernels: scan_layer(kernels, 72, 5),
}
"""Sizes that are no multiples of a vector."""
