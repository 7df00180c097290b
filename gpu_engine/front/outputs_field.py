"""The tensors that a request asks for: their names, and a bound on their bytes before the request begins.

Invariant: an output that is returned is one of the model's, and all rows that the request can have are within the
limit; otherwise InvalidRequest names the field and the limit. Pure.

Not responsible for: computing them (see step/outputs/), sending them (see responses.py).
"""

from __future__ import annotations

import difflib
from dataclasses import replace

from gpu_engine.api.errors import InvalidRequest
from gpu_engine.api.limits import Limits
from gpu_engine.api.output_tensors import LOGITS, MAX_ROW_BYTES, OutputSpec, WantedOutput, most_bytes, row_bytes
from protos.engine.v1 import engine_pb2 as pb

MAX_ADDITIONAL_OUTPUTS = 8
_NEAR = 5

CONTEXT_LOGITS, GENERATION_LOGITS = "context_logits", "generation_logits"
FIELDS = (CONTEXT_LOGITS, GENERATION_LOGITS)


def check_outputs(request: pb.GenerateRequest, limits: Limits) -> tuple[WantedOutput, ...]:
    """Return what a request asks for. Raises InvalidRequest."""
    options = request.response
    wanted: list[WantedOutput] = []
    for name, is_set in ((CONTEXT_LOGITS, options.context_logits), (GENERATION_LOGITS, options.generation_logits)):
        if is_set:
            context = name == CONTEXT_LOGITS
            spec = _spec(f"response.{name}", LOGITS, limits)
            wanted.append(WantedOutput(name, LOGITS, spec, context=context, answer=not context))
    wanted += _additional(options, limits)
    if wanted and request.HasField("beam_search"):
        raise InvalidRequest(_field_of(wanted[0]), "is not supported with beam_search")
    if (size := row_bytes(wanted)) > MAX_ROW_BYTES:
        raise InvalidRequest(
            "response.additional_outputs", f"has {size} bytes for one token, at most {MAX_ROW_BYTES} are allowed"
        )
    return tuple(wanted)


def _additional(options: pb.ResponseOptions, limits: Limits) -> list[WantedOutput]:
    field = "response.additional_outputs"
    if (count := len(options.additional_outputs)) > MAX_ADDITIONAL_OUTPUTS:
        raise InvalidRequest(field, f"has {count} outputs, at most {MAX_ADDITIONAL_OUTPUTS} are allowed")
    wanted: list[WantedOutput] = []
    for i, output in enumerate(options.additional_outputs):
        spec = _spec(f"{field}[{i}].name", output.name, limits)
        if any(output.name == each.name for each in wanted):
            raise InvalidRequest(f"{field}[{i}].name", f"{output.name!r} is given twice")
        wanted.append(WantedOutput(output.name, output.name, spec, context=output.context, answer=True))
    return wanted


def _spec(field: str, name: str, limits: Limits) -> OutputSpec:
    """Return the form of an output. Raises InvalidRequest, with the nearest names, for an unknown one."""
    if (spec := limits.outputs.get(name)) is not None:
        return spec
    if not limits.outputs:
        raise InvalidRequest(field, f"{name[:200]!r}: a model with recurrent layers has no output_names")
    near = difflib.get_close_matches(name[:200], limits.outputs, _NEAR, cutoff=0.4) or list(limits.outputs)[:_NEAR]
    names = f"near: {', '.join(near)} (GetModelInfo has all output_names)"
    raise InvalidRequest(field, f"{name[:200]!r} is no output of the model; {names}")


def tensors_of(wanted: tuple[WantedOutput, ...], index: int) -> tuple[WantedOutput, ...]:
    """Return what one of the n sequences returns: only the first one has the rows of the prompt."""
    if not index:
        return wanted
    return tuple(replace(each, context=False) for each in wanted if each.answer)


def check_bytes(
    wanted: tuple[WantedOutput, ...], *, num_sequences: int, prompt_length: int, max_tokens: int, limits: Limits
) -> None:
    """Raise InvalidRequest unless every row that the n sequences of a request may have is within max_output_bytes."""
    sizes = [
        sum(most_bytes(tensors_of((one,), index), prompt_length, max_tokens) for index in range(num_sequences))
        for one in wanted
    ]
    if sum(sizes) > limits.max_output_bytes:
        largest = wanted[max(range(len(sizes)), key=sizes.__getitem__)]
        raise InvalidRequest(
            _field_of(largest),
            f"the outputs may have {sum(sizes)} bytes for {prompt_length} tokens of the prompt and {num_sequences} x "
            f"{max_tokens} (max_tokens) of the answer, at most {limits.max_output_bytes} fit "
            "(a quarter of output_memory_bytes)",
        )


def _field_of(wanted: WantedOutput) -> str:
    return f"response.{wanted.name}" if wanted.name in FIELDS else "response.additional_outputs"
