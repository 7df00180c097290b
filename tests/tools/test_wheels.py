"""The wheels that `make wheels` builds: what is in them, where they run, and that two builds are equal.

Not responsible for: an installation from an index, nor the other machine's wheel (both need what a test machine may
lack).
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SUPPLY = Path(f"{sys.prefix}-supply/bin/python")
"""The environment of `make wheels`, which has auditwheel and cyclonedx-py; `make test-slow` makes it, too."""
PACKAGES = (
    "gpu_engine", "grammar_service", "http_gateway", "kernels",
    "lockstep_grammar", "protos", "service_runtime", "shared_mem",
)  # fmt: skip
DATA = (".cu", ".html", ".proto", ".py", ".pyi", ".typed")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SUPPLY.exists(), reason=f"needs {SUPPLY}: make test-slow makes it"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc"),
]


def built(root: Path, folder: Path, umask: int) -> dict[str, Path]:
    """Build the wheels of this machine and of the client; return them by the name of the distribution."""
    command = [str(SUPPLY), "-m", "tools.wheels", "--only", platform.machine(), "client", "--out", str(folder)]
    done = subprocess.run(command, cwd=root, umask=umask, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {wheel.name.split("-")[0]: wheel for wheel in folder.glob("*.whl")}


@pytest.fixture(scope="module")
def wheels(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return built(root, tmp_path_factory.mktemp("wheels"), 0o022)


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def metadata(wheel: Path, name: str) -> str:
    (found,) = (content for path, content in contents(wheel).items() if path.endswith(f".dist-info/{name}"))
    return found.decode()


def test_a_second_build_has_the_same_bytes(root: Path, wheels: dict[str, Path], tmp_path: Path) -> None:
    again = built(root, tmp_path, 0o077)
    assert again.keys() == wheels.keys() == {"lockstep_engine", "lockstep_client"}
    assert [name for name in again if again[name].read_bytes() != wheels[name].read_bytes()] == []


def test_the_server_s_wheel_has_every_package_and_nothing_else(root: Path, wheels: dict[str, Path]) -> None:
    wheel = wheels["lockstep_engine"]
    tag = f"cp311-abi3-manylinux_2_28_{platform.machine()}"
    assert wheel.name.endswith(f"-{tag}.whl")
    assert f"Tag: {tag}\n" in metadata(wheel, "WHEEL")
    listed = subprocess.run(["git", "ls-files", *PACKAGES], cwd=root, capture_output=True, text=True, check=True)
    sources = {name for name in listed.stdout.splitlines() if name.endswith(DATA)}
    files = {name for name in contents(wheel) if ".dist-info/" not in name}
    assert files == sources | {"kernels/_native.abi3.so", "shared_mem/_flags.abi3.so"}


@pytest.mark.parametrize("name", ["lockstep_engine", "lockstep_client"])
def test_record_lists_every_file_with_its_hash(wheels: dict[str, Path], name: str) -> None:
    recorded = [line.rsplit(",", 2) for line in metadata(wheels[name], "RECORD").splitlines()]
    files = contents(wheels[name])
    assert [path for path, _, _ in recorded] == list(files)
    for path, digest, size in recorded[:-1]:
        expected = base64.urlsafe_b64encode(hashlib.sha256(files[path]).digest()).rstrip(b"=").decode()
        assert (digest, int(size)) == (f"sha256={expected}", len(files[path]))


@pytest.mark.parametrize("name", ["lockstep_engine", "lockstep_client"])
def test_the_bill_of_materials_has_the_libraries_and_what_is_needed(wheels: dict[str, Path], name: str) -> None:
    files = contents(wheels[name])
    (bom,) = (json.loads(content) for path, content in files.items() if ".dist-info/sboms/" in path)
    about = Parser().parsestr(metadata(wheels[name], "METADATA"))
    root = bom["metadata"]["component"]
    assert (root["name"], root["version"]) == (about["Name"], about["Version"])
    hashes = {each["name"]: each["hashes"][0]["content"] for each in bom["components"] if each["type"] == "file"}
    assert hashes == {
        path: hashlib.sha256(content).hexdigest() for path, content in files.items() if path.endswith(".so")
    }
    needed = {Requirement(line) for line in about.get_all("Requires-Dist") or () if "extra ==" not in line}
    names = {canonicalize_name(requirement.name) for requirement in needed} - {"lockstep-client"}
    assert names < {canonicalize_name(each["name"]) for each in bom["components"]} | {"lockstep-client"}
    assert set(bom["dependencies"][0]["dependsOn"]) == {each["bom-ref"] for each in bom["components"]}


def test_a_library_that_needs_a_newer_glibc_is_found(root: Path, wheels: dict[str, Path], tmp_path: Path) -> None:
    source, library = tmp_path / "new.c", tmp_path / "new.so"
    # fcntl64 is newer than 2.17, and pthread_create got its newest version in 2.34.
    source.write_text("#include <pthread.h>\nvoid *f = (void *)pthread_create;\n")
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    symbols = subprocess.run(["objdump", "-T", str(library)], capture_output=True, text=True, check=True).stdout
    if "GLIBC_2.34" not in symbols:
        pytest.skip("needs a glibc that is newer than 2.33")
    changed = tmp_path / wheels["lockstep_engine"].name
    with zipfile.ZipFile(changed, "w") as archive:
        for name, content in contents(wheels["lockstep_engine"]).items():
            archive.writestr(name, library.read_bytes() if name == "kernels/_native.abi3.so" else content)
    program = f"from pathlib import Path; from tools.wheels import audit; audit(Path({str(changed)!r}))"
    done = subprocess.run([str(SUPPLY), "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert "is not a wheel for glibc 2.28" in done.stderr
    assert "GLIBC_2.34" in done.stderr


@pytest.mark.model
def test_the_wheels_serve_without_a_checkout_and_a_compiler(wheels: dict[str, Path], tmp_path: Path) -> None:
    site = tmp_path / "site"
    for wheel in wheels.values():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    program = """
import gpu_engine, json, lockstep_client, os
schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
with lockstep_client.Client.embedded(model="embedded") as client:
    answer = client.chat("One or two?", schema=schema, max_tokens=30, temperature=0)
print(json.dumps([gpu_engine.__file__, lockstep_client.__file__, answer.parsed]))
"""
    environment = {**os.environ, "PYTHONPATH": str(site), "PATH": ""}
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    engine, client, parsed = json.loads(done.stdout.splitlines()[-1])
    assert Path(engine).is_relative_to(site)
    assert Path(client).is_relative_to(site)
    assert parsed["n"] in (1, 2)
