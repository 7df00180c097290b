"""The server's checks of its own installation."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

import pytest

from gpu_engine.ops.installation import DISTRIBUTION, overwritten_kernels, torch_has_cuda


@pytest.mark.parametrize("files", [["__init__.py", "accept.py"], []])
def test_the_error_of_a_foreign_kernels_package_names_the_remedy(tmp_path: Path, files: list[str]) -> None:
    package = tmp_path / "kernels"
    package.mkdir()
    for name in files:
        (package / name).write_text("from kernels.hub import get_kernel\n")

    def find(name: str) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(tmp_path)])

    assert overwritten_kernels() is None, "our own package is recognised"
    problem = overwritten_kernels(find)
    assert problem is not None
    assert "\n" not in problem
    assert f"pipx install {DISTRIBUTION}" in problem
    assert (str(package / "__init__.py") if files else "no file") in problem


@pytest.mark.parametrize(
    ("version", "has"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", False),
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", True),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n", True),
        ("", True),
        (None, True),
    ],
)
def test_a_torch_without_cuda_is_known_without_importing_it(tmp_path: Path, version: str | None, has: bool) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('imported')\n")
    if version is not None:
        (tmp_path / "torch" / "version.py").write_text(version)
    assert torch_has_cuda(lambda name: PathFinder.find_spec(name, [str(tmp_path)])) is has


def test_looking_for_the_package_does_not_import_it(tmp_path: Path) -> None:
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    assert overwritten_kernels(lambda name: importlib.util.spec_from_file_location(name, package / "__init__.py"))


def test_the_start_ends_with_one_line_where_another_package_is_named_kernels(tmp_path: Path, root: Path) -> None:
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("from kernels.hub import get_kernel\n")
    done = subprocess.run(
        [sys.executable, "-m", "gpu_engine", "serve", "--grammar", "none", "--listen", f"unix:{tmp_path}/s"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{root}:{root}/client"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert f"kernels: {package / '__init__.py'} is not the package of {DISTRIBUTION}" in done.stderr
    assert "Traceback" not in done.stderr
