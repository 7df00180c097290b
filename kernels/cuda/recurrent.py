"""Layers with a state on a GPU: a short convolution, a matrix of each head, and a scan over channels.

As `kernels.recurrent`, for the same lanes (kernels/recurrent_rows.py). The number of rows that are taken again is read
on the device, so a captured step has the same launches whatever was accepted. Invariant: one loop takes every row of a
lane, whether it is taken again, committed or pending, and the blocks follow from the layer's sizes, so a row has the
same bits in every call. A prompt's rows are taken one after the other, not in parallel chunks. Not responsible for:
products, places of sequences (see gpu_engine/model/recurrent/).

Shapes: as in kernels/recurrent.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.recurrent import (
    ConvActivation,
    Gate,
    MatrixRecurrence,
    SelectiveScan,
    ShortConv,
    check_conv,
    check_gated_norm,
    check_matrix,
    check_scan,
)
from kernels.recurrent_rows import RecurrentRows

GATE_ONLY = tl.constexpr(Gate.ONLY.value)
BEFORE_NORM = tl.constexpr(Gate.BEFORE_NORM.value)
_CONV_ROWS, _CONV_BLOCK = 16, 128
_MATRIX_BLOCK, _SCAN_BLOCK, _KEEP_BLOCK = 32, 64, 1024
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def lane_of(
    first: tl.tensor, places: tl.tensor, redos: tl.tensor, commits: tl.tensor, R: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """Return a lane's first row, place, rows to take again, and the ends of the committed rows and of all, both counted
    from the first one that is taken again. Rows after the pending ones are padding, and left out."""
    lane = tl.program_id(0)
    begin = tl.load(first + lane)
    count = tl.load(first + lane + 1) - begin
    redo = tl.load(redos + lane)
    commit = tl.load(commits + lane)
    return begin, tl.load(places + lane).to(tl.int64), redo, redo + commit, redo + tl.minimum(count, commit + R)


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    """Return ln(1 + exp(x))."""
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    # Makes up for what u has lost of e.
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def conv_input(
    x: tl.tensor,
    tail: tl.tensor,
    pending: tl.tensor,
    at: tl.tensor,
    c: tl.tensor,
    begin: tl.tensor,
    redo: tl.tensor,
    end: tl.tensor,
    oldest: tl.tensor,
    x_stride: tl.tensor,
    C: tl.constexpr,
    W: tl.constexpr,
    T: tl.constexpr,
) -> tl.tensor:
    """Return the inputs [rows, BLOCK] of a lane's rows `at`, float32: negative ones are in the tail, and
    zeros before row `oldest`."""
    row, column = at[:, None], c[None, :]
    inside = (column < C) & (row < end)
    own = (begin + row - redo).to(tl.int64)
    new = tl.load(x + own * x_stride + column, mask=inside & (row >= redo), other=0.0).to(tl.float32)
    again = tl.load(pending + row * W + column, mask=inside & (row >= 0) & (row < redo), other=0.0)
    old = tl.load(tail + (T - 1 + row) * C + column, mask=inside & (row < 0) & (row >= oldest), other=0.0)
    return tl.where(row >= redo, new, tl.where(row >= 0, again, old))


@triton.jit
def conv_kernel(
    first: tl.tensor,
    places: tl.tensor,
    freshes: tl.tensor,
    redos: tl.tensor,
    commits: tl.tensor,
    x: tl.tensor,
    tail: tl.tensor,
    pending: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    C: tl.constexpr,
    W: tl.constexpr,
    T: tl.constexpr,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    EMITS_REDO: tl.constexpr,
) -> None:
    """Grid (lanes, blocks of C): the rows of a lane, its tail and its pending inputs."""
    begin, place, redo, written, end = lane_of(first, places, redos, commits, R)
    if place < 0:
        return
    oldest = (tl.load(freshes + tl.program_id(0)) - 1) * T  # 0: the tail is not read
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tail += place * ((T - 1) * C)
    pending += place * (R * W)
    redone = tl.program_id(0) * R
    own = begin - redo
    if EMITS_REDO:
        own += tl.num_programs(0) * R
    for start in range(0, end, ROWS):
        row = start + tl.arange(0, ROWS)
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        if BIAS:
            total += tl.load(bias + c, mask=c < C, other=0.0)[None, :]
        for t in tl.static_range(T):
            v = conv_input(x, tail, pending, row + (t - (T - 1)), c, begin, redo, end, oldest, x_stride, C, W, T)
            total += tl.load(weight + t * C + c, mask=c < C, other=0.0)[None, :] * v
        if SILU:
            total = total * tl.sigmoid(total)
        stored = row < end
        if not EMITS_REDO:
            stored = stored & (row >= redo)
        to = (row + tl.where(row < redo, redone, own)).to(tl.int64)
        cells = stored[:, None] & (c < C)[None, :]
        tl.store(out + to[:, None] * C + c[None, :], total.to(out.dtype.element_ty), mask=cells)
    j = tl.arange(0, TAPS)
    last = conv_input(x, tail, pending, written - (T - 1) + j, c, begin, redo, end, oldest, x_stride, C, W, T)
    # All threads have read the old inputs before one writes.
    tl.debug_barrier()
    tl.store(tail + j[:, None] * C + c[None, :], last, mask=(j < T - 1)[:, None] & (c < C)[None, :])
    for start in range(written, end, ROWS):
        row = start + tl.arange(0, ROWS)
        v = conv_input(x, tail, pending, row, c, begin, redo, end, oldest, x_stride, C, W, T)
        cells = (row < end)[:, None] & (c < C)[None, :]
        tl.store(pending + (row - written)[:, None] * W + c[None, :], v, mask=cells)


@triton.jit
def matrix_kernel(
    first: tl.tensor,
    places: tl.tensor,
    freshes: tl.tensor,
    redos: tl.tensor,
    commits: tl.tensor,
    mixed: tl.tensor,
    control: tl.tensor,
    state: tl.tensor,
    pending: tl.tensor,
    a: tl.tensor,
    bias: tl.tensor,
    skip: tl.tensor,
    out: tl.tensor,
    dt_min: tl.tensor,
    dt_max: tl.tensor,
    q_scale: tl.tensor,
    eps: tl.tensor,
    C: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    Q_AT: tl.constexpr,
    K_AT: tl.constexpr,
    V_AT: tl.constexpr,
    SAVED_AT: tl.constexpr,
    H: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    DELTA: tl.constexpr,
    SKIP: tl.constexpr,
) -> None:
    """Grid (lanes, heads, blocks of V): some columns of a head's matrix, row after row."""
    begin, place, redo, written, end = lane_of(first, places, redos, commits, R)
    if place < 0:
        return
    lane = tl.program_id(0)
    head = tl.program_id(1)
    J: tl.constexpr = 2 * H if DELTA else H
    k_in = tl.arange(0, KEYS)
    v_in = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    real = v_in < V
    of_keys = head // (H // KEY_HEADS) * D + k_in
    cells = (k_in < D)[:, None] & real[None, :]
    state_at = state + (place * H + head) * (D * V) + k_in[:, None] * V + v_in[None, :]
    known = tl.where(tl.load(freshes + lane) == 0, D, 0)
    s = tl.load(state_at, mask=(k_in < known)[:, None] & real[None, :], other=0.0)
    # All threads have read the state before one writes.
    tl.debug_barrier()
    if written == 0:
        tl.store(state_at, s, mask=cells)
    a_h = tl.load(a + head)
    bias_h = tl.load(bias + head)
    pending += place * (R * W) + SAVED_AT + head
    for row in range(0, end):
        again = row < redo
        own = (begin + row - redo).to(tl.int64)
        at = mixed + tl.where(again, lane * R + row, tl.num_programs(0) * R + own) * C
        q = tl.load(at + Q_AT + of_keys, mask=k_in < D, other=0.0)
        k = tl.load(at + K_AT + of_keys, mask=k_in < D, other=0.0)
        v = tl.load(at + V_AT + head * V + v_in, mask=real, other=0.0)
        saved = tl.load(pending + row * W, mask=again, other=0.0)
        raw = tl.where(again, saved, tl.load(control + own * J + head, mask=row >= redo, other=0.0))
        dt = tl.minimum(tl.maximum(softplus(raw + bias_h), dt_min), dt_max)
        decay = tl.exp(dt * a_h)
        d = v * dt
        if DELTA:
            q *= q_scale / tl.sqrt(tl.sum(q * q, axis=0) + eps)
            k *= 1.0 / tl.sqrt(tl.sum(k * k, axis=0) + eps)
            saved_b = tl.load(pending + row * W + H, mask=again, other=0.0)
            b = tl.where(again, saved_b, tl.load(control + own * J + H + head, mask=row >= redo, other=0.0))
            d = (v - decay * tl.sum(k[:, None] * s, axis=0)) * tl.sigmoid(b)
        s = s * decay + k[:, None] * d[None, :]
        y = tl.sum(q[:, None] * s, axis=0)
        if SKIP:
            y += tl.load(skip + head) * v
        tl.store(out + (own * H + head) * V + v_in, y, mask=v_in < tl.where(again, 0, V))
        if row + 1 == written:
            tl.store(state_at, s, mask=cells)


