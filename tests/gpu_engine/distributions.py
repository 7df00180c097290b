"""Distributions that a test installs: a module with entry points, in a folder on the path of imports."""

from __future__ import annotations

from pathlib import Path

import pytest


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, group: str, source: str) -> None:
    """Write a distribution whose entry point in `group` is its only module, and put its folder on the path."""
    (folder / f"{name}.py").write_text(source)
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{group}]\n{name} = {name}\n")
    monkeypatch.syspath_prepend(folder)
