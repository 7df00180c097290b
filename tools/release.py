"""Checks a release and writes its files: `python -m tools.release 0.5.0`; `make release VERSION=0.5.0` runs it.

A release is a commit whose versions, CHANGELOG section, citation and locks agree, and whose wheels are built twice with
equal bytes. `dist/` then has the wheels, `SHA256SUMS` and `notes.md`, the section of the CHANGELOG.

The invariant: nothing outside `dist/` is changed, and nothing is pushed or published. A tag `v0.5.0` that is pushed
starts `.github/workflows/release.yml`, which runs this again and publishes what it wrote.

Not responsible for: how a wheel is built and audited (see wheels.py), what a version may change (SUPPORT.md).
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools import locks, wheels

ROOT = Path(__file__).resolve().parents[1]
_VERSION = re.compile(r"\d+\.\d+\.\d+")
_SECTION = re.compile(r"^## (.+)$", re.MULTILINE)


def projects(root: Path) -> dict[str, dict[str, Any]]:
    """Return the table `project` of both distributions, by the path of its file."""
    paths = ("pyproject.toml", "client/pyproject.toml")
    return {path: tomllib.loads((root / path).read_text(encoding="utf-8"))["project"] for path in paths}


def sections(changelog: str) -> dict[str, tuple[str, str]]:
    """Return date and text of each version in the CHANGELOG, newest first; `Unreleased` has no date."""
    parts = _SECTION.split(changelog)[1:]
    split = [(heading.partition(" - "), text.strip()) for heading, text in zip(parts[::2], parts[1::2], strict=True)]
    return {version: (date, text) for (version, _, date), text in split}


def problems_of_versions(root: Path, version: str) -> Iterator[str]:
    """Yield what does not name `version` and should."""
    if not _VERSION.fullmatch(version):
        yield f"{version!r} is no version such as 0.5.0"
        return
    found = projects(root)
    for path, project in found.items():
        if project["version"] != version:
            yield f"{path} has version {project['version']}"
    needed = f"lockstep-client>={version.rpartition('.')[0]}"
    if needed not in found["pyproject.toml"]["dependencies"]:
        yield f"pyproject.toml does not need {needed}"


def problems_of_changelog(root: Path, version: str) -> Iterator[str]:
    """Yield what the CHANGELOG lacks, and where CITATION.cff differs from it."""
    found = sections((root / "CHANGELOG.md").read_text(encoding="utf-8"))
    if found.pop("Unreleased", ("", ""))[1]:
        yield f"CHANGELOG.md has lines under Unreleased: move them to {version}"
    if not found or next(iter(found)) != version:
        yield f"CHANGELOG.md has no section {version} at its top"
        return
    date, text = found[version]
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", date):
        yield f"CHANGELOG.md has no date: write `## {version} - YYYY-MM-DD`"
    if not text:
        yield f"CHANGELOG.md says nothing about {version}"
    citation = (root / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    for line in (f"version: {version}", f"date-released: {date}"):
        if line not in citation:
            yield f"CITATION.cff has no line `{line}`"


def problems_of_commit(root: Path, version: str) -> Iterator[str]:
    """Yield why the checkout is no commit to release: changed files, or a tag on another commit."""
    changed = _git(root, "status", "--porcelain")
    if changed:
        yield f"files differ from the commit: {', '.join(line[3:] for line in changed.splitlines())}"
    tag = f"v{version}"
    tagged = _git(root, "tag", "--list", tag) and _git(root, "rev-parse", f"{tag}^{{commit}}")
    if tagged and tagged != _git(root, "rev-parse", "HEAD"):
        yield f"the tag {tag} is on another commit: a version is released once"


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.rstrip("\n")


def problems_of_locks(root: Path) -> Iterator[str]:
    """Yield each lock that `make locks` would change; asks the index."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch)
        shutil.copy(root / "pyproject.toml", copy)
        for folder in ("client", "locks"):
            shutil.copytree(root / folder, copy / folder)
        locks.write(copy, upgrade=False)
        for path in sorted(locks.folder(copy).glob("*.txt")):
            if path.read_bytes() != (locks.folder(root) / path.name).read_bytes():
                yield f"locks/{path.name} is old: run `make locks`"


def write_wheels(root: Path, target: Path) -> Iterator[str]:
    """Write the wheels and SHA256SUMS into `target`; yield each wheel that a second build makes differently."""
    shutil.rmtree(target, ignore_errors=True)
    sums = []
    with tempfile.TemporaryDirectory() as scratch:
        for what in (*wheels.ARCHITECTURES, "client"):
            first, second = (wheels.make(root, folder, what) for folder in (target, Path(scratch)))
            if first.read_bytes() != second.read_bytes():
                yield f"{first.name} differs between two builds"
            sums.append(f"{hashlib.sha256(first.read_bytes()).hexdigest()}  {first.name}\n")
    (target / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")


def main() -> int:
    """Check the release, write its files, and say how to publish it."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.release",
        description="Check a release and write wheels and notes to dist/. Needs the extra `supply`, gcc and an index.",
    )
    parser.add_argument("version", help="such as 0.5.0")
    version = parser.parse_args().version
    problems = [
        *problems_of_versions(ROOT, version),
        *problems_of_changelog(ROOT, version),
        *problems_of_commit(ROOT, version),
    ]
    # These take minutes.
    if not problems:
        problems += problems_of_locks(ROOT)
    target = ROOT / "dist"
    try:
        if not problems:
            problems += write_wheels(ROOT, target)
    except wheels.WheelError as error:
        problems.append(str(error))
    if problems:
        print(*(f"- {problem}" for problem in problems), sep="\n", file=sys.stderr)
        return 1
    _, notes = sections((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))[version]
    (target / "notes.md").write_text(f"{notes}\n", encoding="utf-8")
    print(*(f"dist/{path.name}" for path in sorted(target.iterdir())), sep="\n")
    print(
        f"Ready. To publish it:\n    git tag --annotate v{version} --message v{version}\n    git push origin v{version}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
