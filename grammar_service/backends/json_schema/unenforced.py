"""What a backend would not enforce, as a list: refused by name, or reported as warnings to a caller who allows it.

Invariant: a part that was found is never dropped: it is in the error or in the warnings, and warnings travel inside the
artifact, so that every way to a compiled grammar (worker, cache, another process) brings them along. It finds nothing
by itself; that is each backend's own knowledge.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from grammar_service.errors import NotEnforced

MAX_NAMED = 16
"""Parts that an error or the warnings spell out; of more, the number is given."""


@dataclass(frozen=True, slots=True)
class Unenforced:
    """A part of a grammar that would have no effect, or less than it says."""

    path: str
    """JSON path of the schema that holds the keyword; "" for the root."""
    keyword: str
    why: str

    def __str__(self) -> str:
        return f"{self.path}/{self.keyword}: {self.why}" if self.keyword else self.why


def settle(backend: str, found: Sequence[Unenforced], allow_unenforced: bool) -> tuple[str, ...]:
    """Return the warnings for what was found. Raises NotEnforced, naming each part, unless the caller allows it."""
    distinct = list(dict.fromkeys(map(str, found)))
    named = distinct[:MAX_NAMED]
    if len(distinct) > MAX_NAMED:
        named.append(f"and {len(distinct) - MAX_NAMED} more")
    if named and not allow_unenforced:
        raise NotEnforced(f"{backend} would not enforce all of it: {'; '.join(named)}")
    return tuple(f"not enforced by {backend}: {part}" for part in named)


def pack(warnings: tuple[str, ...], data: bytes) -> bytes:
    """Return an artifact: the warnings and what the library made."""
    return json.dumps(warnings).encode() + b"\n" + data


def unpack(artifact: bytes) -> tuple[tuple[str, ...], bytes]:
    """Return the warnings and the data of an artifact."""
    at = artifact.index(b"\n")
    return tuple(json.loads(artifact[:at])), artifact[at + 1 :]
