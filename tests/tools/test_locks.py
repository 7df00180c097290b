"""The locks have what pyproject.toml asks for, with hashes; no index is asked.

Not responsible for: whether uv would choose these versions today (`make locks`), nor for an installation.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gpu_engine.model.embedded import PACKAGE
from tools import locks

NOT_LOCKED = {"torch", "lockstep-client", "lockstep-engine"}


@dataclass(frozen=True)
class Pin:
    """One entry of a lock."""

    requirement: Requirement
    hashes: tuple[str, ...]

    @property
    def version(self) -> str:
        (specifier,) = self.requirement.specifier
        assert specifier.operator == "=="
        return specifier.version


def pins(path: Path) -> list[Pin]:
    """Return the entries of the lock at `path`."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    entries = "\n".join(lines).replace("\\\n", " ").splitlines()
    split = [entry.split(" --hash=") for entry in entries]
    return [Pin(Requirement(wanted.strip()), tuple(part.strip() for part in hashes)) for wanted, *hashes in split]


def asked(root: Path, extras: tuple[str, ...]) -> list[Requirement]:
    """Return what pyproject.toml asks for with these extras, extras of the project itself followed."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = [Requirement(line) for line in project["dependencies"]]
    waiting = list(extras)
    while waiting:
        for line in project["optional-dependencies"][waiting.pop()]:
            requirement = Requirement(line)
            if requirement.name == "lockstep-engine":
                waiting.extend(requirement.extras)
            else:
                found.append(requirement)
    return found


@pytest.mark.parametrize("name", locks.LOCKS)
def test_a_lock_has_a_fitting_version_of_everything_that_its_extras_ask_for(root: Path, name: str) -> None:
    versions: dict[str, list[str]] = {}
    for pin in pins(locks.folder(root) / f"{name}.txt"):
        versions.setdefault(canonicalize_name(pin.requirement.name), []).append(pin.version)
    for requirement in asked(root, locks.LOCKS[name]):
        if requirement.name in NOT_LOCKED:
            continue
        found = versions.get(canonicalize_name(requirement.name), [])
        assert found, f"{requirement} is not in locks/{name}.txt: run `make locks`"
        assert all(requirement.specifier.contains(version) for version in found), (
            f"{requirement}: {found}, run `make locks`"
        )


def test_every_entry_has_hashes_and_one_version_for_each_python(root: Path) -> None:
    files = sorted(locks.folder(root).glob("*.txt"))
    assert {path.stem for path in files} == {*locks.LOCKS, "torch", "cuda", "embedded"}
    for path in files:
        entries = pins(path)
        assert entries
        marked = [(canonicalize_name(pin.requirement.name), str(pin.requirement.marker)) for pin in entries]
        assert len(set(marked)) == len(marked), path.name
        for pin in entries:
            assert all(part.startswith("sha256:") and len(part) == 71 for part in pin.hashes), pin
            assert pin.hashes or path.stem == "torch", f"{pin.requirement} of {path.name} has no hash"


def test_a_package_has_one_version_in_all_locks(root: Path) -> None:
    every = [pins(locks.folder(root) / f"{name}.txt") for name in locks.LOCKS]
    versions: dict[tuple[str, str], set[str]] = {}
    for pin in (pin for entries in every for pin in entries):
        versions.setdefault((pin.requirement.name, str(pin.requirement.marker)), set()).add(pin.version)
    assert {key: found for key, found in versions.items() if len(found) > 1} == {}


@pytest.mark.parametrize(
    ("name", "others"),
    [("triton", ["dev", "grammar-xgrammar"]), ("nvidia-cuda-nvrtc", ["dev"]), ("cuda-bindings", ["dev"])],
)
def test_the_tests_and_the_image_have_one_version_of_each_compiler(root: Path, name: str, others: list[str]) -> None:
    """The interpreter and the compilations of the tests say nothing about another version's kernels."""
    versions = {
        stem: {pin.version for pin in pins(locks.folder(root) / f"{stem}.txt") if pin.requirement.name == name}
        for stem in ("cuda", *others)
    }
    assert len(versions["cuda"]) == 1
    assert all(versions[stem] == versions["cuda"] for stem in others)


def test_torch_and_the_embedded_model_are_pinned_to_what_the_project_takes(root: Path) -> None:
    (torch,) = pins(locks.folder(root) / "torch.txt")
    assert torch.version == locks.TORCH
    wanted = [requirement for requirement in asked(root, ("engine", "xgrammar")) if requirement.name == "torch"]
    assert wanted
    assert all(requirement.specifier.contains(torch.version) for requirement in wanted)
    assert {"torch"} < {pin.requirement.name for pin in pins(locks.folder(root) / "cuda.txt")}
    (model,) = pins(locks.folder(root) / "embedded.txt")
    assert str(model.requirement) == PACKAGE == locks.EMBEDDED_MODEL


def test_images_install_what_is_locked_and_list_it(root: Path) -> None:
    text = (root / "Dockerfile").read_text(encoding="utf-8")
    assert 'LOCKED_INSTALL="install --no-deps --require-hashes --only-binary :all:"' in text
    builds = text.count("AS build-")
    assert builds == text.count("--output-file /opt/lockstep/sbom.cdx.json") == 3
    # LOCKED=off takes the extras of pyproject.toml.
    for name, extras in (("engine", "engine,embedded,http,receipts,vllm-wire"), ("gateway", "http")):
        assert tuple(extras.split(",")) == locks.LOCKS[name]
        assert f"[{extras}]" in text
        assert f"locks/{name}.txt" in text
    installs = [line for line in text.splitlines() if "pip install" in line]
    for line in installs:
        assert "--no-index" in line or "LOCKED" in line or "locks/${TORCH}.txt" in line, line
