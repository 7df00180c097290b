"""The registers, stack, shared memory and matrix instructions of each kernel, for five kinds of GPU.

`cubins.tsv` has the rows for the pinned Triton and NVRTC; test_cubins.py compares them. `python -m
tests.kernels.cuda.cubins --write` compiles everything and writes the table. The kernels are compiled without a GPU (see
ahead_of_time.py). Invariants: no kernel of the default path (bfloat16, heads of 64 or 128 channels) spills a register
to its stack, and none asks for more shared memory than the GPU has. Not responsible for: the speed of a kernel.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from kernels.accept import AcceptResult, SlotParams, StepTensors
from kernels.cuda import accept, advance, branch, fused, ngram, noise, posting, products, scaled, step_inputs
from kernels.cuda.attention import paged
from kernels.cuda.jump_forward import take_jump_forward
from kernels.cuda.nvrtc import compile_cubin
from kernels.cuda.row_state import DeviceRows, RowScratch, SlotRows
from kernels.cuda.tree_acceptance import PathCompaction
from kernels.fused import Activation, NormKind, RMSNorm
from kernels.low_rank_stacks import ProductShape
from kernels.paged_attention import KVPages
from kernels.step_tensors import TreeRows
from tests.kernels.cuda import ahead_of_time
from tests.kernels.cuda.ahead_of_time import MAX_SHARED, Binary, flags, ints

TABLE = Path(__file__).with_name("cubins.tsv")
PROCESSES = (("90", "80"), ("89", "100", "120"))
"""The compute capabilities that each process compiles for, times 10."""
PARTS = 12
"""`part_of` divides the cases into so many parts."""
_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
_MATRIX = re.compile(r"\b((?:H|I|Q|D|O)G?MMA|UTC\w*MMA)\b[\w.]*")
_RESOURCES = re.compile(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)")


class Row(NamedTuple):
    """One kernel in one shape, on one kind of GPU."""

    case: str
    kernel: str
    variant: int
    """Counts the kernel's programs in the case."""
    capability: int
    registers: int
    stack: int
    shared: int
    matrix: str
    """The matrix instructions, joined by "+"; "-" where there are none."""

    @property
    def is_default(self) -> bool:
        """A server with default settings runs it."""
        return not self.case.startswith("option")

    @property
    def instructions(self) -> frozenset[str]:
        """The matrix instructions without the sizes of their tiles: "HMMA" of a warp, "HGMMA" of four, ..."""
        return frozenset(_MATRIX.sub(r"\1", self.matrix).split("+")) - {"-"}

    @property
    def line(self) -> str:
        """As in the table."""
        return "\t".join(str(value) for value in self)


def step(B: int, rows: int, S: int = 17, R: int = 8, N: int = 128) -> None:
    """Launch a guided step's kernels with drafts of the prompt and the grammar, over Llama 3.1 8B's vocabulary."""
    V = 128_256
    slot_rows = SlotRows.allocate(S, V, ints(S, R, 4008), flags(S).bool())
    result, params = AcceptResult.allocate(B, R, V), SlotParams.allocate(S)
    slots, drafts, num_drafts, kinds, forced = ints(B), ints(B, R), ints(B), flags(B, R), ints(B, R)
    history, length, guided = ints(S, 8192 + 16), ints(S), flags(B).bool()
    scratch = RowScratch.allocate(B * R, V, "cpu")
    logits, device = torch.zeros(B * rows, V, dtype=torch.bfloat16), DeviceRows(slot_rows, scratch)
    tensors = StepTensors(slots, drafts, num_drafts, kinds, forced, 0, (0, 0), history, length, params, result, device)
    inputs = (slots, history, length, ints(S, R), ints(S), slot_rows.done_S, ints(S, N))
    outs = (torch.zeros(B, rows, dtype=torch.int64), ints(B, rows), drafts, num_drafts, ints(B, N))
    step_inputs.load_step(*inputs, *outs, ints(B) + R)
    accept.accept(logits, tensors, num_rows=rows)
    accept.draw_drafts(logits[:B], tensors, 0)
    limits, proposed = (ints(S), params.max_length_S), (ints(S, R), ints(S))
    of_slots = (slots, history, length, params.prompt_length_S, *limits, *proposed)
    ngram.propose_ngram(*of_slots, ngram_max=4, num_jump_forward_B=ints(B))
    cached = posting.CachedRows(slot_rows.masks_SRW, flags(S, R), ints(S, R), flags(S, R).bool())
    out = posting.PostTensors(*(ints(B) for _ in range(6)), ints(B, 2 * R), flags(B, R), ints(B, R))
    lengths = (history, length, params.prompt_length_S, ints(S))
    post = (slots, guided, guided, ints(B), drafts, num_drafts, *lengths, cached, out)
    counter = torch.zeros(1, dtype=torch.int64)
    posting.pack_post(*post, k=posting.VERIFY, done_S=slot_rows.done_S)
    posting.pack_post(*post, k=posting.PROPOSE, limits=limits)
    answers = (guided, guided, out, counter, ints(2, S, R, 4008), cached, kinds, forced)
    posting.cache_rows(slots, *answers, k=posting.VERIFY, reported_seq=counter.clone())
    taken = (out.slots_B, out.need_rows_B, out.kinds_BR, out.forced_BR, length, history, ints(S, R), ints(S), ints(B))
    take_jump_forward(slots, result.num_emitted_B, *taken, vocab_size=V)
    emitted = (result.num_emitted_B, result.finish_B, result.blocked_B)
    advance.advance(slots, *emitted, guided, cached.cached_SR)


