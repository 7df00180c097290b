"""The base of all request bodies: fields are known by name, and every problem names its field.

Invariant: a field has an effect, is one of the few that docs/http.md lists as without effect, or is refused. A field
that the API knows but this server does not support is refused with the reason, and any other name with the nearest
known one. null means unset, as clients send it for every option.

Not responsible for: limits that the engine checks (its errors also name the field).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from http_gateway.wire.errors import ApiError

UNKNOWN, REFUSED = "unknown_field", "refused_field"
_CODES = {UNKNOWN: "unknown_parameter", REFUSED: "unsupported_parameter", "missing": "missing_required_parameter"}


@dataclass(frozen=True, slots=True)
class Refusal:
    """A field that the API knows and this server does not serve."""

    reason: str
    harmless: tuple[Any, ...] = ()
    """Values that ask for nothing; they are accepted."""


class Fields(BaseModel):
    """A JSON object with only known fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=False)

    REFUSED: ClassVar[Mapping[str, Refusal]] = {}

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = cls.names()
        kept = {}
        for name, value in data.items():
            if name in known:
                if value is not None:
                    kept[name] = value
            elif (refusal := cls.REFUSED.get(name)) is None:
                raise PydanticCustomError(
                    UNKNOWN, "is unknown{hint}", {"name": name, "hint": _hint(name, [*known, *cls.REFUSED])}
                )
            elif value is not None and value not in refusal.harmless:
                raise PydanticCustomError(
                    REFUSED, "is not supported: {reason}", {"name": name, "reason": refusal.reason}
                )
        return kept

    @classmethod
    def names(cls) -> frozenset[str]:
        """Return the names of the fields in JSON."""
        return frozenset(field.alias or name for name, field in cls.model_fields.items())


def problem(error: ValidationError, body: object) -> ApiError:
    """Return the error for a body that does not validate. It names the most deeply nested field at fault.

    Args:
        error: pydantic's error.
        body: the parsed JSON; None if the body is not JSON.
    """
    found = max(error.errors(include_url=False), key=lambda entry: len(entry["loc"]))
    kind, context = found["type"], found.get("ctx", {})
    path = _path(found["loc"], body, missing=kind == "missing")
    if kind in (UNKNOWN, REFUSED):
        path = f"{path}.{context['name']}" if path else str(context["name"])
    message = found["msg"][:1].lower() + found["msg"][1:]
    if kind == "json_invalid":
        return ApiError(f"the body is not JSON: {message.removeprefix('invalid JSON: ')}", code="invalid_json")
    return ApiError(f"{path or 'body'}: {message}", param=path or None, code=_CODES.get(kind, "invalid_value"))


def _path(loc: tuple[int | str, ...], body: object, *, missing: bool) -> str:
    """Return the place in the body; pydantic's own steps into a union are left out.

    missing: the last step is the name of a field that is not there.
    """
    path, at = "", body
    for number, step in enumerate(loc):
        absent = missing and number == len(loc) - 1
        if isinstance(step, int):
            path += f"[{step}]"
            at = at[step] if isinstance(at, list) and step < len(at) else None
        elif isinstance(at, dict) and (step in at or absent):
            path += f".{step}" if path else step
            at = at.get(step)
    return path


def _hint(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), 1, 0.6)
    return f"; did you mean {near[0]}?" if near else ""
