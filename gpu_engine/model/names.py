"""What the name of a model may be, checked without torch, so that a wrong one is refused at once.

A GGUF file of a hub repository is named by its kind: `owner/name:Q4_K_M`. A file that is written in several parts
(`-00001-of-00003.gguf`) is one file of its kind.

Not responsible for: fetching or reading a model (hub.py, network.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from gpu_engine.api.engine_settings import EMBEDDED_MODEL

GGUF = ".gguf"
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w.-]+)?")
"""owner/name or owner/name:KIND"""
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
_KIND = re.compile(r"(?:^|[-._])((?:UD-)?(?:(?:IQ|TQ|Q)\d\w*|BF16|FP?16|FP?32|MXFP4\w*))$", re.IGNORECASE)
_BESIDE = re.compile(r"mmproj|imatrix", re.IGNORECASE)
"""Files next to a model's: projections of images, statistics of a quantisation."""


class ModelNotSupported(ValueError):
    """The model cannot be served: wrong kind of attention, no fast tokenizer, or a shape the kernels do not take."""


def one_line(text: object) -> str:
    """Return a text, or what an error says, with its line breaks and indents as single spaces."""
    return " ".join(str(text).split())


def check_name(name: str, setting: str) -> None:
    """Raise FileNotFoundError, with one line, for a name that is no path that exists and cannot be an id of the hub."""
    if name and name != EMBEDDED_MODEL and not Path(name).exists() and not is_hub_name(name):
        raise FileNotFoundError(
            f"{setting}: {name} is neither a directory, a GGUF file, a hub id (owner/name, or owner/name:KIND for a "
            "GGUF file) nor 'embedded'"
        )


def is_hub_name(name: str) -> bool:
    """Return whether a text can be the name of a model of the hub."""
    return _ID.fullmatch(name) is not None


def kind_of(file: str) -> str:
    """Return the kind of a GGUF file of a repository, such as Q4_K_M or UD-Q4_K_XL; "": its name has none."""
    path = PurePosixPath(file)
    if path.suffix.lower() != GGUF or _BESIDE.search(path.name):
        return ""
    found = _KIND.search(_PART.sub("", path.stem))
    return found[1].upper() if found else ""


def files_of_kind(files: Iterable[str], kind: str) -> list[str]:
    """Return the GGUF file of a kind in its parts, in order; [] if there is none.

    `kind` may also be the name of a file, of any part if it has several.

    A kind without `UD-` means the file with it if there is no other. Raises ValueError for several files of the kind,
    and for parts that are missing.
    """
    listed = [file for file in files if PurePosixPath(file).suffix.lower() == GGUF]
    wanted = kind.upper()
    for same in (
        lambda file: PurePosixPath(file).name == kind,
        lambda file: kind_of(file) == wanted,
        lambda file: kind_of(file) == f"UD-{wanted}",
    ):
        if found := sorted(filter(same, listed)):
            break
    else:
        return []
    wholes = {_PART.sub("", file.removesuffix(GGUF)) for file in found}
    if len(wholes) > 1:
        raise ValueError(f"several files are of the kind {kind}; name one of them in its place: {', '.join(found)}")
    number = len(part_names(found[0]))
    if number > 1 and PurePosixPath(found[0]).name == kind:
        (whole,) = wholes
        found = sorted(file for file in listed if _PART.sub("", file.removesuffix(GGUF)) == whole)
    if missing := [name for name in part_names(found[0]) if name not in found]:
        raise ValueError(f"{len(found)} of the {number} parts of {found[0]} are there, and not {', '.join(missing)}")
    return found


def part_names(file: str) -> list[str]:
    """Return the names of all parts of a GGUF file, in order, by the name of one; of a whole file its own, and of one
    whose number is not among its parts."""
    found = _PART.search(PurePosixPath(file).stem)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        return [file]
    before = file.removesuffix(f"{found[0]}{GGUF}")
    return [f"{before}-{number:05}-of-{found[2]}{GGUF}" for number in range(1, int(found[2]) + 1)]
