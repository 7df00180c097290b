"""The parts of a grammar that a backend would not enforce: an error that names them, or warnings if they are allowed.

Invariant: a part that was found is in the error or in the warnings. Warnings travel inside the artifact, so a grammar
has them however it was obtained: from a worker, from a cache, or from another process.
Not responsible for: finding such parts (see the backends).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from grammar_service.errors import NotEnforced

UNVERIFIED = "not verified: "
"""How the warning of a part begins that has an effect only where answers are verified."""
MAX_NAMED = 16
"""Parts that an error or the warnings name. For the rest they give the number."""


@dataclass(frozen=True, slots=True)
class Unenforced:
    """A part of a grammar that would not have its full effect."""

    path: str
    """JSON path of the schema that contains the keyword; "" for the root."""
    keyword: str
    why: str
    is_annotation: bool = False
    """JSON Schema gives the part no effect, so it is a warning and never an error."""
    can_be_verified: bool = False
    """The part is an annotation that has an effect where answers are verified."""

    def __str__(self) -> str:
        return f"{self.path}/{self.keyword}: {self.why}" if self.keyword else self.why


def settle(backend: str, found: Sequence[Unenforced], allow_unenforced: bool) -> tuple[str, ...]:
    """Return a warning for each part. Raises NotEnforced, which names the parts, unless `allow_unenforced` is set.

    Annotations are warnings in any case.
    """
    named = _named([str(part) for part in found if not part.is_annotation])
    if named and not allow_unenforced:
        raise NotEnforced(f"{backend} would not enforce all of it: {'; '.join(named)}")
    notes = _named([f"{UNVERIFIED * part.can_be_verified}{part}" for part in found if part.is_annotation])
    return (*(f"not enforced by {backend}: {part}" for part in named), *notes)


def _named(parts: list[str]) -> list[str]:
    distinct = list(dict.fromkeys(parts))
    if len(distinct) <= MAX_NAMED:
        return distinct
    return [*distinct[:MAX_NAMED], f"and {len(distinct) - MAX_NAMED} more"]


def pack(warnings: tuple[str, ...], data: bytes) -> bytes:
    """Return an artifact of the warnings and the library's data."""
    return json.dumps(warnings).encode() + b"\n" + data


def unpack(artifact: bytes) -> tuple[tuple[str, ...], bytes]:
    """Return the warnings and the data of an artifact."""
    at = artifact.index(b"\n")
    return tuple(json.loads(artifact[:at])), artifact[at + 1 :]
