"""From a GenerateRequest of vLLM's wire to one of our own, and the names of its fields in errors.

Invariant: every field that vLLM's message sets is handed on or refused by its name; none is dropped. The exceptions
concern text, which this service does not return: `tokenized.original_text` and `spaces_between_special_tokens`.

A scalar without presence is unset at zero: `top_p`, `top_k`, `repetition_penalty`, `n`.

Not responsible for: limits (see front/validation.py).
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from smg_grpc_proto import vllm_engine_pb2 as vllm

from gpu_engine.api.errors import InvalidRequest, NotSupported
from protos.engine.v1 import engine_pb2 as pb

UNSERVED = {
    "kv_transfer_params": "KV cache of another server",
    "kv_transfer_params_json": "KV cache of another server",
    "mm_inputs": "images and audio",
    "extra_mm_inputs": "images and audio",
    "media_refs": "images and audio",
}
"""Field of a request -> what this server does not take."""

_MAX_TOP_K = 2**31 - 1
_MASK_64 = (1 << 64) - 1
_PREFIXES = (
    ("token_ids.ids", "tokenized.input_ids"),
    ("prompt", "input"),
    ("sampling.", "sampling_params."),
    ("response.prompt_logprobs", "sampling_params.prompt_logprobs"),
)


def to_engine(request: vllm.GenerateRequest) -> pb.GenerateRequest:
    """Return the request in our own proto. Raises InvalidRequest and NotSupported, which name a field of `request`."""
    _refuse_unserved(request)
    result = pb.GenerateRequest(request_id=request.request_id)
    if request.WhichOneof("input") == "tokenized":
        result.token_ids.ids.extend(request.tokenized.input_ids)
    elif request.text:
        result.text = request.text
    result.response.omit_text = True
    _sample(request.sampling_params, result)
    _constrain(request.sampling_params, result)
    return result


def field_name(request: vllm.GenerateRequest, field: str) -> str:
    """Return the name in `request` of a field of our own request, as errors name it."""
    if field == "grammar" or field.startswith("grammar."):
        constraint = request.sampling_params.WhichOneof("constraint")
        inner = field.partition(".choices")[1:] if constraint == "choice" else ()
        return f"sampling_params.{constraint}{''.join(inner)}"
    for ours, theirs in _PREFIXES:
        if field.startswith(ours):
            return theirs + field.removeprefix(ours)
    return field


def likely_lark(grammar: str) -> bool:
    """Return whether a grammar is Lark and not EBNF (GBNF): no line outside comments defines a rule with `::=`.

    vLLM's own clients send both in one field, and vLLM tells them apart in the same way.
    """
    lines = (line.partition("//")[0].partition("#")[0] for line in grammar.splitlines())
    return not any("::=" in line for line in lines)


def _refuse_unserved(request: vllm.GenerateRequest) -> None:
    for field, value in request.ListFields():
        if field.name in UNSERVED:
            raise NotSupported(f"{field.name}: this server does not take {UNSERVED[field.name]}")
        if field.name == "data_parallel_rank" and value != 0:
            raise InvalidRequest(field.name, f"is {value}, this server has only rank 0")
    for path, message in (("", request), ("sampling_params.", request.sampling_params)):
        _refuse_unknown(path, message)


def _refuse_unknown(path: str, message: Message) -> None:
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise NotSupported(
            f"{path}{unknown[0].field_number}: a field of this number is not known to the installed smg-grpc-proto"
        )


def _sample(given: vllm.SamplingParams, result: pb.GenerateRequest) -> None:
    sampling = result.sampling
    for name in ("temperature", "max_tokens"):
        if given.HasField(name):
            setattr(sampling, name, getattr(given, name))
    if given.top_k > _MAX_TOP_K:
        raise InvalidRequest("sampling_params.top_k", f"is {given.top_k}, must be at most {_MAX_TOP_K}")
    unset_at_zero = ("top_p", "top_k", "repetition_penalty", "n")
    for name in ("min_p", "frequency_penalty", "presence_penalty", "min_tokens", *unset_at_zero):
        if value := getattr(given, name):
            setattr(sampling, name, value)
    sampling.stop.extend(given.stop)
    sampling.stop_token_ids.extend(given.stop_token_ids)
    sampling.ignore_eos = given.ignore_eos
    sampling.skip_special_tokens = given.skip_special_tokens
    sampling.include_stop_str_in_output = given.include_stop_str_in_output
    if given.HasField("seed"):
        sampling.seed = given.seed & _MASK_64
    if given.HasField("logprobs"):
        sampling.logprobs = _count(given, "logprobs")
    if given.HasField("prompt_logprobs"):
        result.response.prompt_logprobs = _count(given, "prompt_logprobs")
    for token, bias in given.logit_bias.items():
        if token < 0:
            raise InvalidRequest("sampling_params.logit_bias", f"has the token {token}, token ids are not negative")
        sampling.logit_bias[token] = bias
    if given.HasField("truncate_prompt_tokens"):
        raise NotSupported("sampling_params.truncate_prompt_tokens: this server does not shorten prompts")


def _count(given: vllm.SamplingParams, name: str) -> int:
    value = int(getattr(given, name))
    if value < 0:
        raise InvalidRequest(f"sampling_params.{name}", f"is {value}, must not be negative")
    return value


def _constrain(given: vllm.SamplingParams, result: pb.GenerateRequest) -> None:
    name = given.WhichOneof("constraint")
    if name is None:
        return
    value: Any = getattr(given, name)
    if name == "choice":
        result.grammar.choice.choices.extend(value.choices)
        # A oneof is set by any of its fields, an empty list sets none.
        result.grammar.choice.SetInParent()
    elif name == "grammar":
        setattr(result.grammar, "lark" if likely_lark(value) else "ebnf", value)
    else:
        setattr(result.grammar, name, value)
