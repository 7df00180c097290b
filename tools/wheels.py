"""Builds the wheels of the server and of the client in `dist/`: `python -m tools.wheels`; `make wheels` runs it.

The server's wheels are for glibc 2.28 and newer (manylinux_2_28), x86-64 and aarch64, and for every Python from 3.11 on
(abi3). No container is needed: gcc of a newer system binds the few functions that glibc has renewed since 2.28 to their
old versions, which every glibc still has, and auditwheel checks the result. The other machine's wheel needs Debian's
cross compiler (`gcc-aarch64-linux-gnu`).

Each wheel lists itself, its native libraries and the locked versions of what it depends on as CycloneDX, in
`.dist-info/sboms/` (PEP 770).

The invariant: the same commit, Python, gcc and zlib give the same bytes. Times are the commit's, entries are sorted,
and only files that git knows go in.

Not responsible for: which files belong to a package (pyproject.toml), the flags of the compiler (setup.py), nor
publishing (see release.py).
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GLIBC = (2, 28)
ARCHITECTURES = ("x86_64", "aarch64")
OLD_VERSIONS = {
    "x86_64": {
        "pthread_create": "GLIBC_2.2.5",
        "pthread_mutex_trylock": "GLIBC_2.2.5",
        "pthread_setname_np": "GLIBC_2.12",
        "pthread_sigmask": "GLIBC_2.2.5",
    },
    "aarch64": {
        "pthread_create": "GLIBC_2.17",
        "pthread_mutex_trylock": "GLIBC_2.17",
        "pthread_setname_np": "GLIBC_2.17",
        "pthread_sigmask": "GLIBC_2.17",
    },
}
"""The version of a function to bind to, for each function that got a newer version after glibc 2.28."""
CLIENT_NEEDS = frozenset({"grpcio", "protobuf", "typing-extensions"})
LEFT_OUT = ("benchmarks", "deploy", "docs", "examples", "samples", "tests")
"""Folders of the checkout that are in no wheel."""
_BUILD = """
import sys
from setuptools import build_meta
build_meta.build_wheel(sys.argv[1], {"--build-option": sys.argv[2:]})
"""


class WheelError(Exception):
    """A wheel cannot be built here, or is not what it says."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C compiler for one machine."""

    command: str
    machine: str
    """As in a wheel's tag, such as "x86_64"."""

    def version(self) -> str:
        """Return its first line of `--version`."""
        done = subprocess.run([self.command, "--version"], capture_output=True, text=True, check=True)
        return done.stdout.splitlines()[0]


def find_compiler(machine: str) -> Compiler:
    """Return gcc for `machine`; raise WheelError, with the package that has it, where it is not installed."""
    own = ["gcc"] if machine == platform.machine() else []
    for command in (f"{machine}-linux-gnu-gcc", *own):
        if shutil.which(command):
            return Compiler(command, machine)
    package = f"gcc-{machine.replace('_', '-')}-linux-gnu"
    raise WheelError(f"no gcc for {machine}: apt-get install {package}, or leave {machine} out with --only")


def commit_time(root: Path) -> int:
    """Return the time of the checkout's last commit, in seconds since 1970."""
    done = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=root, capture_output=True, text=True, check=True)
    return int(done.stdout)


