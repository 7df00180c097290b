"""The field `beam_search` of a request: its limits, and the fields that have no place in a beam search.

Invariant: a field that a beam search would ignore is an error that names it. Not responsible for: the room of slots and
pages (see core/engine.py), the search (see core/beams/).
"""

from __future__ import annotations

import math

from gpu_engine.api.errors import InvalidRequest
from gpu_engine.api.limits import Limits
from gpu_engine.api.request import BeamParams, EarlyStopping
from protos.engine.v1 import engine_pb2 as pb

MAX_LENGTH_PENALTY = 5.0
MAX_CANDIDATES = 20
"""The number of best tokens that a step gives for each beam (`kernels.logprobs`)."""
MODEL_STOPS = 4
"""Candidates that are kept for the model's own end-of-sequence tokens."""


def check_beams(request: pb.GenerateRequest, limits: Limits) -> BeamParams | None:
    """Return the parameters of the request's beam search; None: it asks for none. Raises InvalidRequest."""
    if not request.HasField("beam_search"):
        return None
    field = request.beam_search
    if not limits.max_beam_width:
        raise InvalidRequest("beam_search", "is not served: max_beam_width or max_batch_size is below 2")
    if not 2 <= field.beam_width <= limits.max_beam_width:
        raise InvalidRequest(
            "beam_search.beam_width", f"is {field.beam_width}, must be in [2, {limits.max_beam_width}] (max_beam_width)"
        )
    penalty = field.length_penalty if field.HasField("length_penalty") else 1.0
    if not (math.isfinite(penalty) and abs(penalty) <= MAX_LENGTH_PENALTY):
        most = MAX_LENGTH_PENALTY
        raise InvalidRequest("beam_search.length_penalty", f"is {penalty:g}, must be in [{-most:g}, {most:g}]")
    if field.early_stopping not in pb.EarlyStopping.values():
        raise InvalidRequest(
            "beam_search.early_stopping", f"is {field.early_stopping}, which is not a value of EarlyStopping"
        )
    _refuse_sampling(request)
    num_returned = request.sampling.n if request.sampling.HasField("n") else 1
    if num_returned > field.beam_width:
        raise InvalidRequest("sampling.n", f"is {num_returned}, at most beam_width ({field.beam_width}) are returned")
    most = MAX_CANDIDATES - MODEL_STOPS - field.beam_width
    if (count := len(request.sampling.stop_token_ids)) > most:
        raise InvalidRequest(
            "sampling.stop_token_ids", f"has {count} tokens, at most {most} with {field.beam_width} beams"
        )
    stopping = EarlyStopping(field.early_stopping or pb.EARLY_STOPPING_HEURISTIC)
    return BeamParams(field.beam_width, penalty, stopping, num_returned)


def _refuse_sampling(request: pb.GenerateRequest) -> None:
    """Raise InvalidRequest for a field that chooses at random, speculates, ends an answer by its text, or reads or
    changes rows that beams do not have."""
    sampling, response = request.sampling, request.response
    given = {
        "sampling.temperature": sampling.HasField("temperature"),
        "sampling.top_p": sampling.HasField("top_p"),
        "sampling.top_k": sampling.HasField("top_k"),
        "sampling.min_p": sampling.HasField("min_p"),
        "sampling.seed": sampling.HasField("seed"),
        "sampling.stop": bool(sampling.stop),
        "sampling.logprobs": sampling.HasField("logprobs"),
        "response.per_field_logprobs": response.per_field_logprobs,
        "response.value_events": response.value_events,
        "response.items_of": response.HasField("items_of"),
        "response.receipt_nonce": response.HasField("receipt_nonce"),
        "response.context_logits": response.context_logits,
        "response.generation_logits": response.generation_logits,
        "response.additional_outputs": bool(response.additional_outputs),
        "never_preempt": request.never_preempt,
        "logits_processors": bool(request.logits_processors),
        "lora": bool(request.lora),
        "prompt_adapter": bool(request.prompt_adapter),
        "speculation.num_draft_tokens": request.speculation.num_draft_tokens > 0,
    }
    for field, is_set in given.items():
        if is_set:
            raise InvalidRequest(field, "is not allowed together with beam_search")
