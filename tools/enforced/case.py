"""One use of a keyword, with JSON texts that satisfy it and texts that break it.

Invariant: `invalid` texts break the schema under draft 2020-12 whatever a validator's options are; texts that only a
validator that asserts formats to the last detail would refuse stand in `beyond`. Not here: backends.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class Raw(str):
    """JSON text as it is, where a Python value cannot say it: repeated names, escapes, 1e0."""


@dataclass(frozen=True, slots=True)
class Case:
    """A schema and what it must tell apart."""

    keyword: str
    use: str
    """In which use; "" for the plain one."""
    schema: Any
    valid: tuple[str, ...]
    invalid: tuple[str, ...]
    beyond: tuple[str, ...] = ()
    """Right in form and wrong in value (the 30th of February); a format is an annotation in draft 2020-12."""

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
    """Return a case from Python values; a `Raw` is taken as JSON text."""
    return Case(keyword, use, schema, _texts(valid), _texts(invalid), _texts(beyond))


def _texts(values: Sequence[Any]) -> tuple[str, ...]:
    return tuple(
        str(value) if isinstance(value, Raw) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        for value in values
    )
