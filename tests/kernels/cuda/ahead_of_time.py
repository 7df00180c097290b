"""Compiles the kernels for a GPU that the machine lacks, with a Triton driver that loads and launches nothing.

The wrappers run unchanged on CPU tensors, so each kernel is compiled with the types, strides and constants that it has
on a device. Run it in a separate process: TRITON_INTERPRET must not be set before Triton is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

from kernels.accept import AcceptResult, SlotParams, StepTensors
from kernels.cuda import (
    accept,
    advance,
    branch,
    draft_tree,
    fused,
    low_rank,
    ngram,
    noise,
    posting,
    products,
    recurrent,
    scaled,
    step_inputs,
)
from kernels.cuda.attention import paged
from kernels.cuda.jump_forward import take_jump_forward
from kernels.cuda.row_state import DeviceRows, RowScratch, SlotRows
from kernels.cuda.tree_acceptance import PathCompaction
from kernels.fused import NormKind, RMSNorm
from kernels.fused_arguments import EVERYWHERE
from kernels.low_rank_stacks import LowRankStacks, ProductShape
from kernels.paged_attention import KVPages
from kernels.recurrent import ConvActivation, Gate, MatrixRecurrence, SelectiveScan, ShortConv
from kernels.recurrent_rows import RecurrentRows
from kernels.step_tensors import DraftTree, TreeRows, tree_shape

NAMES = {
    *("row_kernel", "filter_kernel", "acceptance_kernel", "logprobs_kernel", "draft_kernel", "noise_kernel"),
    *("norm_kernel", "rotary_kernel", "angles_kernel", "gated_kernel"),
    *("decode_kernel", "combine_kernel", "store_kernel", "prefill_kernel"),
    *("load_kernel", "post_kernel", "cache_kernel", "advance_kernel", "ngram_kernel", "take_jump_forward_kernel"),
    *("product_kernel", "gated_product_kernel", "quantise_kernel", "rescale_kernel"),
    *("shrink_kernel", "expand_kernel"),
    *("tree_decode_kernel", "tree_acceptance_kernel", "compact_kernel", "branch_kernel"),
    *("grow_kernel", "take_kernel"),
    *("conv_kernel", "matrix_kernel", "scan_kernel", "keep_kernel", "gated_norm_kernel"),
}
"""The kernels of kernels/cuda."""
MAX_SHARED = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes of shared memory that a program may have, by compute capability times 10."""


class Binary(NamedTuple):
    """A kernel's machine code."""

    name: str
    code: bytes
    shared: int
    """Bytes of shared memory that a launch asks for."""


class _Utils:
    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.binaries: list[Binary] = []

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": MAX_SHARED[self.capability], "multiprocessor_count": 132}

    def load_binary(self, name: str, binary: bytes, shared: int, *_: object) -> tuple[int, int, int, int, int]:
        self.binaries.append(Binary(name, binary, shared))
        return 0, 0, 0, 0, 1024

    def unload_module(self, *_: object) -> None: ...


