"""The rules of the house that a machine can check: who imports whom, what is generated, how long a file may be.

A failure here is a question about the design, not about a line. Not here: what any module does.
"""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.version import Version
from transformers.utils import import_utils

SOURCE_FOLDERS = ("gpu_engine", "grammar_service", "service_runtime", "shared_mem", "kernels")
PROTO_NAMES = ("engine", "grammar")
GENERATED_SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")

MAX_LINES = 300
LONGER_ON_PURPOSE = {
    # All ordering between the two processes is in this one file, so that it can be read against itself.
    "shared_mem/native/flags.c": 430,
    # One rule: mask, penalties, filters, noise and acceptance of a position share its row in cache.
    "kernels/native/accept.h": 400,
    # The picture of every byte and the numbers that draw it.
    "shared_mem/layout.py": 320,
}
"""Path -> the length it may have."""

NAMES_THAT_SAY_NOTHING = {"common", "helper", "helpers", "manager", "managers", "misc", "util", "utils"}


def _sources(root: Path, *suffixes: str) -> list[Path]:
    """Every hand-written file of the four packages with one of `suffixes`."""
    return [
        path
        for folder in SOURCE_FOLDERS
        for path in sorted((root / folder).rglob("*"))
        if path.suffix in suffixes and not path.name.endswith(GENERATED_SUFFIXES)
    ]


def test_import_contracts_hold(root: Path) -> None:
    # In a process of its own: it sets logging up, which silences every logger that is there.
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_import_contracts_cover_every_package(root: Path) -> None:
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]
    packages = {pattern.removesuffix("*") for pattern in settings["setuptools"]["packages"]["find"]["include"]}
    assert set(settings["importlinter"]["root_packages"]) == packages
    assert packages == {*SOURCE_FOLDERS, "protos"}


@pytest.mark.parametrize(
    ("folder", "excepted", "forbidden"),
    [
        ("shared_mem", (), ("torch", "transformers", "grpc", "asyncio")),
        (
            "grammar_service",
            ("grammar_service.backends.xgrammar.backend", "grammar_service.backends.xgrammar.chains"),
            ("torch", "transformers", "xgrammar"),
        ),
    ],
)
def test_importing_a_whole_package_leaves_heavy_modules_out(
    root: Path, folder: str, excepted: tuple[str, ...], forbidden: tuple[str, ...]
) -> None:
    """Import contracts see our files only; this sees what third parties load on our behalf."""
    names = [".".join(path.relative_to(root).with_suffix("").parts) for path in _sources(root, ".py")]
    names = [
        name.removesuffix(".__init__")
        for name in names
        if name.split(".")[0] == folder and name not in excepted and not name.endswith("__main__")
    ]
    assert names
    program = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"print(*sorted(set({forbidden!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_generated_code_is_what_the_protos_say(root: Path, tmp_path: Path) -> None:
    pins = _pinned_generators(root)
    installed = {name: importlib.metadata.version(name) for name in pins}
    if installed != pins:
        pytest.skip(f"generated with {pins}, installed are {installed}")
    plugin = Path(sys.executable).parent / "protoc-gen-mypy_grpc"
    protos = [f"protos/{name}/v1/{name}.proto" for name in PROTO_NAMES]
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    outputs += [f"--mypy_grpc_out=quiet:{tmp_path}", f"--plugin=protoc-gen-mypy_grpc={plugin}"]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *protos]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    for name in PROTO_NAMES:
        for suffix in GENERATED_SUFFIXES:
            path = Path(f"protos/{name}/v1/{name}{suffix}")
            assert (root / path).read_bytes() == (tmp_path / path).read_bytes(), f"{path}: run `make protos`"


def _pinned_generators(root: Path) -> dict[str, str]:
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]
    pins = dict(line.split("==") for line in extras if "==" in line and ";" not in line)
    return {name: pins[name] for name in ("grpcio-tools", "mypy-protobuf")}


def test_transformers_does_not_take_our_kernels_for_the_hub_package() -> None:
    """A package named `kernels` that looks new enough would send transformers' model loading to a hub of kernels."""
    assert not import_utils.is_kernels_available()


def test_our_version_is_below_any_hub_kernels_that_transformers_takes(root: Path) -> None:
    """transformers asks the distribution that carries `kernels` for its version, and that distribution is ours.

    Its oldest accepted hub version has only risen: 0.9 in 5.0, 0.16 in 5.17.
    """
    ours = Version(tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"])
    assert ours < Version("0.9")
    assert ours < Version(import_utils.KERNELS_MIN_VERSION)


def test_kernels_package_imports_nothing_by_itself(root: Path) -> None:
    """transformers may import `kernels` only to look at it; that must cost nothing and load nothing."""
    tree = ast.parse((root / "kernels/__init__.py").read_text())
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def test_source_files_can_be_held_in_mind(root: Path) -> None:
    too_long = {}
    for path in _sources(root, ".py", ".c", ".cpp", ".cu", ".h"):
        name, lines = str(path.relative_to(root)), len(path.read_text().splitlines())
        if lines > LONGER_ON_PURPOSE.get(name, MAX_LINES):
            too_long[name] = lines
    assert not too_long


def test_every_folder_with_modules_is_a_package(root: Path) -> None:
    """An editable install finds a folder without __init__.py, a wheel leaves it out."""
    assert not [path for path in _sources(root, ".py") if not (path.parent / "__init__.py").exists()]


def test_module_names_say_what_they_hold(root: Path) -> None:
    assert not [path for path in _sources(root, ".py") if path.stem in NAMES_THAT_SAY_NOTHING]


def test_code_is_ascii(root: Path) -> None:
    files = _sources(root, ".py", ".pyi", ".c", ".cpp", ".cu", ".h")
    assert not [path for path in files if not path.read_bytes().isascii()]


def test_tests_use_seams_not_patches(root: Path) -> None:
    """A patched test passes when the code it patches is gone; a fake behind a seam does not."""
    banned = ("unittest.mock", "mocker.patch", "monkeypatch.setattr")
    files = [path for path in (root / "tests").rglob("*.py") if path != Path(__file__)]
    assert not [path for path in files if any(word in path.read_text() for word in banned)]


def test_readme_has_a_line_for_every_module(root: Path) -> None:
    readme = (root / "README.md").read_text()
    files = [path for path in _sources(root, ".py", ".c", ".cpp", ".cu") if path.name != "__init__.py"]
    assert not [str(path.relative_to(root)) for path in files if path.name not in readme]
