"""Beam search in vLLM's fields: `use_beam_search` with `best_of` or `beam_width`, and what its answers carry.

Invariant: a field of a beam search has an effect or is refused by name.

Not responsible for: the search, and fields of the engine's message that it refuses next to one (the engine).
"""

from __future__ import annotations

from http_gateway.wire.errors import ApiError
from http_gateway.wire.sampling import SamplingFields
from protos.engine.v1 import engine_pb2 as pb

_STOPPING = {False: pb.EARLY_STOPPING_HEURISTIC, True: pb.EARLY_STOPPING_TRUE, "never": pb.EARLY_STOPPING_NEVER}
_WITHOUT_SEARCH: dict[str, tuple[float, ...]] = {
    "best_of": (1,),
    "beam_width": (1,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
}
"""Fields of only a beam search -> values that ask for nothing."""
_WITHOUT_CHANCE: dict[str, tuple[float, ...]] = {
    "temperature": (0.0,),
    "top_p": (1.0,),
    "top_k": (-1, 0),
    "min_p": (0.0,),
}
"""Fields that a beam search does not have -> values with which nothing is drawn. vLLM's clients send them."""


def set_beams(request: pb.GenerateRequest, fields: SamplingFields) -> None:
    """Make the request a beam search if the body asks for one. Raises ApiError."""
    if not fields.use_beam_search:
        for name, harmless in _WITHOUT_SEARCH.items():
            value = getattr(fields, name)
            if value is not None and value not in harmless:
                raise _wrong(name, "is only for use_beam_search: true")
        return
    if fields.stream:
        raise _wrong("use_beam_search", "is not for streams: the answers are known when the search has ended")
    if None not in (fields.best_of, fields.beam_width) and fields.best_of != fields.beam_width:
        raise _wrong("best_of", f"is {fields.best_of}, and beam_width is {fields.beam_width}; send one of them")
    width = fields.beam_width if fields.best_of is None else fields.best_of
    request.beam_search.beam_width = (fields.n or 1) if width is None else width
    if fields.length_penalty is not None:
        request.beam_search.length_penalty = fields.length_penalty
    if fields.early_stopping is not None:
        request.beam_search.early_stopping = _STOPPING[fields.early_stopping]
    for name, harmless in _WITHOUT_CHANCE.items():
        if getattr(fields, name) in harmless:
            request.sampling.ClearField(name)


def is_missing(fields: SamplingFields, response: pb.GenerateResponse) -> bool:
    """Return whether a search has found fewer answers than `n`, and not this one: its grammar has no more."""
    failed = response.finish_reason == pb.FINISH_REASON_GRAMMAR_ERROR
    return bool(fields.use_beam_search) and failed and response.index > 0


def _wrong(name: str, problem: str) -> ApiError:
    return ApiError(f"{name}: {problem}", param=name, code="invalid_value")
