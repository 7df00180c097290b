"""Builds the native libraries; everything else about the distribution is in pyproject.toml.

Invariant: plain C without Python.h, compiled with nothing but gcc and loaded with ctypes, so one artefact serves every
Python and its suffix and wheel tag say so (abi3).

Not responsible for: device code, which is compiled at run time.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

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
                # Without that pass and debugging information gcc takes half as long; no forward was faster.
                "-fno-gcse-after-reload",
                "-g0",
                "-std=gnu11",
                "-pthread",
                "-fopenmp",
                "-fno-math-errno",
                "-fno-trapping-math",
                "-ffp-contract=off",  # what is fused is written out (see simd.h), so every unit has the same bits
                *WARNINGS,
            ],
            py_limited_api=True,
        )
    ]


class ParallelBuild(build_ext):
    """Compiles the sources of an extension side by side: one for each vector unit, which takes up to a minute."""

    def build_extensions(self) -> None:
        """Build all extensions."""
        compile_in_turn = self.compiler.compile

        def compile_sources(sources: list[str], *positional: Any, **options: Any) -> list[str]:
            def compile_one(source: str) -> list[str]:
                return compile_in_turn([source], *positional, **options)

            with ThreadPoolExecutor(os.cpu_count()) as pool:
                return [path for paths in pool.map(compile_one, sources) for path in paths]

        self.compiler.compile = compile_sources
        super().build_extensions()


setup(
    ext_modules=[FLAGS, *kernels()],
    cmdclass={"build_ext": ParallelBuild},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
