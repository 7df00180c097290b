"""Recognises the public format of a draft head by its config.json, and reads the head's files.

Invariant: a head in another format is refused by the name of that format, and reading a file runs no code. Not
responsible for: the fields and tensors of a format (see eagle3_files.py, dflash_files.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

DFLASH = "DFlashDraftModel"
"""In `architectures` of a DFlash head."""


class HeadNotUsable(ValueError):
    """The checkpoint is no head of the format that the drafter reads, or not one of this target."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"draft_model: {problem}")


def format_of(said: dict[str, Any]) -> str:
    """Return the drafter that reads a head with this config.json: "eagle3", "dflash", or "" if neither is named."""
    names = said.get("architectures")
    names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    if "speculators_model_type" in said:
        return ""
    if DFLASH in names:
        return "dflash"
    return "eagle3" if any("eagle3" in name.lower() for name in names) else ""


def read_config(directory: Path, drafter: str) -> dict[str, Any]:
    """Return config.json of a head for `drafter`. Raises HeadNotUsable if it cannot be read or is another drafter's."""
    path = directory / "config.json"
    try:
        said = json.loads(path.read_text())
    except OSError as error:
        raise HeadNotUsable(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise HeadNotUsable(f"{path}: not JSON: {error}") from None
    if not isinstance(said, dict):
        raise HeadNotUsable(f"{path}: not a JSON object")
    found = format_of(said)
    if found not in ("", drafter):
        raise HeadNotUsable(f"{path}: architectures is {said['architectures']}, which drafter={found} reads")
    return said


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of model.safetensors. Raises HeadNotUsable; a pickle is refused by its name."""
    safe, pickled = directory / "model.safetensors", directory / "pytorch_model.bin"
    if not safe.exists() and pickled.exists():
        raise HeadNotUsable(
            f"{directory}: {pickled.name} is a pickle, which may run any code when it is read; convert it to "
            f"{safe.name}"
        )
    try:
        return load_file(safe)
    except Exception as error:
        raise HeadNotUsable(f"{directory}: {safe.name} cannot be read: {error}") from error
