"""flags.cu compiles for all supported GPUs on a machine without one, with the NVRTC of the image."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

SOURCE = "kernels/cuda/flags.cu"
KERNELS = {"lockstep_post", "lockstep_wait", "lockstep_fetch"}
ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")


def nvrtc_missing() -> str | None:
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "cuda-bindings is not installed"
    from cuda.bindings import nvrtc

    try:
        nvrtc.nvrtcVersion()
    except Exception as error:
        return f"NVRTC does not load: {error}"
    return None


pytestmark = pytest.mark.skipif(nvrtc_missing() is not None, reason=f"needs NVRTC: {nvrtc_missing()}")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_flags_compile(root: Path, architecture: str) -> None:
    from kernels.cuda.nvrtc import compile_cubin

    code = compile_cubin((root / SOURCE).read_text(), "flags.cu", architecture)
    assert code[:4] == b"\x7fELF"
    assert all(name.encode() in code for name in KERNELS)


def ptx(source: bytes) -> str:
    from cuda.bindings import nvrtc

    from kernels.cuda.nvrtc import check

    program = check(nvrtc.nvrtcCreateProgram(source, b"flags.cu", 0, [], []))
    check(nvrtc.nvrtcCompileProgram(program, 2, [b"--gpu-architecture=compute_90", b"--std=c++17"]))
    text = b" " * check(nvrtc.nvrtcGetPTXSize(program))
    check(nvrtc.nvrtcGetPTX(program, text))
    return text.decode()


def test_words_are_ordered_and_rows_are_not_read_through_the_read_only_cache(root: Path) -> None:
    text = ptx((root / SOURCE).read_bytes())
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
