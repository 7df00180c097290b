"""The native targets of the fuzzer: no input has a report of a sanitizer, and a fault that is put in has one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tools.fuzz import corpus, native

pytestmark = [pytest.mark.slow, pytest.mark.sanitizers]

FAULTS = {
    "native_answers": ("kind < LS_KINDS ? kind : LS_KIND_ERROR", "kind"),
    "native_records": ("    if (count > v->num_slots) return;\n", ""),
}
"""By target: a line of flags.c, and what a fault makes of it."""


def run(program: Path, folder: Path, name: str, runs: int) -> subprocess.CompletedProcess[str]:
    flags = [f"-runs={runs}", "-seed=1", f"-artifact_prefix={folder}/"]
    return subprocess.run(
        [program, *flags, corpus.folder_of(name)], capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.parametrize("name", native.TARGETS)
def test_no_bytes_of_the_other_process_do_harm(tmp_path: Path, name: str) -> None:
    done = run(native.build(name, tmp_path), tmp_path, name, 300_000)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("name", native.TARGETS)
def test_a_fault_is_found_and_its_input_kept(tmp_path: Path, name: str) -> None:
    old, new = FAULTS[name]
    sources = shutil.copytree(native.SOURCES, tmp_path / "native")
    text = (sources / "flags.c").read_text()
    assert text.count(old) == 1
    (sources / "flags.c").write_text(text.replace(old, new))
    program = native.build(name, tmp_path, sources)
    done = run(program, tmp_path, name, 300_000)
    assert done.returncode
    (kept,) = tmp_path.glob("crash-*")
    again = subprocess.run([program, kept], capture_output=True, text=True, check=False)
    assert again.returncode, "the input that was kept shows the fault"
