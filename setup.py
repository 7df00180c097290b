"""Builds the native libraries; everything else about the distribution is in pyproject.toml.

Invariant: plain C without Python.h, compiled by gcc alone and loaded with ctypes, so one artefact serves every Python
and its suffix and wheel tag say so (abi3).

Not responsible for: device code, which is compiled at run time.
"""

from __future__ import annotations

from glob import glob

from setuptools import Extension, setup

WARNINGS = ["-Wall", "-Wextra", "-Werror=implicit-function-declaration"]

FLAGS = Extension(
    "shared_mem._flags",
    sources=["shared_mem/native/flags.c", "shared_mem/native/chains.c"],
    depends=["shared_mem/native/flags.h", "shared_mem/native/chains.h"],
    extra_compile_args=["-O2", "-std=gnu11", "-fvisibility=hidden", *WARNINGS],
    py_limited_api=True,
)


def kernels() -> list[Extension]:
    """Return the CPU kernels' library, or nothing where there are no sources.

    It is compiled with OpenMP and not linked to a libgomp of its own: two runtimes in one process would fight for the
    cores. Its loader puts torch's libgomp in place first.
    """
    sources = sorted(glob("kernels/native/*.c"))
    if not sources:
        return []
    return [
        Extension(
            "kernels._native",
            sources=sources,
            depends=sorted(glob("kernels/native/*.h")),
            extra_compile_args=[
                "-O3",
                "-std=gnu11",
                "-pthread",
                "-fopenmp",
                "-fno-math-errno",
                "-fno-trapping-math",
                *WARNINGS,
            ],
            py_limited_api=True,
        )
    ]


setup(ext_modules=[FLAGS, *kernels()], options={"bdist_wheel": {"py_limited_api": "cp311"}})
