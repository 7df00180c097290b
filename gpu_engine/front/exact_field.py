"""The fields `sampling.grammar_exact*` of a request: the bound of the tries, and the fields that exact answers refuse.

Invariant: a field that would change the distribution, or whose results could not be taken back, is an error that names
`sampling.grammar_exact` and the field. Not responsible for: the tries (see core/exact_sampling.py).
"""

from __future__ import annotations

from gpu_engine.api.errors import InvalidRequest
from gpu_engine.api.limits import Limits
from gpu_engine.api.request import GrammarExact, GrammarSpec, Outputs, SamplingParams
from protos.engine.v1 import engine_pb2 as pb

FIELD = "sampling.grammar_exact"
MAX_TRIES, DEFAULT_TRIES = 65536, 1000
MAX_MS, DEFAULT_MS = 24 * 60 * 60 * 1000, 60 * 1000


def check_exact(
    request: pb.GenerateRequest,
    grammar: GrammarSpec | None,
    sampling: SamplingParams,
    outputs: Outputs,
    limits: Limits,
) -> GrammarExact | None:
    """Return the bound of an exact answer; None: the request asks for none. Raises InvalidRequest.

    `sampling` has the request's values, or the model's where the request has none.
    """
    given = request.sampling
    if not given.grammar_exact:
        names = ("grammar_exact_tries", "grammar_exact_ms", "grammar_exact_shared_tries")
        named = [name for name in names if given.HasField(name)]
        named += [name for name in ("grammar_exact_error", "grammar_exact_any_spelling") if getattr(given, name)]
        if named:
            raise InvalidRequest(f"sampling.{named[0]}", "needs grammar_exact")
        return None
    if not limits.exact_answers:
        raise InvalidRequest(FIELD, "needs an engine on a CPU; this one runs on a GPU")
    if grammar is None:
        raise InvalidRequest(FIELD, "needs a grammar")
    _refuse(request, grammar, outputs)
    _refuse_filters(sampling)
    tries = _bounded("grammar_exact_tries", DEFAULT_TRIES, (1, MAX_TRIES), given)
    ms = _bounded("grammar_exact_ms", DEFAULT_MS, (1, MAX_MS), given)
    shared = _bounded("grammar_exact_shared_tries", 0, (0, MAX_TRIES), given)
    return GrammarExact(tries, ms / 1e3, given.grammar_exact_error, shared, given.grammar_exact_any_spelling)


def _refuse(request: pb.GenerateRequest, grammar: GrammarSpec, outputs: Outputs) -> None:
    """Raise InvalidRequest for a field that ends, changes or returns what a rejected try has."""
    sampling, reasoning = request.sampling, request.reasoning
    thinks = request.HasField("reasoning") and (reasoning.enabled or not reasoning.HasField("enabled"))
    others = {
        "beam_search": request.HasField("beam_search"),
        "tools": request.HasField("tools"),
        "reasoning": thinks,
        "grammar.unenforced = UNENFORCED_VERIFY": grammar.verify,
        "stop": bool(sampling.stop),
        "stop_token_ids": bool(sampling.stop_token_ids),
        "repetition_max_pattern_size": sampling.repetition_max_pattern_size > 0,
        "logits_processors": bool(request.logits_processors),
        "logits and other tensors": bool(outputs.tensors),
        "never_preempt": request.never_preempt,
    }
    for other, is_given in others.items():
        if is_given:
            raise InvalidRequest(FIELD, f"is not allowed together with {other}")


def _refuse_filters(sampling: SamplingParams) -> None:
    """Raise InvalidRequest unless every token may be drawn with its own probability."""
    if sampling.temperature == 0.0:
        raise InvalidRequest(FIELD, "needs a temperature above 0")
    if sampling.filters:
        raise InvalidRequest(FIELD, f"needs no {sampling.filters[0]}; the request, or the model's default, has one")


def _bounded(name: str, default: int, limits: tuple[int, int], given: pb.SamplingParams) -> int:
    if not given.HasField(name):
        return default
    value, (least, most) = int(getattr(given, name)), limits
    if not least <= value <= most:
        raise InvalidRequest(f"sampling.{name}", f"is {value}, must be in [{least}, {most}]")
    return value
