"""What the kernels take of a GPU: compiled for five kinds of GPU on a machine without one, and as the table says."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.kernels.cuda.ahead_of_time import MAX_SHARED, NAMES
from tests.kernels.cuda.cubins import (
    CASES,
    FLAGS,
    PARTS,
    PRODUCTS,
    TABLE,
    compile_everything,
    difference,
    in_table,
    part_of,
)

INSTRUCTIONS = {80: {"HMMA"}, 89: {"HMMA"}, 90: {"HMMA", "HGMMA"}, 100: {"HMMA", "UTCHMMA"}, 120: {"HMMA"}}
"""The matrix instructions of the kernels whose rows have equal bits, by capability. Where there are two, a device must
show that they are equal: the products are compared at each start (linear.py), attention was compared on an H100."""
EQUAL_BITS = (
    {"product_kernel", "gated_product_kernel"},
    {"decode_kernel", "tree_decode_kernel", "prefill_kernel"},
)
WRITE = "`python -m tests.kernels.cuda.cubins --write`"


def test_the_table_has_every_kernel_for_every_kind_of_gpu() -> None:
    _, rows = in_table()
    assert {row.case for row in rows} == {*CASES, *PRODUCTS, FLAGS}, WRITE
    assert {row.kernel for row in rows} == NAMES | {"lockstep_post", "lockstep_wait", "lockstep_fetch"}, WRITE
    assert {row.capability for row in rows} == set(MAX_SHARED)


def test_no_kernel_of_the_default_path_spills() -> None:
    assert [row.line for row in in_table()[1] if row.is_default and row.stack] == []


def test_shared_memory_fits_on_the_smallest_gpu() -> None:
    rows = in_table()[1]
    assert [row.line for row in rows if row.shared > MAX_SHARED[row.capability]] == []
    one_size = [row for row in rows if "product" not in row.kernel]  # a product's tile follows from the GPU's memory
    assert [row.line for row in one_size if row.shared > min(MAX_SHARED.values())] == []


@pytest.mark.parametrize("kernels", EQUAL_BITS, ids=["products", "attention"])
def test_kernels_with_equal_bits_have_the_instructions_that_were_compared(kernels: set[str]) -> None:
    for capability, wanted in INSTRUCTIONS.items():
        rows = [row for row in in_table()[1] if row.kernel in kernels and row.capability == capability]
        assert set().union(*(row.instructions for row in rows)) == wanted, capability
        # Whatever the tile, 16 products are summed at once, in fp32 (UTCHMMA's operands are in a descriptor).
        sums = {name for row in rows for name in row.matrix.split("+") if name not in ("-", "UTCHMMA")}
        assert {(name.split(".")[1][-2:], name.split(".", 2)[2]) for name in sums} == {("16", "F32.BF16")}, capability


def test_equal_tables_are_no_error() -> None:
    rows = in_table()[1]
    assert difference(rows, rows) is None
    assert difference(rows, rows[1:]) == f"- {rows[0].line}"


@pytest.mark.slow
def test_the_table_has_what_the_kernels_take(root: Path) -> None:
    """A part of the table, which follows from the sources of the kernels; `make check-cubins` compiles all of it."""
    import triton

    version, rows = in_table()
    assert triton.__version__ == version, f"{TABLE.name} is of another Triton: {WRITE}"
    sources = sorted((root / "kernels/cuda").rglob("*.py"))
    part = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).digest()[0] % PARTS
    wanted = [row.line for row in rows if part_of(row.case, row.capability) == part]
    assert [row.line for row in compile_everything(root, [part])] == wanted, WRITE
