"""Builds the wheel of `lockstep-grammar`: `python -m tools.grammar_wheel dist`.

The distribution has the same sources as `lockstep-engine`, without the engine. They are copied to a folder with
grammar_wheel.toml as its pyproject.toml, and built there. An environment with lockstep-engine has these packages, so
the two are not installed together. Not responsible for: the other wheels (see wheels.py).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("grammar_service", "lockstep_grammar", "protos", "service_runtime", "shared_mem")


def stage(folder: Path) -> None:
    """Write the sources of the distribution to `folder`."""
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / package, folder / package, ignore=ignored)
    for name in ("LICENSE", "setup.py"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copy(ROOT / "lockstep_grammar" / "README.md", folder / "README.md")
    shutil.copy(ROOT / "tools" / "grammar_wheel.toml", folder / "pyproject.toml")


def build(out: Path, *, isolated: bool = True) -> Path:
    """Build the wheel into `out` and return it. Not `isolated`: with the setuptools of this environment."""
    with tempfile.TemporaryDirectory(prefix="lockstep-grammar-") as staged:
        stage(Path(staged))
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(out), staged]
        subprocess.run([*command, *(() if isolated else ("--no-build-isolation",))], check=True)
    return max(out.glob("lockstep_grammar-*.whl"), key=lambda wheel: wheel.stat().st_mtime_ns)


def main() -> None:
    """Build the wheel."""
    parser = argparse.ArgumentParser(prog="python -m tools.grammar_wheel", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of the wheel")
    print(build(parser.parse_args().out))


if __name__ == "__main__":
    main()
