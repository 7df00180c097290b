"""The rules of the house that a machine can check: imports, rooms, generated code.

A failure here is a question about the design, not about one line.
Not responsible for: the behaviour of any module.
"""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from transformers.utils import import_utils

import lockstep_bench
from tools import client_twins, client_wire

SOURCE_FOLDERS = (
    "gpu_engine",
    "grammar_service",
    "http_gateway",
    "kernels",
    "lockstep_grammar",
    "service_runtime",
    "shared_mem",
)
CLIENT = "client/lockstep_client"
"""A distribution of its own, with import contracts of its own."""
SERVICES = ("gpu_engine", "grammar_service", "http_gateway")
PROTO_FILES = ("engine/v1/engine", "grammar/v1/grammar", "kserve/v2/inference", "transfer/v1/transfer")
GENERATED_SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")

LAZY_IMPORTS = {
    "usage, versions and wrong flags are printed without loading torch or gRPC": {
        ("gpu_engine.__main__", "gpu_engine.cli"),
        ("gpu_engine.cli.commands", "gpu_engine"),
        ("grammar_service.__main__", "grammar_service"),
        ("grammar_service.__main__", "shared_mem.errors"),
        ("http_gateway.__main__", "http_gateway.http"),
    },
    "the terminal shows progress before torch is loaded": {
        ("gpu_engine.server", "gpu_engine.core.engine"),
        ("gpu_engine.server", "gpu_engine.model.hub"),
        ("gpu_engine.server", "gpu_engine.model.loader"),
        ("gpu_engine.server", "gpu_engine.model.without_compiler"),
    },
    "Triton and CUDA's driver are loaded where a model runs on a GPU": {
        ("gpu_engine.core.build_executor", "gpu_engine.core.device_executor"),
        ("gpu_engine.model.linear", "kernels.cuda"),
        ("gpu_engine.model.loader", "kernels.cuda.low_rank"),
        ("gpu_engine.model.quantised.scaled", "kernels.cuda.scaled"),
        ("gpu_engine.model.states", "kernels.cuda.recurrent"),
        ("gpu_engine.step", "kernels.cuda"),
        ("kernels.accept", "kernels.cuda.accept"),
        ("kernels.fused", "kernels.cuda.fused"),
        ("kernels.paged_attention", "kernels.cuda.attention.paged"),
    },
    "a rank sends its first heartbeat before it imports torch": {
        ("gpu_engine.model.parallel.worker", "gpu_engine.model"),
    },
    "an extension is opened before torch is loaded": {
        ("gpu_engine.extensions.transfer.extension", "gpu_engine.extensions.transfer.pages"),
    },
    "the GGUF library is loaded for GGUF files": {
        ("gpu_engine.model.files.reading", "gpu_engine.model.files.gguf_configs"),
        ("gpu_engine.model.files.early", "gpu_engine.model.files.gguf_header"),
        ("gpu_engine.model.files.reading", "gpu_engine.model.files.gguf_header"),
        ("gpu_engine.model.files.reading", "gpu_engine.model.files.gguf_weights"),
        ("gpu_engine.model.quantised.choice", "gpu_engine.model.quantised.gguf_blocks"),
    },
    "vLLM's messages are a package of their own extra": {
        ("gpu_engine.doors.vllm_wire.door", "gpu_engine.doors.vllm_wire.vllm_servicer"),
    },
    "KServe's messages have the names of Triton's, which a process may have already": {
        ("gpu_engine.doors.kserve.door", "gpu_engine.doors.kserve.inference_servicer"),
    },
    "a backend's library is loaded where that backend is configured": {
        ("grammar_service.backends.registry", "grammar_service.backends"),
    },
}
"""Reason -> (importer, imported), each a module or a room: our imports that a function runs when it is called."""

EXTRAS_OF_DEVELOPERS = {"bench", "clients", "dev", "docs", "fuzz", "ray", "supply"}
"""The other extras are for servers. `ray` is for another server's process, which starts this one."""

NAMES_THAT_SAY_NOTHING = {"common", "helper", "helpers", "manager", "managers", "misc", "util", "utils"}


def _sources(root: Path, *suffixes: str) -> list[Path]:
    """Every hand-written file of our packages with one of `suffixes`."""
    return [
        path
        for folder in (*SOURCE_FOLDERS, CLIENT)
        for path in sorted((root / folder).rglob("*"))
        if path.suffix in suffixes and not path.name.endswith(GENERATED_SUFFIXES)
    ]