class NoDevice:
    """Triton's driver protocol for one compute capability."""

    def __init__(self, capability: int = 90) -> None:
        self.utils = _Utils(capability)

    @property
    def binaries(self) -> list[Binary]:
        """Each kernel, in order of first use."""
        return self.utils.binaries

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        return lambda *_, **__: None

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.utils.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def install(capability: int = 90) -> NoDevice:
    """Make Triton use the driver without a device, and return it. Once a process: Triton keeps what it compiled."""
    driver = NoDevice(capability)
    triton.runtime.driver.set_active(driver)
    return driver


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def flags(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def compile_step(S: int, B: int, R: int, N: int) -> None:
    """Launch all kernels of a step but attention: S slots, B lanes, R rows, N pages, a large vocabulary."""
    V, W, L = 128_256, 4008, 2052
    rows, scratch = SlotRows.allocate(S, V, ints(S, R, W), flags(S).bool()), RowScratch.allocate(B * R, V, "cpu")
    result, params = AcceptResult.allocate(B, R, V), SlotParams.allocate(S)
    slots, drafts, num_drafts, kinds, forced = ints(B), ints(B, R), ints(B), flags(B, R), ints(B, R)
    history, length, logits = ints(S, L), ints(S), torch.zeros(B * R, V, dtype=torch.bfloat16)
    lanes = (slots, drafts, num_drafts, kinds, forced)
    d2t, small = ints(32_000), torch.zeros(B * R, 32_000)
    tree = TreeRows.allocate(B, R)
    for filters in (True, False):
        device = DeviceRows(rows, scratch, filters=filters)
        step = StepTensors(*lanes, 0, (0, 0), history, length, params, result, device)
        accept.accept(logits, step, num_rows=R)
        accept.accept(logits, replace(step, tree=tree), num_rows=R)
        accept.draw_drafts(logits, step, 0)
        accept.draw_drafts(small, step, R - 1, d2t_V=d2t)

    for dtype in (torch.int32, torch.int64):
        inputs = (slots, history, length, ints(S, R), ints(S), rows.done_S, ints(S, N))
        outs = (torch.zeros(B, R, dtype=dtype), ints(B, R), drafts, num_drafts, ints(B, N))
        step_inputs.load_step(*inputs, *outs, ints(B) + R)
        step_inputs.load_step(*inputs, *outs, ints(B) + R, ints(S, R), tree)
    counter = torch.zeros(1, dtype=torch.int64)
    results = (result.num_emitted_B, result.num_accepted_B, result.finish_B, result.blocked_B, result.emitted_BR)
    limits = (ints(S), params.max_length_S)
    for ahead in (None, ints(B)):
        proposed = (ints(S, R), ints(S))
        ngram.propose_ngram(
            slots,
            history,
            length,
            params.prompt_length_S,
            *limits,
            *proposed,
            ngram_max=4,
            num_jump_forward_B=ahead,
        )
        of_slots = (history, length, params.prompt_length_S, *limits, *proposed, ints(S, R))
        sizes = {"ngram_max": 4}
        branch.add_branch(slots, flags(B).bool(), *of_slots, num_jump_forward_B=ahead, **sizes)
    for dtype in (torch.bfloat16, torch.float32):
        pages = [KVPages(*(torch.zeros(4, 2, 16, 64, dtype=dtype) for _ in range(2)), token_major=True)]
        PathCompaction(pages)(slots, length, result.num_emitted_B, tree, ints(B, N))

    cached = posting.CachedRows(rows.masks_SRW, flags(S, R), ints(S, R), flags(S, R).bool())
    out = posting.PostTensors(*(ints(B) for _ in range(6)), ints(B, 2 * R), flags(B, R), ints(B, R))
    guided, lengths = flags(B).bool(), (history, length, params.prompt_length_S, ints(S))
    post = (slots, guided, guided, ints(B), drafts, num_drafts, *lengths, cached, out)
    for k in (posting.VERIFY, 0, R - 1):
        verifies = k == posting.VERIFY
        posting.pack_post(*post, k=k, done_S=rows.done_S if verifies else None)
        reported_seq = counter.clone() if k == posting.VERIFY else None
        posting.cache_rows(
            slots, guided, guided, out, counter, ints(2, S, R, W), cached, kinds, forced, k=k, reported_seq=reported_seq
        )
    posting.pack_post(*post, k=posting.PROPOSE, limits=limits)
    taken = (out.slots_B, out.need_rows_B, out.kinds_BR, out.forced_BR, length, history, ints(S, R), ints(S), ints(B))
    take_jump_forward(slots, result.num_emitted_B, *taken, vocab_size=V)
    advance.advance(slots, *results[:1], *results[2:4], guided, cached.cached_SR)


def compile_draft_tree(S: int, B: int, R: int, num_drafts: int) -> None:
    """Launch the kernels of a head's tree: S slots, B lanes, R rows."""
    V, (width, levels) = 128_256, tree_shape(num_drafts)
    rows = SlotRows.allocate(S, V, ints(S, R, 4008), flags(S).bool())
    device = DeviceRows(rows, RowScratch.allocate(B * width, V, "cpu"))
    lanes = (ints(B), ints(B, R), ints(B), flags(B, R), ints(B, R))
    outer = (SlotParams.allocate(S), AcceptResult.allocate(B, R, V), device)
    step, tree = StepTensors(*lanes, 0, (0, 0), ints(S, 2052), ints(S), *outer), DraftTree.allocate(B)
    going, drafts, shape = flags(B).bool(), ints(S, R), {"width": width, "levels": levels}
    for d2t, ahead in ((None, None), (ints(32_000), ints(B))):
        columns, forced = V if d2t is None else len(d2t), {"num_jump_forward_B": ahead}
        for k in range(min(levels, 2)):
            logits = torch.zeros(B * (width if k else 1), columns, dtype=torch.bfloat16)
            draft_tree.grow_tree(logits, step, tree, k, going, drafts, d2t_V=d2t, **shape, **forced)
        of_slots = (ints(S), drafts, ints(S), ints(S, R))
        draft_tree.take_tree(step, tree, going, *of_slots, max_drafts=num_drafts, **shape, **forced)


def compile_attention(B: int, P: int, Hq: int, Hkv: int, D: int, T: int, dtype: torch.dtype) -> None:
    """Launch attention once: B sequences, P queries."""
    q, k = torch.zeros(B, P, Hq, D, dtype=dtype), torch.zeros(B, P, Hkv, D, dtype=dtype)
    pages = KVPages(*(torch.zeros(4, Hkv, T, D, dtype=dtype) for _ in range(2)), token_major=True)
    softcap = 30.0 if D == 80 else 0.0
    for sinks_H in (None, torch.zeros(Hq)):
        paged.paged_attention(
            *(q, k, k, pages, ints(B, 2048 // T), ints(B, P)), scale=0.1, softcap=softcap, chunk=64, sinks_H=sinks_H
        )
    if 1 < P <= paged.MAX_DECODE_QUERIES:
        tree = {"tree_rows_BRR": ints(B, 16, 16)}
        paged.paged_attention(q, k, k, pages, ints(B, 2048 // T), ints(B, P), scale=0.1, softcap=softcap, **tree)


def compile_fused(rows: int, H: int, inner: int, heads: tuple[int, int], D: int, dtype: torch.dtype) -> None:
    """Launch a layer's small operators once, with every kind of norm and activation."""
    x, qkv = torch.zeros(rows, H, dtype=dtype), torch.zeros(rows, (heads[0] + 2 * heads[1]) * D, dtype=dtype)
    angles = torch.zeros(rows, D, dtype=dtype)
    for kind in NormKind:
        norm, head = (RMSNorm(torch.ones(width, dtype=dtype), 1e-6, kind) for width in (H, D))
        fused.rms_norm(x, norm)
        fused.add_rms_norm(x, x, norm)
        if kind is NormKind.CENTRED:
            continue  # No norm of a head takes the mean off.
        fused.rotate(qkv, angles, angles, heads=heads, head_dim=D, q_norm=head, k_norm=head)
    fused.rotate(qkv, angles, angles, heads=heads, head_dim=D)
    fused.angles_at(ints(rows, 1), angles, angles)
    for act in EVERYWHERE:
        fused.gated(torch.zeros(rows, 2 * inner, dtype=dtype), act)


def compile_products(M: int, N: int, K: int) -> None:
    """Launch a product, with and without a bias."""
    x, weight, bias = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((M, K), (N, K), (N,)))
    products.product(x, weight)
    products.product(x, weight, bias)
    for act in EVERYWHERE:
        products.gated_product(x, weight, act)
        products.gated_product(x, weight, act, bias)


def compile_scaled(M: int, N: int, K: int, dtype: torch.dtype) -> None:
    """Launch the kernels before and after a scaled product, with and without a bias."""
    for kind in scaled.MOST:
        scales = scaled.quantise_rows(torch.zeros(M, K, dtype=dtype), kind, 32)[1]
    for bias in (None, torch.zeros(N, dtype=dtype)):
        scaled.rescale(ints(32, N), scales, torch.zeros(N), bias, M, dtype)


def compile_low_rank(B: int, each: int, shape: ProductShape, rank: int, dtype: torch.dtype) -> None:
    """Launch the low-rank products of B sequences once."""
    stack = LowRankStacks([shape], 2, rank, dtype, torch.device("cpu")).products[0]
    x, y = (torch.zeros(B * each, width, dtype=dtype) for width in (shape.inputs, shape.outputs))
    low_rank.add_low_rank(x, y, stack, ints(B), each)


def compile_conv(B: int, P: int, C: int, T: int, R: int, *, width: int = 0) -> tuple[RecurrentRows, torch.Tensor]:
    """Launch a convolution of bfloat16 inputs, with `width` further floats of a pending row; return the rows and what
    is pending. Without them it is a layer of its own, else the one before a recurrence."""
    rows = RecurrentRows.rectangle(P, ints(B), fresh_L=ints(B), redo_L=ints(B), commit_L=ints(B))
    conv = ShortConv(torch.zeros(T, C), torch.zeros(C) if width else None, ConvActivation(int(width > 0)))
    pending, x = torch.zeros(B, R, C + width), torch.zeros(B * P, C, dtype=torch.bfloat16)
    out_dtype = torch.float32 if width else torch.bfloat16
    tail = torch.zeros(B, T - 1, C)
    recurrent.short_conv(conv, x, rows, tail, pending, out_dtype=out_dtype, emits_redo=width > 0)
    return rows, pending


def compile_matrix(B: int, P: int, R: int, shape: tuple[int, int, int], key_heads: int, *, delta: bool) -> None:
    """Launch a layer with a matrix of each head, of (heads, keys, values)."""
    (H, D, V), N = shape, B * P
    of_keys = key_heads * D
    C, skip = 2 * of_keys + H * V, None if delta else torch.zeros(H)
    places = {"q_at": 0, "k_at": of_keys, "v_at": 2 * of_keys}
    heads = MatrixRecurrence(torch.zeros(H), torch.zeros(H), D, V, key_heads, **places, delta=delta, skip_H=skip)
    control = torch.zeros(N, heads.control_width)
    rows, pending = compile_conv(B, P, C, 4, R, width=heads.control_width)
    mixed, state = torch.zeros(B * R + N, C), torch.zeros(B, *shape)
    read = recurrent.matrix_recurrence(heads, mixed, control, rows, state, pending, saved_at=C)
    gate = torch.zeros(N, H * V, dtype=torch.bfloat16)
    if delta:
        recurrent.gated_norm(read.view(-1, V), gate, torch.zeros(V), Gate.AFTER_NORM, eps=1e-6)
    else:
        recurrent.gated_norm(read, gate, torch.zeros(H * V), Gate.BEFORE_NORM, eps=1e-6)


def compile_scan(B: int, P: int, R: int, I: int, E: int) -> None:  # noqa: E741
    """Launch a layer of Mamba 1."""
    scan, N = SelectiveScan(torch.zeros(E, I), torch.zeros(I)), B * P
    rows, pending = compile_conv(B, P, I, 4, R, width=scan.pending_width)
    control, state = torch.zeros(N, scan.control_width), torch.zeros(B, E, I)
    read = recurrent.selective_scan(scan, torch.zeros(B * R + N, I), control, rows, state, pending, saved_at=I)
    recurrent.gated_norm(read, torch.zeros(N, I, dtype=torch.bfloat16), None, Gate.ONLY)


def main() -> None:
    """Compile all and print the kernels' names."""
    driver = install()
    # Triton makes a number that is 1 a constant, so the smallest shapes are separate programs.
    compile_step(1, 1, 1, 1)
    compile_step(8, 4, 4, 129)
    compile_draft_tree(1, 1, 2, 1)
    compile_draft_tree(8, 4, 4, 2)
    compile_draft_tree(8, 4, 16, 15)
    noise.noise_kernel[(1,)](torch.zeros(512), 1 << 40, 1, 512, ROWS=16)
    compile_attention(1, 1, 9, 3, 64, 16, torch.bfloat16)
    compile_attention(1, 1, 4, 1, 128, 32, torch.bfloat16)
    compile_attention(4, 4, 32, 8, 128, 16, torch.bfloat16)
    compile_attention(4, 8, 8, 1, 80, 64, torch.float16)
    compile_attention(4, 4, 8, 4, 256, 16, torch.float32)
    compile_attention(1, 512, 32, 8, 128, 16, torch.bfloat16)
    compile_attention(1, 64, 2, 1, 256, 16, torch.float32)
    compile_fused(1, 576, 1536, (9, 3), 64, torch.bfloat16)
    compile_fused(4, 4096, 12288, (32, 8), 128, torch.bfloat16)
    compile_fused(3, 2304, 9216, (8, 4), 256, torch.float32)
    compile_products(1, 4096, 14_336)
    compile_products(16, 128_256, 4096)
    compile_products(8, 960, 576)
    for rows in (32, 64, 128, 512):
        compile_products(rows, 28_672, 4096)
        compile_products(rows, 4096, 4096)
    compile_scaled(1, 4096, 14_336, torch.bfloat16)
    compile_scaled(16, 960, 576, torch.float16)
    compile_conv(2, 4, 256, 3, 4)
    compile_matrix(2, 4, 4, (2, 16, 32), 1, delta=True)
    compile_matrix(2, 4, 4, (2, 24, 16), 1, delta=False)
    compile_scan(2, 4, 4, 128, 8)
    compile_low_rank(1, 1, ProductShape(576, (576, 192, 192)), 16, torch.bfloat16)
    compile_low_rank(4, 8, ProductShape(4096, (14_336, 14_336)), 64, torch.bfloat16)
    compile_low_rank(2, 512, ProductShape(14_336, (4096,)), 16, torch.bfloat16)
    compile_low_rank(3, 4, ProductShape(2304, (2048, 1024, 1024)), 256, torch.float32)
    print(*sorted({binary.name for binary in driver.binaries}))


if __name__ == "__main__":
    main()
