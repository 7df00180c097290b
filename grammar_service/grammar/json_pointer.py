"""The array indices of JSON Pointers (RFC 6901), as references of schemas have them.

Not responsible for: the rest of a pointer (see limits.py and backends/json_schema/).
"""

from __future__ import annotations

import re

_INDEX = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)


def array_index(name: str, length: int) -> int | None:
    """Return the index that a part of a pointer names in an array of `length` items; None: it names none."""
    if not _INDEX.fullmatch(name):
        return None
    index = int(name)
    return index if index < length else None
