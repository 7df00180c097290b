"""A copy of the kernels' package with a library that is compiled in another way, for tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kernels

PACKAGE = Path(kernels.__file__).parent
NATIVE = PACKAGE / "native"
SCALAR = ("amx.c", "float_tiles.c", "pack.c", "step.c", "suffix.c", "team.c", "unpack.c")
"""Without the kernels, which are headers that are compiled once per vector unit."""
# As setup.py has them, except for -O3: the sanitizers see more, and gcc is done in minutes.
OPTIONS = ("-std=gnu11", "-pthread", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-w")


def package_copy(folder: Path) -> Path:
    """Return a copy of the package in `folder`, without its library."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    return Path(shutil.copytree(PACKAGE, folder / "kernels", ignore=ignored))


def set_level(dispatch: Path, level: int) -> None:
    """Have a copy of dispatch.c call the kernels of one level; what it no longer calls needs not to be there."""
    text, begin = dispatch.read_text(), "static int level(void) {"
    dispatch.write_text(text.replace(begin, f"#define level() {level}\nstatic int(detected)(void) {{"))
    assert dispatch.read_text() != text


def build(package: Path, sources: Sequence[str], options: Sequence[str]) -> None:
    """Compile the library of a copy of the package."""

    def compile_one(name: str) -> str:
        made = package / f"{name}.o"
        command = ["gcc", "-fPIC", *OPTIONS, *options, "-c", str(package / "native" / name), "-o", str(made)]
        subprocess.run(command, check=True)
        return str(made)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    # As in setup.py, torch's OpenMP is the one.
    command = ["gcc", "-shared", "-pthread", *options, *objects, "-lm", "-o", str(package / "_native.abi3.so")]
    subprocess.run(command, check=True)