def _module_name(root: Path, path: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__").removeprefix("client.")


@cache
def _modules(root: Path) -> dict[str, ast.Module]:
    """Every hand-written module by its dotted name, parsed."""
    return {_module_name(root, path): ast.parse(path.read_text()) for path in _sources(root, ".py")}


def _imports(tree: ast.AST, modules: dict[str, ast.Module]) -> set[str]:
    """Our modules that are imported anywhere in `tree`, by functions too."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in members if name in modules} or {node.module}
    return {name for name in found if name in modules}


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _within(name: str, room: str) -> bool:
    return name == room or name.startswith(f"{room}.")


def _contracts(root: Path) -> list[dict[str, Any]]:
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    contracts: list[dict[str, Any]] = settings["tool"]["importlinter"]["contracts"]
    return contracts


@pytest.mark.slow
@pytest.mark.parametrize("folder", [".", "client", "specgrammarbench"])
def test_import_contracts_hold(root: Path, folder: str) -> None:
    """`make test` checks the same contracts before the tests (`make imports`)."""
    # In its own process: it sets logging up, which silences every logger that is there.
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]
    command += ["--config", "pyproject.toml"]
    done = subprocess.run(command, cwd=root / folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_no_modules_import_each_other_in_a_cycle(root: Path) -> None:
    """Imports of functions count: they hide a cycle from Python, not from a reader."""
    modules = _modules(root)
    imports = {name: _imports(tree, modules) - {name} for name, tree in modules.items()}
    assert not [name for name in imports if name in _reachable(name, imports)]


def _reachable(start: str, imports: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = imports[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def test_every_lazy_import_has_a_reason(root: Path) -> None:
    modules = _modules(root)
    found = {
        (importer, imported)
        for importer, tree in modules.items()
        for function in _functions(tree)
        for imported in _imports(function, modules)
    }
    known = set().union(*LAZY_IMPORTS.values())
    matches = {
        pair: [
            (importer, imported)
            for importer, imported in found
            if _within(importer, pair[0]) and _within(imported, pair[1])
        ]
        for pair in known
    }
    assert found - set().union(*matches.values()) == set(), "import it at the top of the module, or say why not"
    assert [pair for pair, uses in matches.items() if not uses] == []


def test_layers_stand_inside_both_services_without_exceptions(root: Path) -> None:
    layers = [contract for contract in _contracts(root) if contract["type"] == "layers"]
    for service in SERVICES:
        rooms = {path.parent.name for path in (root / service).glob("*/__init__.py")}
        inside = [contract for contract in layers if contract.get("containers") == [service]]
        named = {name.strip(" ()") for contract in inside for layer in contract["layers"] for name in layer.split("|")}
        assert named >= rooms, f"{service}: {sorted(rooms - named)} in no layer"
    assert not [contract["id"] for contract in layers if contract.get("ignore_imports")]


def test_import_contracts_cover_every_package(root: Path) -> None:
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]
    packages = {pattern.removesuffix("*") for pattern in settings["setuptools"]["packages"]["find"]["include"]}
    # `tools` is in no distribution; a contract says that no server imports it.
    assert set(settings["importlinter"]["root_packages"]) == {*packages, "tools"}
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
        pytest.param(
            "gpu_engine",
            (
                "gpu_engine.model.files.gguf_configs",
                "gpu_engine.model.files.gguf_dense",
                "gpu_engine.model.files.gguf_header",
                "gpu_engine.model.files.gguf_mixtures",
                "gpu_engine.model.files.gguf_values",
                "gpu_engine.model.files.gguf_weights",
                "gpu_engine.model.quantised.gguf_blocks",
                "gpu_engine.model.quantised.gguf_kinds",
            ),
            ("gguf",),
            marks=pytest.mark.slow,
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
    protos = [f"protos/{name}.proto" for name in PROTO_FILES]
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    outputs += [f"--mypy_grpc_out=quiet:{tmp_path}", f"--plugin=protoc-gen-mypy_grpc={plugin}"]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *protos]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    for name in PROTO_FILES:
        for suffix in GENERATED_SUFFIXES:
            path = Path(f"protos/{name}{suffix}")
            assert (root / path).read_bytes() == (tmp_path / path).read_bytes(), f"{path}: run `make protos`"


def test_the_client_has_the_messages_of_the_engine() -> None:
    differing = [path for path, text in client_wire.files().items() if path.read_text(encoding="utf-8") != text]
    assert differing == [], "run `make protos`, or `python -m tools.client_wire --write`"


def test_the_synchronous_client_is_generated_from_the_asynchronous_one() -> None:
    differing = [path for path, text in client_twins.files().items() if path.read_text(encoding="utf-8") != text]
    assert differing == [], "run `python -m tools.client_twins --write`"


def test_the_extra_all_has_every_extra_of_a_server(root: Path) -> None:
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (requirement,) = extras["all"]
    assert Requirement(requirement).extras == set(extras) - {"all", *EXTRAS_OF_DEVELOPERS}


def test_every_distribution_has_the_version_of_the_engine(root: Path) -> None:
    versions = {
        tomllib.loads((root / folder / "pyproject.toml").read_text())["project"]["version"]
        for folder in (".", "client", "specgrammarbench")
    }
    assert versions == {lockstep_bench.VERSION}


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


def test_a_room_says_what_it_is_for(root: Path) -> None:
    inits = [path for folder in (*SOURCE_FOLDERS, CLIENT) for path in (root / folder).rglob("__init__.py")]
    assert not [str(path.relative_to(root)) for path in inits if not ast.get_docstring(ast.parse(path.read_text()))]


def test_every_folder_with_modules_is_a_package(root: Path) -> None:
    """An editable install finds a folder without __init__.py, a wheel leaves it out."""
    assert not [path for path in _sources(root, ".py") if not (path.parent / "__init__.py").exists()]


def test_module_names_say_what_they_hold(root: Path) -> None:
    assert not [path for path in _sources(root, ".py") if path.stem in NAMES_THAT_SAY_NOTHING]


def test_code_is_ascii(root: Path) -> None:
    files = _sources(root, ".py", ".pyi", ".c", ".cpp", ".cu", ".h")
    assert not [path for path in files if not path.read_bytes().isascii()]


def test_no_test_module_imports_another(root: Path) -> None:
    """What several test modules use is in a module that is no test, or a fixture."""
    found = [
        f"{path.relative_to(root)}: {node.module}"
        for path in (root / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").rpartition(".")[2].startswith("test_")
    ]
    assert found == []


def test_tests_use_seams_not_patches(root: Path) -> None:
    """A patched test passes when the code it patches is gone; a fake at a seam does not."""
    banned = ("unittest.mock", "mocker.patch", "monkeypatch.setattr")
    files = [path for path in (root / "tests").rglob("*.py") if path != Path(__file__)]
    assert not [path for path in files if any(word in path.read_text() for word in banned)]