def copy_sources(root: Path, folder: Path) -> None:
    """Copy the files of the checkout `root` that git knows to `folder`, as they are in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        source = root / name
        if name.split("/")[0] not in LEFT_OUT and source.is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, folder / name)


def build(sources: Path, folder: Path, epoch: int, compiler: Compiler | None) -> Path:
    """Build the wheel of the project in `sources` and return its path in the new `folder`.

    Args:
        epoch: time of all entries, in seconds since 1970.
        compiler: for native code; None: the project has none.

    Raises CalledProcessError below what the build printed.
    """
    folder.mkdir()
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}
    options: list[str] = []
    if compiler is not None:
        header = sources / "old_glibc.h"
        directives = OLD_VERSIONS[compiler.machine].items()
        header.write_text("".join(f'__asm__(".symver {name}, {name}@{of}");\n' for name, of in directives))
        environment |= {
            "CC": compiler.command,
            "CFLAGS": f"-g0 -ffile-prefix-map={sources}=. -include {header}",
            "LDFLAGS": "-Wl,--strip-all",
            "_PYTHON_HOST_PLATFORM": f"linux-{compiler.machine}",
        }
        options = ["--plat-name", f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{compiler.machine}"]
    command = [sys.executable, "-c", _BUILD, str(folder), *options]
    done = subprocess.run(command, cwd=sources, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise WheelError(f"the build failed:\n{done.stdout}{done.stderr}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def locked(root: Path, names: frozenset[str] | None) -> str:
    """Return the locked requirements of the server, or of the distributions `names`, one a line with its hashes."""
    text = "".join((root / "locks" / f"{lock}.txt").read_text(encoding="utf-8") for lock in ("runtime", "torch"))
    entries = re.sub(r"\\\n\s*", "", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    return "".join(f"{line}\n" for line in entries if names is None or line.partition("==")[0] in names)


def bill_of_materials(project: Path, requirements: str, libraries: dict[str, bytes], compiler: Compiler | None) -> str:
    """Return the components of a wheel as CycloneDX 1.6, in JSON.

    Args:
        project: its pyproject.toml.
        requirements: what it depends on, in pip's format with hashes.
        libraries: path and content of each native library in the wheel.
        compiler: what compiled them.
    """
    command = [
        *(sys.executable, "-W", "ignore", "-m", "cyclonedx_py", "requirements", "--output-reproducible"),
        *("--mc-type", "library", "--pyproject", str(project), "-"),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    done = subprocess.run(command, input=requirements, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise WheelError(f"cyclonedx-py: {done.stderr}")
    bom: dict[str, Any] = json.loads(done.stdout)
    for component in bom["components"]:
        # The tool's copy of the requirement's line.
        del component["description"]
        renamed = component["purl"]
        for other in bom["dependencies"]:
            other["ref"] = renamed if other["ref"] == component["bom-ref"] else other["ref"]
        component["bom-ref"] = renamed
    needs = sorted(component["bom-ref"] for component in bom["components"])
    for path, content in sorted(libraries.items()):
        assert compiler is not None
        bom["components"].append(
            {
                "type": "file",
                "bom-ref": path,
                "name": path,
                "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(content).hexdigest()}],
                "properties": [{"name": "lockstep:compiler", "value": compiler.version()}],
            }
        )
    component = bom["metadata"]["component"]
    component["purl"] = f"pkg:pypi/{component['name']}@{component['version']}"
    root = component["bom-ref"]
    bom["dependencies"] = [
        *({"ref": root, "dependsOn": sorted([*needs, *libraries])},),
        *({"ref": ref} for ref in sorted([*needs, *libraries])),
    ]
    return json.dumps(bom, indent=1, sort_keys=True) + "\n"


def seal(wheel: Path, target: Path, epoch: int, bom: str) -> None:
    """Write `wheel` to `target` with its SBOM, its entries sorted and dated, and a new RECORD."""
    with zipfile.ZipFile(wheel) as archive:
        entries = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    (record,) = (name for name in entries if name.endswith(".dist-info/RECORD"))
    info = PurePosixPath(record).parent
    del entries[record]
    distribution = info.name.split("-")[0].replace("_", "-")
    entries[f"{info}/sboms/{distribution}.cdx.json"] = bom.encode()
    # Metadata comes last in a wheel, and RECORD is the last of it.
    names = sorted(entries, key=lambda name: (name.startswith(f"{info}/"), name))
    lines = [f"{name},sha256={_record_hash(entries[name])},{len(entries[name])}\n" for name in names]
    entries[record] = "".join([*lines, f"{record},,\n"]).encode()
    date = time.gmtime(epoch)[:6]
    with zipfile.ZipFile(target, "w") as archive:
        for name in [*names, record]:
            entry = zipfile.ZipInfo(name, date)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3  # Unix, on which the next line counts
            entry.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            archive.writestr(entry, entries[name], compresslevel=9)


def _record_hash(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def audit(wheel: Path) -> None:
    """Check with auditwheel that a server's wheel runs where its tag says; raise WheelError with what it needs."""
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    shown = " ".join(done.stdout.split())
    found = re.search(r'the following platform tag: "manylinux_(\d+)_(\d+)_', shown)
    if done.returncode != 0 or found is None or (int(found[1]), int(found[2])) > GLIBC:
        raise WheelError(f"{wheel.name} is not a wheel for glibc {GLIBC[0]}.{GLIBC[1]}:\n{done.stdout}{done.stderr}")


def make(root: Path, target: Path, what: str) -> Path:
    """Build, seal and check one wheel of the checkout `root`; return its path in the folder `target`.

    Args:
        what: one of ARCHITECTURES, or "client".
    """
    epoch = commit_time(root)
    compiler = None if what == "client" else find_compiler(what)
    with tempfile.TemporaryDirectory(prefix="lockstep-wheel-") as scratch:
        sources = Path(scratch, "sources")
        copy_sources(root, sources)
        project = sources / "client" if what == "client" else sources
        wheel = build(project, Path(scratch, "built"), epoch, compiler)
        with zipfile.ZipFile(wheel) as archive:
            libraries = {name: archive.read(name) for name in archive.namelist() if name.endswith(".so")}
        requirements = locked(root, CLIENT_NEEDS if what == "client" else None)
        bom = bill_of_materials(project / "pyproject.toml", requirements, libraries, compiler)
        target.mkdir(parents=True, exist_ok=True)
        sealed = target / wheel.name
        seal(wheel, sealed, epoch, bom)
    if compiler is not None:
        audit(sealed)
    return sealed


def version(root: Path) -> str:
    """Return the version in pyproject.toml."""
    return str(tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def main() -> int:
    """Build the wheels and print the hash, size and name of each."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.wheels",
        description="Build the wheels of server and client, with their SBOMs. Needs the extra `supply` and gcc.",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheels (default: dist)")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=(*ARCHITECTURES, "client"),
        default=[*ARCHITECTURES, "client"],
        help="what to build",
    )
    options = parser.parse_args()
    for what in options.only:
        try:
            wheel = make(ROOT, options.out, what)
        except WheelError as error:
            print(f"{what}: {error}", file=sys.stderr)
            return 1
        content = wheel.read_bytes()
        print(f"{hashlib.sha256(content).hexdigest()}  {len(content) / 1e6:5.2f} MB  {wheel.name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
