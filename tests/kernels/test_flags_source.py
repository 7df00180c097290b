"""flags.cu compiles for all supported GPUs on a machine without one, with nvcc or NVRTC."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = "kernels/cuda/flags.cu"
KERNELS = {"lockstep_post", "lockstep_wait", "lockstep_fetch"}
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
NVCC = shutil.which("nvcc")


def nvrtc_missing() -> str | None:
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "cuda-bindings is not installed"
    from cuda.bindings import nvrtc

    try:
        nvrtc.nvrtcVersion()
    except Exception as error:
        return f"NVRTC does not load: {error}"
    return None


def nvcc(root: Path, *options: str) -> None:
    assert NVCC is not None
    done = subprocess.run([NVCC, *options, str(root / SOURCE)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_flags_compile(root: Path, tmp_path: Path, architecture: str) -> None:
    missing = nvrtc_missing()
    if missing is None:
        from kernels.cuda.nvrtc import compile_cubin

        code = compile_cubin((root / SOURCE).read_text(), "flags.cu", architecture)
    elif NVCC is not None:
        target = tmp_path / "flags.cubin"
        nvcc(root, "-cubin", f"-arch={architecture}", "-std=c++17", "-Werror=all-warnings", "-o", str(target))
        code = target.read_bytes()
    else:
        pytest.skip(f"no nvcc on PATH, and {missing}")
    assert code[:4] == b"\x7fELF"
    assert all(name.encode() in code for name in KERNELS)


@pytest.mark.skipif(NVCC is None, reason="no nvcc on PATH")
def test_words_are_ordered_and_rows_are_not_read_through_the_read_only_cache(root: Path, tmp_path: Path) -> None:
    nvcc(root, "-ptx", "-arch=sm_90", "-o", str(tmp_path / "flags.ptx"))
    text = (tmp_path / "flags.ptx").read_text()
    _, *bodies = re.split(r"\.visible \.entry (\w+)", text)
    kernels = dict(zip(bodies[::2], bodies[1::2], strict=True))
    assert set(kernels) == KERNELS
    post, wait, fetch = (kernels[name] for name in ("lockstep_post", "lockstep_wait", "lockstep_fetch"))
    assert post.count("st.release.sys.global.u64") == 2, "the ring entry, then the sequence"
    assert "ld.relaxed.sys.global.u64" in wait
    assert "fence.acq_rel.sys" in wait
    for body in (wait, fetch):
        assert "ld.volatile.global.v4.u32" in body
        assert "ld.global.nc" not in body