@triton.jit
def scan_kernel(
    first: tl.tensor,
    places: tl.tensor,
    freshes: tl.tensor,
    redos: tl.tensor,
    commits: tl.tensor,
    x: tl.tensor,
    control: tl.tensor,
    state: tl.tensor,
    pending: tl.tensor,
    a: tl.tensor,
    skip: tl.tensor,
    out: tl.tensor,
    C: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    SAVED_AT: tl.constexpr,
    E: tl.constexpr,
    STATES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (lanes, blocks of C): the states of some channels, row after row."""
    begin, place, redo, written, end = lane_of(first, places, redos, commits, R)
    if place < 0:
        return
    lane = tl.program_id(0)
    e = tl.arange(0, STATES)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = c < C
    cells = (e < E)[:, None] & real[None, :]
    part = e[:, None] * C + c[None, :]
    state_at = state + place * (E * C) + part
    known = tl.where(tl.load(freshes + lane) == 0, E, 0)
    s = tl.load(state_at, mask=(e < known)[:, None] & real[None, :], other=0.0)
    # All threads have read the state before one writes.
    tl.debug_barrier()
    if written == 0:
        tl.store(state_at, s, mask=cells)
    a_EI = tl.load(a + part, mask=cells, other=0.0)
    skip_I = tl.load(skip + c, mask=real, other=0.0)
    pending += place * (R * W) + SAVED_AT
    for row in range(0, end):
        again = row < redo
        own = (begin + row - redo).to(tl.int64)
        m = tl.where(again, lane * R + row, tl.num_programs(0) * R + own)
        v = tl.load(x + m * C + c, mask=real, other=0.0)
        new = control + own * (C + 2 * E)
        old = pending + row * W
        # One of both is loaded.
        old_C = tl.where(again, C, 0)
        old_E = tl.where(again, E, 0)
        new_E = tl.where(again, 0, E)
        raw = tl.load(old + c, mask=c < old_C, other=0.0) + tl.load(new + c, mask=c < C - old_C, other=0.0)
        b = tl.load(old + C + e, mask=e < old_E, other=0.0) + tl.load(new + C + e, mask=e < new_E, other=0.0)
        out_E = tl.load(new + C + E + e, mask=e < new_E, other=0.0)
        dt = softplus(raw)
        s = s * tl.exp(dt[None, :] * a_EI) + b[:, None] * (dt * v)[None, :]
        y = tl.sum(out_E[:, None] * s, axis=0) + skip_I * v
        tl.store(out + own * C + c, y, mask=c < C - old_C)
        if row + 1 == written:
            tl.store(state_at, s, mask=cells)


@triton.jit
def keep_kernel(
    first: tl.tensor,
    places: tl.tensor,
    redos: tl.tensor,
    commits: tl.tensor,
    control: tl.tensor,
    pending: tl.tensor,
    J: tl.constexpr,
    SAVED: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    SAVED_AT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (lanes, R): save what controls a pending row, after the programs that read the saved rows before."""
    begin, place, redo, written, end = lane_of(first, places, redos, commits, R)
    j = tl.program_id(1)
    if (place < 0) | (written + j >= end):
        return
    new = control + (begin + written - redo + j).to(tl.int64) * J
    old = pending + (place * R + j) * W + SAVED_AT
    for start in range(0, SAVED, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(old + at, tl.load(new + at, mask=at < SAVED), mask=at < SAVED)


@triton.jit
def gated_norm_kernel(
    x: tl.tensor,
    gate: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    gate_stride: tl.tensor,
    eps: tl.tensor,
    V: tl.constexpr,
    EACH: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
) -> None:
    """Grid (N, groups): a group of a row. EACH rows share a row of the gate."""
    row = tl.program_id(0).to(tl.int64)
    width: tl.constexpr = V // GROUPS
    i = tl.arange(0, BLOCK)
    inside = i < width
    at = tl.program_id(1) * width + i
    v = tl.load(x + row * V + at, mask=inside, other=0.0)
    g = tl.load(gate + row // EACH * gate_stride + row % EACH * V + at, mask=inside, other=0.0)
    gated = v * (g.to(tl.float32) * tl.sigmoid(g.to(tl.float32)))
    if KIND != GATE_ONLY:
        normed = v
        if KIND == BEFORE_NORM:
            normed = gated
        inverse = 1.0 / tl.sqrt(tl.sum(normed * normed, axis=0) / width + eps)
        gated = gated * inverse * tl.load(weight + at, mask=inside, other=0.0)
    tl.store(out + row * V + at, gated.to(out.dtype.element_ty), mask=inside)


def short_conv(
    conv: ShortConv,
    x_NC: torch.Tensor,
    rows: RecurrentRows,
    tail_STC: torch.Tensor,
    pending_SRW: torch.Tensor,
    *,
    out_dtype: torch.dtype,
    emits_redo: bool = False,
) -> torch.Tensor:
    """As `kernels.recurrent.short_conv`; fp16 is taken too."""
    check_conv(conv, x_NC, tail_STC, pending_SRW)
    assert {x_NC.dtype, out_dtype} <= {*_DTYPES}, (x_NC.dtype, out_dtype)
    (T, C), lanes = conv.weight_TC.shape, len(rows.state_L)
    _, R, W = pending_SRW.shape
    out = torch.zeros(len(x_NC) + (lanes * R if emits_redo else 0), C, dtype=out_dtype, device=x_NC.device)
    conv_kernel[(lanes, triton.cdiv(C, _CONV_BLOCK))](
        *_of_lanes(rows),
        x_NC,
        tail_STC,
        pending_SRW,
        conv.weight_TC,
        conv.weight_TC if conv.bias_C is None else conv.bias_C,
        out,
        x_NC.stride(0),
        C=C,
        W=W,
        T=T,
        R=R,
        ROWS=_CONV_ROWS,
        BLOCK=_CONV_BLOCK,
        TAPS=triton.next_power_of_2(T - 1),
        BIAS=conv.bias_C is not None,
        SILU=conv.act is ConvActivation.SILU,
        EMITS_REDO=emits_redo,
        num_warps=4,
    )
    return out


def matrix_recurrence(
    heads: MatrixRecurrence,
    mixed_MC: torch.Tensor,
    control_NJ: torch.Tensor,
    rows: RecurrentRows,
    state_SHDV: torch.Tensor,
    pending_SRW: torch.Tensor,
    *,
    saved_at: int,
) -> torch.Tensor:
    """As `kernels.recurrent.matrix_recurrence`."""
    check_matrix(heads, mixed_MC, control_NJ, rows, state_SHDV, pending_SRW, saved_at)
    (H, D, V), lanes = heads.state_shape, len(rows.state_L)
    _, R, W = pending_SRW.shape
    out = torch.zeros(len(control_NJ), H * V, device=control_NJ.device)
    low, high = heads.dt_limits
    matrix_kernel[(lanes, H, triton.cdiv(V, _MATRIX_BLOCK))](
        *_of_lanes(rows),
        mixed_MC,
        control_NJ,
        state_SHDV,
        pending_SRW,
        heads.a_H,
        heads.bias_H,
        heads.a_H if heads.skip_H is None else heads.skip_H,
        out,
        *(low, high, D**-0.5, heads.eps),
        C=mixed_MC.shape[1],
        W=W,
        R=R,
        Q_AT=heads.q_at,
        K_AT=heads.k_at,
        V_AT=heads.v_at,
        SAVED_AT=saved_at,
        H=H,
        KEY_HEADS=heads.key_heads,
        D=D,
        V=V,
        KEYS=triton.next_power_of_2(D),
        BLOCK=_MATRIX_BLOCK,
        DELTA=heads.delta,
        SKIP=heads.skip_H is not None,
        num_warps=4,
    )
    _keep(rows, control_NJ, pending_SRW, saved_at, heads.control_width)
    return out


def selective_scan(
    scan: SelectiveScan,
    x_MI: torch.Tensor,
    control_NJ: torch.Tensor,
    rows: RecurrentRows,
    state_SEI: torch.Tensor,
    pending_SRW: torch.Tensor,
    *,
    saved_at: int,
) -> torch.Tensor:
    """As `kernels.recurrent.selective_scan`."""
    check_scan(scan, x_MI, control_NJ, rows, state_SEI, pending_SRW, saved_at)
    (E, C), lanes = scan.state_shape, len(rows.state_L)
    _, R, W = pending_SRW.shape
    out = torch.zeros(len(control_NJ), C, device=control_NJ.device)
    scan_kernel[(lanes, triton.cdiv(C, _SCAN_BLOCK))](
        *_of_lanes(rows),
        x_MI,
        control_NJ,
        state_SEI,
        pending_SRW,
        scan.a_EI,
        scan.skip_I,
        out,
        C=C,
        W=W,
        R=R,
        SAVED_AT=saved_at,
        E=E,
        STATES=triton.next_power_of_2(E),
        BLOCK=_SCAN_BLOCK,
        num_warps=4,
    )
    _keep(rows, control_NJ, pending_SRW, saved_at, scan.pending_width)
    return out


def gated_norm(
    x_NV: torch.Tensor,
    gate_PG: torch.Tensor,
    weight_V: torch.Tensor | None,
    kind: Gate,
    *,
    eps: float = 0.0,
    groups: int = 1,
) -> torch.Tensor:
    """As `kernels.recurrent.gated_norm`; fp16 is taken too."""
    check_gated_norm(x_NV, gate_PG, weight_V, kind, groups)
    assert gate_PG.dtype in _DTYPES, gate_PG.dtype
    N, V = x_NV.shape
    out_NV = torch.empty(N, V, dtype=gate_PG.dtype, device=x_NV.device)
    block = triton.next_power_of_2(V // groups)
    gated_norm_kernel[(N, groups)](
        x_NV,
        gate_PG,
        x_NV if weight_V is None else weight_V,
        out_NV,
        gate_PG.stride(0),
        eps,
        V=V,
        EACH=N // len(gate_PG),
        GROUPS=groups,
        BLOCK=block,
        KIND=int(kind),
        num_warps=min(16, max(1, block // 512)),
    )
    return out_NV


def _of_lanes(rows: RecurrentRows) -> tuple[torch.Tensor, ...]:
    return rows.first_L1, rows.state_L, rows.fresh_L, rows.redo_L, rows.commit_L


def _keep(rows: RecurrentRows, control_NJ: torch.Tensor, pending_SRW: torch.Tensor, saved_at: int, saved: int) -> None:
    """Save the first `saved` floats that control each pending row."""
    _, R, W = pending_SRW.shape
    if not R:
        return
    first, places, _, redos, commits = _of_lanes(rows)
    keep_kernel[(len(rows.state_L), R)](
        first,
        places,
        redos,
        commits,
        control_NJ,
        pending_SRW,
        J=control_NJ.shape[1],
        SAVED=saved,
        W=W,
        R=R,
        SAVED_AT=saved_at,
        BLOCK=min(_KEEP_BLOCK, triton.next_power_of_2(saved)),
        num_warps=4,
    )
