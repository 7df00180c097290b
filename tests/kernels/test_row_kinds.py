"""Row kinds and other numbers that several packages define have the same value in Python, C and CUDA."""

from __future__ import annotations

import re
from pathlib import Path

from gpu_engine.front import validation
from kernels import row_kinds, step_tensors
from shared_mem import native
from shared_mem.layout import MAX_ROWS, PARENT_SHIFT, STEERED, RowKind, Stage


def constants(source: Path) -> dict[str, int]:
    """Return the names and values of a C file's enumerations and numeric macros."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", source.read_text(), flags=re.DOTALL)
    found = {name: int(value) for name, value in re.findall(r"#define (\w+) (-?\d+)\b", text)}
    for body in re.findall(r"enum \{(.*?)\}", text, flags=re.DOTALL):
        value = -1
        for item in filter(None, (part.strip() for part in body.split(","))):
            name, _, given = (part.strip() for part in item.partition("="))
            value = int(given, 0) if given else value + 1
            found[name] = value
    return found


def test_row_kinds_equal_those_of_the_layout(root: Path) -> None:
    expected = {kind.name: int(kind) for kind in RowKind}
    assert {name: getattr(row_kinds, name) for name in expected} == expected
    assert row_kinds.STEERED == STEERED
    for source in ("kernels/native/accept.h", "kernels/cuda/flags.cu", "shared_mem/native/flags.h"):
        there = constants(root / source)
        kinds = {name: there[name] for name in there if re.match(r"(LS_)?KIND_", name)}
        assert len(kinds) > 1, source
        assert kinds == {name: expected[name.partition("KIND_")[2]] for name in kinds}, source
        assert there.get("STEERED", STEERED) == STEERED
    assert constants(root / "shared_mem/native/flags.h")["LS_KINDS"] == len(RowKind)


def test_limits_and_outcomes_equal_those_of_c(root: Path) -> None:
    accept, flags = constants(root / "kernels/native/accept.h"), constants(root / "kernels/cuda/flags.cu")
    outcomes = ("RUN_ON", "STOP_TOKEN", "STOP_LENGTH", "STOP_STEERED")
    assert {name: accept[name] for name in outcomes} == {name: getattr(step_tensors, name) for name in outcomes}
    assert accept["MAX_LOGPROBS"] == step_tensors.MAX_LOGPROBS == validation.MAX_LOGPROBS
    assert accept["MASKED_LOGPROBS"] == step_tensors.MASKED_LOGPROBS > step_tensors.MAX_LOGPROBS
    assert flags["MAX_ROWS"] == MAX_ROWS
    assert step_tensors.PARENT_SHIFT == PARENT_SHIFT
    assert (flags["VERIFY"], flags["TREE"]) == (Stage.VERIFY, Stage.TREE)
    refusals = ("BAD_SLOT", "BAD_N_COMMIT", "BAD_N_DRAFT", "BAD_COMMIT_POS")
    assert {name: -flags[name] for name in refusals} == {name: getattr(native, name) for name in refusals}
