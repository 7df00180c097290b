"""The files of a machine and its control groups, in a folder of a test's own."""

from __future__ import annotations

from pathlib import Path


def system(root: Path, groups: str, files: dict[str, str]) -> Path:
    for name, content in {"proc/self/cgroup": groups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root
