"""Fuzz targets in C: every function of shared_mem/native that reads bytes which another process wrote.

A target has libFuzzer's entry, `LLVMFuzzerTestOneInput`. With clang it is linked with libFuzzer, which coverage guides;
with only gcc and native/driver.c, which changes inputs at random, from a seed. Both under AddressSanitizer and UBSan.

Invariant: a program takes the flags and corpora of libFuzzer, and writes an input that fails where libFuzzer would.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import shared_mem

FOLDER = Path(__file__).with_name("native")
SOURCES = Path(shared_mem.__file__).parent / "native"
TARGETS = {"native_answers": "answers.c", "native_records": "records.c"}
"""Name of a target -> its source."""
_WARNINGS = ("-Wall", "-Wextra", "-Werror")


def build(name: str, folder: Path, sources_of: Path = SOURCES) -> Path:
    """Compile a target into a folder, and return the program. `sources_of`: where flags.c and chains.c are."""
    program, sources = folder / name, [FOLDER / TARGETS[name], sources_of / "flags.c", sources_of / "chains.c"]
    clang = shutil.which("clang")
    if clang:
        command = [clang, "-fsanitize=fuzzer,address,undefined"]
    else:
        command = ["gcc", "-fsanitize=address,undefined"]
        sources.append(FOLDER / "driver.c")
    options = ["-g", "-O1", "-std=gnu11", "-fno-sanitize-recover=all", "-pthread", *_WARNINGS, f"-I{sources_of}"]
    subprocess.run([*command, *options, *sources, "-o", program], check=True)
    return program
