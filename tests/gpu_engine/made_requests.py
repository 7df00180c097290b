"""Requests of plain numbers: a field is given by its name, whatever part of the request it is in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from gpu_engine.api.request import (
    Outputs,
    Request,
    ResponseParams,
    SamplingParams,
    Scheduling,
    Speculation,
    TokenEvent,
)

_PARTS = {
    "sampling": SamplingParams,
    "speculation": Speculation,
    "scheduling": Scheduling,
    "outputs": Outputs,
    "response": ResponseParams,
}
_PART_OF = {field.name: part for part, made in _PARTS.items() for field in fields(made)}


def _nothing(event: TokenEvent) -> None:
    """The events of a request whose sink no test reads."""


def changed(request: Request, **values: Any) -> Request:
    """Return a request with other values of these fields."""
    parts: dict[str, dict[str, Any]] = {}
    own: dict[str, Any] = {}
    for name, value in values.items():
        if name in _PART_OF:
            parts.setdefault(_PART_OF[name], {})[name] = value
        else:
            own[name] = value
    return replace(request, **own, **{part: replace(getattr(request, part), **of) for part, of in parts.items()})


def made(
    prompt_ids: list[int],
    sink: Callable[[TokenEvent], None] = _nothing,
    *,
    request_id: str = "r",
    max_tokens: int = 1000,
    seed: int = 0,
    **values: Any,
) -> Request:
    """Return a request of these fields; the others have their defaults."""
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed)
    return changed(Request(request_id=request_id, prompt_ids=prompt_ids, sampling=sampling, sink=sink), **values)
