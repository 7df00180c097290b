"""The compiled library: one file serves every Python version, and it imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import shared_mem
from shared_mem import native
from shared_mem.errors import NativeMissing

ROOT = Path(shared_mem.__file__).parents[1]

LEAF = """
import sys
import shared_mem.channel, shared_mem.handover, shared_mem.segment
heavy = {"torch", "transformers", "grpc", "asyncio", "google.protobuf"} & set(sys.modules)
sys.exit(f"imported: {sorted(heavy)}" if heavy else 0)
"""


def test_the_library_serves_every_python() -> None:
    path = native.library_path()
    assert path.name == "_flags.abi3.so"
    assert b"PyInit_" not in path.read_bytes()


def test_the_error_of_a_missing_library_names_the_build_command(tmp_path: Path) -> None:
    with pytest.raises(NativeMissing, match=r"pip install -e \."):
        native.library_path(tmp_path)


def test_an_unknown_function_is_an_error() -> None:
    with pytest.raises(AttributeError):
        native.function_address("ls_nothing")


def test_shared_mem_imports_no_heavy_module() -> None:
    run = subprocess.run([sys.executable, "-c", LEAF], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
