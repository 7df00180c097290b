"""One use of a keyword, with JSON texts that satisfy the schema and texts that violate it.

Invariant: `invalid` texts violate the schema of draft 2020-12 in every validator that asserts formats. `beyond` texts
are rejected only by a validator that checks every detail of a format.
Not responsible for: running a case (see measure.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class Raw(str):
    """JSON text that no Python value expresses: repeated names, certain escapes, 1e0."""


@dataclass(frozen=True, slots=True)
class Case:
    """A schema and texts that it must tell apart."""

    keyword: str
    use: str
    """How the keyword is used; "" for the plain use."""
    schema: Any
    valid: tuple[str, ...]
    invalid: tuple[str, ...]
    beyond: tuple[str, ...] = ()
    """Texts of the right form with an invalid value, such as an IPv4 address with a leading zero."""

    @property
    def name(self) -> str:
        """The keyword with its use."""
        return f"{self.keyword}, {self.use}" if self.use else self.keyword


def case(
    keyword: str,
    use: str,
    schema: Any,
    valid: Sequence[Any],
    invalid: Sequence[Any],
    beyond: Sequence[Any] = (),
) -> Case:
    """Return a case from Python values and from JSON texts (`Raw`)."""
    return Case(keyword, use, schema, _texts(valid), _texts(invalid), _texts(beyond))


def _texts(values: Sequence[Any]) -> tuple[str, ...]:
    return tuple(
        str(value) if isinstance(value, Raw) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        for value in values
    )
