"""The engine's request from the fields that chat and completions share.

Invariant: a field that the client left out is left out here, so that the engine's default holds.

Not responsible for: prompts (prompts.py), grammars (grammar.py), beam search (beams.py), ranges (the engine names
the field).
"""

from __future__ import annotations

import json

from http_gateway.answers.beams import set_beams
from http_gateway.answers.grammar import grammar_of
from http_gateway.wire.errors import ApiError
from http_gateway.wire.sampling import SamplingFields
from protos.engine.v1 import engine_pb2 as pb

_SAME = (
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "n",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
)
"""Fields with one name and meaning on both sides."""


def begin(
    fields: SamplingFields, request_id: str, *, max_tokens: int | None, logprobs: int | None
) -> pb.GenerateRequest:
    """Return a request without a prompt. Raises ApiError.

    Args:
        fields: the body.
        request_id: the engine's name of the request.
        max_tokens: most tokens of the answer; None: the engine's default.
        logprobs: alternatives for each token; None: no log-probabilities.
    """
    sampling = pb.SamplingParams(**{name: value for name in _SAME if (value := getattr(fields, name)) is not None})
    if max_tokens is not None:
        sampling.max_tokens = max_tokens
    if logprobs is not None:
        sampling.logprobs = logprobs
    if (detection := fields.repetition_detection) is not None:
        for name in ("max_pattern_size", "min_pattern_size", "min_count"):
            if (value := getattr(detection, name)) is not None:
                setattr(sampling, f"repetition_{name}", value)
    sampling.stop.extend(fields.stops())
    sampling.stop_token_ids.extend(fields.stop_token_ids or ())
    sampling.bad_words.extend(fields.bad_words or ())
    sampling.bad_token_ids.extend(fields.bad_token_ids or ())
    for token, bias in (fields.logit_bias or {}).items():
        sampling.logit_bias[int(token)] = bias
    request = pb.GenerateRequest(
        request_id=request_id,
        sampling=sampling,
        cache_salt=fields.cache_salt or "",
        priority=fields.priority or 0,
    )
    set_beams(request, fields)
    for each in fields.logits_processors or ():
        arguments = "" if each.kwargs is None else json.dumps(each.kwargs)
        request.logits_processors.add(name=each.qualname, arguments=arguments)
    if (grammar := grammar_of(fields)) is not None:
        request.grammar.CopyFrom(grammar)
    if (speculation := fields.speculation) is not None:
        if speculation.num_draft_tokens is not None:
            request.speculation.num_draft_tokens = speculation.num_draft_tokens
        if speculation.draft_index is not None:
            request.speculation.draft_index = speculation.draft_index
    _set_response(request.response, fields, logprobs)
    request.sampling.masked_logprobs = bool(fields.masked_logprobs)
    _set_exact(request.sampling, fields)
    return request


def _set_response(response: pb.ResponseOptions, fields: SamplingFields, logprobs: int | None) -> None:
    # Token ids are left out unless the answer shows or counts them.
    shows = fields.return_token_ids or fields.token_origins or logprobs is not None
    response.omit_token_ids = not (shows or fields.usage_events()[1])
    response.token_origins = bool(fields.token_origins)
    response.per_field_logprobs = bool(fields.field_logprobs)
    response.value_events = bool(fields.value_events)
    if fields.items_of is not None:
        response.items_of = fields.items_of
    if fields.receipt_nonce is not None:
        response.receipt_nonce = bytes.fromhex(fields.receipt_nonce)
    if fields.prompt_logprobs is not None:
        if fields.stream:
            raise ApiError("prompt_logprobs: is not for streams", param="prompt_logprobs", code="invalid_value")
        response.prompt_logprobs = fields.prompt_logprobs


def _set_exact(sampling: pb.SamplingParams, fields: SamplingFields) -> None:
    """Set whether the answer is exact, and the bound of its tries."""
    sampling.grammar_exact = bool(fields.grammar_exact)
    if fields.grammar_exact_tries is not None:
        sampling.grammar_exact_tries = fields.grammar_exact_tries
    if fields.grammar_exact_ms is not None:
        sampling.grammar_exact_ms = fields.grammar_exact_ms
    sampling.grammar_exact_any_spelling = bool(fields.grammar_exact_any_spelling)
    if fields.grammar_exact_shared_tries is not None:
        sampling.grammar_exact_shared_tries = fields.grammar_exact_shared_tries


def check_stream_options(fields: SamplingFields) -> None:
    """Raise ApiError for options of a stream where none is asked for."""
    if fields.stream_options is not None and not fields.stream:
        raise ApiError("stream_options: is only for stream: true", param="stream_options", code="invalid_value")