def tree_step(S: int = 17, B: int = 16, R: int = 8, N: int = 128) -> None:
    """Launch the kernels that only a step with a tree of drafts has."""
    V, tree = 128_256, TreeRows.allocate(B, R)
    rows = SlotRows.allocate(S, V, ints(S, R, 4008), flags(S).bool())
    result, params = AcceptResult.allocate(B, R, V), SlotParams.allocate(S)
    slots, drafts, num_drafts, kinds, forced = ints(B), ints(B, R), ints(B), flags(B, R), ints(B, R)
    history, length = ints(S, 8192 + 16), ints(S)
    logits, device = torch.zeros(B * R, V, dtype=torch.bfloat16), DeviceRows(rows, RowScratch.allocate(B * R, V, "cpu"))
    lanes = (slots, drafts, num_drafts, kinds, forced, 0, (0, 0), history, length, params, result, device)
    accept.accept(logits, StepTensors(*lanes, tree=tree), num_rows=R)
    inputs = (slots, history, length, ints(S, R), ints(S), rows.done_S, ints(S, N))
    outs = (torch.zeros(B, R, dtype=torch.int64), ints(B, R), drafts, num_drafts, ints(B, N))
    step_inputs.load_step(*inputs, *outs, ints(B) + R, ints(S, R), tree)
    limits, proposed = (ints(S), params.max_length_S), (ints(S, R), ints(S))
    of_slots = (history, length, params.prompt_length_S, *limits, *proposed, ints(S, R))
    branch.add_branch(slots, flags(B).bool(), *of_slots, num_jump_forward_B=ints(B), ngram_max=4)
    pages = [KVPages(*(torch.zeros(4, 8, 16, 128, dtype=torch.bfloat16) for _ in range(2)), token_major=True)]
    PathCompaction(pages)(slots, length, result.num_emitted_B, tree, ints(B, N))


def attention(
    B: int, P: int, Hq: int, Hkv: int, D: int, dtype: torch.dtype = torch.bfloat16, *, tree: bool = False
) -> None:
    """Launch attention once over pages of 16 tokens: B sequences, P queries."""
    width = (Hq + 2 * Hkv) * D
    heads = torch.zeros(B, P, width, dtype=dtype).view(B, P, -1, D)
    q, k, v = heads[:, :, :Hq], heads[:, :, Hq : Hq + Hkv], heads[:, :, Hq + Hkv :]
    pages = KVPages(*(torch.zeros(4, Hkv, 16, D, dtype=dtype) for _ in range(2)), token_major=True)
    rows_BRR = ints(B, 8, 8) if tree else None
    paged.paged_attention(q, k, v, pages, ints(B, 512), ints(B, P), scale=0.1, tree_rows_BRR=rows_BRR)


