"""`python -m benchmarks`: every harness is a module, and every program among the benchmarks starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kernels
from benchmarks.__main__ import HARNESSES
from benchmarks.speed.bench_products import TILE_ROWS

PROGRAMS = (
    "benchmarks.faults.attacker",
    "benchmarks.faults.compile_alone",
    "benchmarks.gpu.server",
    "benchmarks.gpu.sync_peer",
    "benchmarks.peers.worker",
)
"""Modules that a harness starts as processes of their own."""

HELP_OF_ALL = """
import contextlib, io, runpy, sys, traceback

broken = []
for arguments in [argument.split() for argument in sys.argv[1:]]:
    module, sys.argv = arguments[0], [*arguments, "--help"]
    printed = io.StringIO()
    code = "no exit"
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = "an error"
    if code or "usage:" not in printed.getvalue():
        broken.append(f"{arguments}: {code}")
print(*broken, sep="\\n")
"""


WITHOUT_CRYPTOGRAPHY = """
import sys

sys.modules["cryptography"] = None
sys.argv = ["benchmarks", "receipts"]
from benchmarks.__main__ import main

sys.exit(main())
"""


def python(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=root, capture_output=True, text=True, check=False)


def test_every_harness_is_a_module_of_its_room(root: Path) -> None:
    assert all((root / "benchmarks" / room / f"{name}.py").is_file() for name, (room, _) in HARNESSES.items())


def test_the_fewest_rows_of_a_tile_are_those_of_the_kernel() -> None:
    header = (Path(kernels.__file__).parent / "native" / "amx.h").read_text()
    assert f"#define TILE_ROWS {TILE_ROWS} " in header


@pytest.mark.slow
def test_every_harness_and_program_explains_its_flags(root: Path) -> None:
    """All in one process, which imports torch once."""
    harnesses = [f"benchmarks {name}" for name in HARNESSES]
    done = python(root, "-c", HELP_OF_ALL, *harnesses, *PROGRAMS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "", done.stderr


def test_a_harness_without_its_extra_names_it(root: Path) -> None:
    done = python(root, "-c", WITHOUT_CRYPTOGRAPHY)
    wanted = "cannot run: needs the package cryptography: pip install 'lockstep-engine[receipts]'\n"
    assert (done.returncode, done.stderr) == (2, wanted)