def layer(rows: int, H: int, inner: int, heads: tuple[int, int], D: int) -> None:
    """Launch the small operators of a layer of a Llama."""
    x, qkv = (torch.zeros(rows, width, dtype=torch.bfloat16) for width in (H, (heads[0] + 2 * heads[1]) * D))
    angles = torch.zeros(rows, D, dtype=torch.bfloat16)
    norm = RMSNorm(torch.ones(H, dtype=torch.bfloat16), 1e-6, NormKind.ROUND_THEN_SCALE)
    fused.rms_norm(x, norm)
    fused.add_rms_norm(x, x, norm)
    fused.rotate(qkv, angles, angles, heads=heads, head_dim=D)
    fused.angles_at(ints(rows, 1), angles, angles)
    fused.gated(torch.zeros(rows, 2 * inner, dtype=torch.bfloat16), Activation.SILU)


def product(capability: int, M: int, N: int, K: int, *, gated: bool = False, bias: bool = False) -> None:
    """Launch a product of M rows in the tile that it has on a GPU."""
    x, weight = torch.zeros(M, K, dtype=torch.bfloat16), torch.empty(N, K, dtype=torch.bfloat16)
    shared = MAX_SHARED[capability] + (1 << 10)  # of a multiprocessor
    tile, bias_N = products.Tile.of(M, N, K, shared), torch.zeros(N, dtype=torch.bfloat16) if bias else None
    if gated:
        products.gated_product(x, weight, Activation.SILU, bias_N, tile=tile)
    else:
        products.product(x, weight, bias_N, tile=tile)


def scaled_rows(kind: torch.dtype) -> None:
    """Launch the kernel before a scaled product of 16 rows."""
    scaled.quantise_rows(torch.zeros(16, 4096, dtype=torch.bfloat16), kind, 16)


def int8_product() -> None:
    """Launch the kernels before and after a product of integers of 16 rows."""
    scales = scaled.quantise_rows(torch.zeros(16, 4096, dtype=torch.bfloat16), torch.int8, 16)[1]
    scaled.rescale(ints(16, 4096), scales, torch.zeros(4096), None, 16, torch.bfloat16)


FP8 = "option: FP8"
"""The case that needs compute capability 8.9."""
FLAGS = "step, flags.cu"
"""The case that NVRTC compiles."""
CASES: dict[str, Callable[[], object]] = {
    "step, 8B, 16 x 8": lambda: step(16, 8),
    "step, 8B, 16 x 1": lambda: step(16, 1),
    "step, 8B, 1 x 8": lambda: step(1, 8),
    "decode, 8B, 16 x 1": lambda: attention(16, 1, 32, 8, 128),
    "decode, 8B, 1 x 8": lambda: attention(1, 8, 32, 8, 128),
    "decode, 8B, 16 x 8": lambda: attention(16, 8, 32, 8, 128),
    "decode, 8B, 16 x 16": lambda: attention(16, 16, 32, 8, 128),
    "decode, 135M, 1 x 8": lambda: attention(1, 8, 9, 3, 64),
    "decode, 135M, 16 x 8": lambda: attention(16, 8, 9, 3, 64),
    "prefill, 8B, 1 x 512": lambda: attention(1, 512, 32, 8, 128),
    "prefill, 8B, 4 x 32": lambda: attention(4, 32, 32, 8, 128),
    "prefill, 135M, 1 x 512": lambda: attention(1, 512, 9, 3, 64),
    "layer, 8B": lambda: layer(128, 4096, 14_336, (32, 8), 128),
    "layer, 135M, 1 row": lambda: layer(1, 576, 1536, (9, 3), 64),
    "hybrid, convolution": lambda: ahead_of_time.compile_conv(16, 8, 2048, 3, 8),
    "hybrid, delta net": lambda: ahead_of_time.compile_matrix(16, 8, 8, (32, 128, 128), 16, delta=True),
    "hybrid, Mamba 2": lambda: ahead_of_time.compile_matrix(16, 8, 8, (128, 128, 64), 1, delta=False),
    "hybrid, Mamba 1": lambda: ahead_of_time.compile_scan(16, 8, 8, 8192, 16),
    "option: tree, 8B": tree_step,
    "option: tree decode, 8B, 16 x 8": lambda: attention(16, 8, 32, 8, 128, tree=True),
    "option: tree decode, 135M, 16 x 8": lambda: attention(16, 8, 9, 3, 64, tree=True),
    "option: tree of a head": lambda: ahead_of_time.compile_draft_tree(17, 16, 8, 7),
    "option: decode, heads of 256": lambda: attention(16, 8, 16, 8, 256),
    "option: prefill, heads of 256": lambda: attention(1, 512, 16, 8, 256),
    "option: decode, float32": lambda: attention(16, 8, 32, 8, 128, torch.float32),
    "option: prefill, float32": lambda: attention(1, 512, 32, 8, 128, torch.float32),
    "option: int8": int8_product,
    FP8: lambda: scaled_rows(torch.float8_e4m3fn),
    "option: adapters": lambda: ahead_of_time.compile_low_rank(
        16, 8, ProductShape(4096, (14_336, 14_336)), 64, torch.bfloat16
    ),
    "option: noise": lambda: noise.noise_kernel[(1,)](torch.zeros(512), 1 << 40, 1, 512, ROWS=16),
}
"""By name; those whose name begins with "option" are not of the default path. 8B: Llama 3.1 8B's shapes, 135M:
SmolLM2's. The hybrids have the layers of LFM 2, Qwen 3 Next, Bamba and Jamba."""
ROWS = (1, 8, 32, 64, 128, 512)
"""Rows of a product. There is a tile for up to 16, 32, 64 and 128 rows; Triton compiles one row apart, and multiples of
16."""
PRODUCTS: dict[str, Callable[[int], None]] = {
    f"product, {name}, {rows} x {N} x {K}": lambda capability, rows=rows, N=N, K=K, gated=gated, bias=bias: product(  # type: ignore[misc]
        capability, rows, N, K, gated=gated, bias=bias
    )
    for name, N, K, gated, bias in (
        ("8B", 4096, 4096, False, False),
        ("8B", 4096, 14_336, False, False),
        ("8B, large", 128_256, 4096, False, False),
        ("8B, gated", 28_672, 4096, True, False),
        ("135M", 960, 576, False, False),
        ("135M", 576, 1536, False, False),
        ("135M, large", 49_152, 576, False, False),
        ("135M, gated", 3072, 576, True, False),
        ("7B, bias", 4608, 3584, False, True),
    )
    for rows in (ROWS[:4] if gated else ROWS)
}
"""Products of bfloat16 by name: a tile for each number of rows. More rows than 64 have their activation in another
kernel. 7B: Qwen 2.5 7B's shape."""


def part_of(case: str, capability: int) -> int:
    """Return the part, of `PARTS`, that compiles a case for a kind of GPU."""
    return hashlib.sha256(f"{case}, {capability}".encode()).digest()[0] % PARTS


def _output(tool: str, *arguments: str) -> str:
    return subprocess.run([_TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


@functools.cache
def _inspected(code: bytes) -> tuple[dict[str, tuple[int, int, int]], str]:
    """Return registers, stack and static shared memory of each kernel of a binary, and its instructions as text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        usage, text = _output("cuobjdump", "--dump-resource-usage", file.name), _output("nvdisasm", "-c", file.name)
    found = {match[1]: (int(match[2]), int(match[3]), int(match[4])) for match in _RESOURCES.finditer(usage)}
    assert found, usage
    return found, text


def row_of(case: str, variant: int, capability: int, binary: Binary) -> Row:
    """Read what a binary takes."""
    found, text = _inspected(binary.code)
    ((registers, stack, _),) = found.values()
    matrix = "+".join(sorted({found.group(0) for found in _MATRIX.finditer(text)})) or "-"
    return Row(case, binary.name, variant, capability, registers, stack, binary.shared, matrix)


def _rows_of_flags(capability: int) -> Iterable[Row]:
    source = Path(__file__).parents[3] / "kernels/cuda/flags.cu"
    found, _ = _inspected(compile_cubin(source.read_text(encoding="ascii"), source.name, f"sm_{capability}"))
    for name, (registers, stack, shared) in sorted(found.items()):
        yield Row(FLAGS, name, 1, capability, registers, stack, shared, "-")


def _jitted() -> Iterable[Any]:
    modules = [module for name, module in sys.modules.items() if name.startswith("kernels.cuda.")]
    return (value for module in modules for value in vars(module).values() if isinstance(value, triton.JITFunction))


def compiled(capability: int, parts: Iterable[int]) -> Iterable[Row]:
    """Yield the rows of the cases of some parts, for one kind of GPU. Once a process."""
    driver = ahead_of_time.install(capability)
    launches = CASES | {name: lambda launch=launch: launch(capability) for name, launch in PRODUCTS.items()}  # type: ignore[misc]
    for case, launch in launches.items():
        if part_of(case, capability) not in parts or (case == FP8 and capability < 89):
            continue
        for function in _jitted():  # so that a case has all its kernels, whichever cases came before
            function.device_caches.clear()
        before, seen = len(driver.binaries), dict[str, int]()
        launch()
        for binary in driver.binaries[before:]:
            seen[binary.name] = seen.get(binary.name, 0) + 1
            yield row_of(case, seen[binary.name], capability, binary)
    if part_of(FLAGS, capability) in parts:
        yield from _rows_of_flags(capability)


def compile_everything(root: Path, parts: Iterable[int] = range(PARTS)) -> list[Row]:
    """Compile for every kind of GPU, in two processes at a time, and return the rows in the order of the table."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.cuda.cubins", "--parts", *map(str, parts)]
    running = [
        subprocess.Popen(
            [*command, "--capabilities", *capabilities], cwd=root, env=environment, stdout=subprocess.PIPE, text=True
        )
        for capabilities in PROCESSES
    ]
    texts = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0] * len(running)
    return sorted(parsed("".join(texts)))


def parsed(text: str) -> list[Row]:
    """Return the rows of lines of the table."""
    rows = (line.split("\t") for line in text.splitlines())
    return [Row(row[0], row[1], *(int(value) for value in row[2:7]), row[7]) for row in rows]


def in_table() -> tuple[str, list[Row]]:
    """Return the version of Triton that compiled the table, and its rows."""
    version, _, *lines = TABLE.read_text(encoding="ascii").splitlines(keepends=True)
    return version.split()[-1], parsed("".join(lines))


def difference(was: list[Row], now: list[Row]) -> str | None:
    """Return the lines that only one of two tables has; None: they are equal."""
    old, new = ({row.line for row in rows} for rows in (was, now))
    return (
        "\n".join([*(f"- {line}" for line in sorted(old - new)), *(f"+ {line}" for line in sorted(new - old))]) or None
    )


def main() -> None:
    """Compare the table with what the compilers make, print the rows of the named capabilities, or write the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.cuda.cubins")
    parser.add_argument("--capabilities", nargs="*", type=int, default=[], help=", ".join(map(str, MAX_SHARED)))
    parser.add_argument("--parts", nargs="*", type=int, default=range(PARTS), help=f"of {PARTS}; all by default")
    parser.add_argument("--write", action="store_true", help="write the table")
    options = parser.parse_args()
    if options.write:
        rows = compile_everything(Path(__file__).parents[3])
        head = f"# Triton {triton.__version__}\n" + "\t".join(Row._fields) + "\n"
        TABLE.write_text(head + "".join(f"{row.line}\n" for row in rows), encoding="ascii")
    elif not options.capabilities:
        sys.exit(difference(in_table()[1], compile_everything(Path(__file__).parents[3])))
    elif len(options.capabilities) == 1:
        for row in compiled(options.capabilities[0], set(options.parts)):
            print(row.line, flush=True)
    else:  # Triton compiles for one target a process
        for capability in options.capabilities:
            chosen = ["--capabilities", str(capability), "--parts", *map(str, options.parts)]
            subprocess.run([sys.executable, "-W", "ignore", "-m", __spec__.name, *chosen], check=True)


if __name__ == "__main__":
    main()
