"""From the tensors and parameters of a ModelInferRequest to a request of our own proto, and their names in errors.

Invariant: every tensor and every parameter of a request is handed on or refused by its name; none is dropped. A tensor
that switches off what this server does not do (False, or zeros) has no effect. The names are the same as in the models
`ensemble`, `tensorrt_llm_bls` and `tensorrt_llm` that TensorRT-LLM has for Triton.

Not responsible for: datatypes and shapes (see tensors.py), limits (see front/validation.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gpu_engine.api.errors import InvalidRequest, NotSupported
from gpu_engine.doors.kserve.infer_responses import LOGITS, NEEDS, OUTPUTS, TEXTS
from gpu_engine.doors.kserve.tensors import (
    BOOL,
    BYTES,
    FP32,
    INT32,
    LIST,
    SCALAR,
    UINT64,
    Tensor,
    Values,
    read_inputs,
    refuse_parameters,
    unknown,
)
from protos.engine.v1 import engine_pb2 as engine
from protos.kserve.v2 import inference_pb2 as pb

FINAL_RESPONSE = "triton_enable_empty_final_response"
"""A parameter without an effect: the last response of a request has content, and says that it is the last."""
NORMAL_PRIORITY = 1000
"""Triton's priorities count from 1, the most urgent, to 2000; a request without one has this."""

_FIELDS: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "max_tokens": ("sampling.max_tokens", INT32, SCALAR),
    "request_output_len": ("sampling.max_tokens", INT32, SCALAR),
    "min_tokens": ("sampling.min_tokens", INT32, SCALAR),
    "min_length": ("sampling.min_tokens", INT32, SCALAR),
    "temperature": ("sampling.temperature", FP32, SCALAR),
    "top_k": ("sampling.top_k", INT32, SCALAR),
    "runtime_top_k": ("sampling.top_k", INT32, SCALAR),
    "top_p": ("sampling.top_p", FP32, SCALAR),
    "runtime_top_p": ("sampling.top_p", FP32, SCALAR),
    "min_p": ("sampling.min_p", FP32, SCALAR),
    "seed": ("sampling.seed", UINT64, SCALAR),
    "random_seed": ("sampling.seed", UINT64, SCALAR),
    "repetition_penalty": ("sampling.repetition_penalty", FP32, SCALAR),
    "presence_penalty": ("sampling.presence_penalty", FP32, SCALAR),
    "frequency_penalty": ("sampling.frequency_penalty", FP32, SCALAR),
    "num_return_sequences": ("sampling.n", INT32, SCALAR),
    "stop_words": ("sampling.stop", BYTES, LIST),
    "bad_words": ("sampling.bad_words", BYTES, LIST),
    "num_draft_tokens": ("speculation.num_draft_tokens", INT32, SCALAR),
    "text_input": ("text", BYTES, SCALAR),
    "input_ids": ("token_ids.ids", INT32, LIST),
    "cache_salt": ("cache_salt", BYTES, SCALAR),
    "client_id": ("client_id", BYTES, SCALAR),
    "lora": ("lora", BYTES, SCALAR),
    "prompt_adapter": ("prompt_adapter", BYTES, SCALAR),
}
"""Tensor -> the field of our own request that has its value."""

_WORD_LISTS = frozenset({"stop_words", "bad_words"})
"""Clients of TensorRT-LLM send one empty text for none."""

_OTHERS: dict[str, Tensor] = {
    "input_lengths": Tensor(INT32, SCALAR),
    "end_id": Tensor(INT32, SCALAR),
    "pad_id": Tensor(INT32, SCALAR),
    "stream": Tensor(BOOL, SCALAR),
    "streaming": Tensor(BOOL, SCALAR),
    "stop": Tensor(BOOL, SCALAR),
    "request_id": Tensor(UINT64, SCALAR),
    "exclude_input_in_output": Tensor(BOOL, SCALAR),
    "return_log_probs": Tensor(BOOL, SCALAR),
    "return_context_logits": Tensor(BOOL, SCALAR),
    "return_generation_logits": Tensor(BOOL, SCALAR),
    "guided_decoding_guide_type": Tensor(BYTES, SCALAR),
    "guided_decoding_guide": Tensor(BYTES, SCALAR),
    "logits_processors": Tensor(BYTES, LIST),
    "logits_processor_arguments": Tensor(BYTES, LIST),
    "beam_width": Tensor(INT32, SCALAR),
    "length_penalty": Tensor(FP32, SCALAR),
    "len_penalty": Tensor(FP32, SCALAR),
    "early_stopping": Tensor(INT32, SCALAR),
}
"""Tensors that are more than one field, or none."""

INPUTS: dict[str, Tensor] = {name: Tensor(datatype, shape) for name, (_, datatype, shape) in _FIELDS.items()} | _OTHERS
"""Every tensor that a request may have."""

_WORDS = "stop_words and bad_words take texts"
UNSERVED: dict[str, tuple[Tensor, str]] = {
    "return_encoder_output": (Tensor(BOOL, SCALAR), "the model has no encoder"),
    "return_kv_cache_reuse_stats": (Tensor(BOOL, SCALAR), "ModelStatistics counts hits of the prefix cache"),
    "return_perf_metrics": (Tensor(BOOL, SCALAR), "ModelStatistics has the times of requests"),
    "use_draft_logits": (Tensor(BOOL, SCALAR), "the server drafts itself"),
    "beam_search_diversity_rate": (Tensor(FP32, SCALAR), "beams are not made to differ"),
    "runtime_top_p_min": (Tensor(FP32, SCALAR), "top_p is the same for every token"),
    "runtime_top_p_decay": (Tensor(FP32, SCALAR), "top_p is the same for every token"),
    "runtime_top_p_reset_ids": (Tensor(INT32, SCALAR), "top_p is the same for every token"),
    "prompt_vocab_size": (Tensor(INT32, SCALAR), "prompt_adapter names a loaded adapter"),
}
"""Tensors of TensorRT-LLM's models that this server takes only with False or 0 -> why."""

REFUSED: dict[str, str] = {
    "stop_words_list": _WORDS,
    "bad_words_list": _WORDS,
    "embedding_bias": "the service lockstep.engine.v1.Engine takes a logit_bias",
    "embedding_bias_words": "the service lockstep.engine.v1.Engine takes a logit_bias",
    "embedding_bias_weights": "the service lockstep.engine.v1.Engine takes a logit_bias",
    "draft_input_ids": "the server drafts itself",
    "draft_logits": "the server drafts itself",
    "draft_acceptance_threshold": "a draft is accepted only if it is the token that the model chooses",
    "lora_task_id": "lora names a loaded adapter",
    "lora_weights": "lora names a loaded adapter",
    "lora_config": "lora names a loaded adapter",
    "prompt_embedding_table": "prompt_adapter names a loaded adapter",
    "prompt_table_extra_ids": "cache_salt keeps prompts apart",
    "decoder_text_input": "the model has no encoder",
    "decoder_input_ids": "the model has no encoder",
    "decoder_input_lengths": "the model has no encoder",
    "cross_attention_mask": "the model has no encoder",
    "encoder_input_features": "the model reads only text",
    "image_input": "the model reads only text",
    "image_url_input": "the model reads only text",
    "image_bytes_input": "the model reads only text",
    "video_bytes_input": "the model reads only text",
    "sampling_parameters": "each sampling parameter is a tensor",
}
"""Tensors of Triton's other models for text that this server never takes -> why."""

_GUIDES = {
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf_grammar": "ebnf",
    "structural_tag": "structural_tag",
    "lark": "lark",
}
"""guided_decoding_guide_type -> field of our own grammar; "json" needs no guide."""

_EARLY_STOPPING = {
    0: engine.EARLY_STOPPING_HEURISTIC,
    1: engine.EARLY_STOPPING_TRUE,
    2: engine.EARLY_STOPPING_NEVER,
}


@dataclass(slots=True)
class Asked:
    """What a ModelInferRequest asks for."""

    message: engine.GenerateRequest = field(default_factory=engine.GenerateRequest)
    names: dict[str, str] = field(default_factory=dict)
    """Field of `message` -> the tensor or parameter that it comes from."""
    outputs: tuple[str, ...] = ()
    """Tensors of the responses."""
    stream: bool = False
    batched: bool = False
    """The prompt's tensor has a first dimension for the batch, and so have the outputs."""
    pad_id: int = 0
    """After the tokens of a sequence that is shorter than another one of its response."""

    def field_name(self, name: str) -> str:
        """Return the name in the request of a field of our own request, as errors name it."""
        for prefix in sorted(self.names, key=len, reverse=True):
            rest = name.removeprefix(prefix)
            if name.startswith(prefix) and rest[:1] in ("", ".", "["):
                return self.names[prefix] + rest
        return name


def ends_another(request: pb.ModelInferRequest) -> str | None:
    """Return the id of the request that a request with `stop` ends; None for any other request."""
    if not any(tensor.name == "stop" for tensor in request.inputs):
        return None
    given = _given(request)
    if not (stop := given.get("stop")) or not stop.items[0]:
        return None
    return request_id(request, given)


def request_id(request: pb.ModelInferRequest, given: Mapping[str, Values]) -> str:
    """Return the id of a request: its own, or the value of the tensor `request_id`; "" for none."""
    numbers = given.get("request_id")
    return request.id or (str(numbers.items[0]) if numbers else "")


def to_engine(request: pb.ModelInferRequest, *, decoupled: bool) -> Asked:
    """Return what a request asks for. Raises InvalidRequest and NotSupported, which name the tensor or parameter.

    `decoupled`: a request may have more than one response.
    """
    given = _given(request)
    asked = Asked()
    asked.message.request_id = request_id(request, given)
    asked.names["request_id"] = "id" if request.id else "request_id"
    for name, values in given.items():
        if name in _FIELDS and not (name in _WORD_LISTS and values.items == [""]):
            _set_field(asked, name, values.items)
    _set_prompt(asked, given)
    _set_ends(asked, given)
    _set_guide(asked, given)
    _set_processors(asked, given)
    _set_beams(asked, given)
    _set_answer(asked, request, given, decoupled=decoupled)
    _set_parameters(asked, request.parameters)
    return asked


def _given(request: pb.ModelInferRequest) -> dict[str, Values]:
    for tensor in request.inputs:
        if tensor.name in REFUSED:
            raise NotSupported(f"{tensor.name}: this server does not take it: {REFUSED[tensor.name]}")
    unserved = {name: tensor for name, (tensor, _) in UNSERVED.items()}
    given = read_inputs(request, INPUTS | unserved)
    for name in given.keys() & unserved.keys():
        if any(given.pop(name).items):
            raise NotSupported(f"{name}: this server does not do this: {UNSERVED[name][1]}")
    return given


def _set_field(asked: Asked, name: str, items: list[Any]) -> None:
    path = _FIELDS[name][0]
    if path in asked.names:
        raise InvalidRequest(name, f"means the same as {asked.names[path]}; give one of them")
    asked.names[path] = name
    part, _, last = path.rpartition(".")
    message: Any = getattr(asked.message, part) if part else asked.message
    _checked(name, items, lambda: _put(message, last, items))


def _put(message: Any, name: str, items: list[Any]) -> None:
    current = getattr(message, name)
    if hasattr(current, "extend"):
        message.SetInParent()
        current.extend(items)
    else:
        setattr(message, name, items[0])


def _checked(name: str, items: Iterable[Any], put: Callable[[], None]) -> None:
    try:
        put()
    except ValueError:  # protobuf's message names neither the tensor nor the number
        least = min(items)
        problem = f"is {least}, must not be negative" if least < 0 else "has a number that is too large"
        raise InvalidRequest(name, problem) from None


def _set_prompt(asked: Asked, given: Mapping[str, Values]) -> None:
    if "text_input" in given and "input_ids" in given:
        raise InvalidRequest("input_ids", "cannot be combined with text_input; give one of them")
    prompt = given.get("text_input") or given.get("input_ids")
    if prompt is None:
        raise InvalidRequest("inputs", "one of the tensors text_input and input_ids is required")
    asked.batched = prompt.batched
    if lengths := given.get("input_lengths"):
        length = len(asked.message.token_ids.ids)
        if "input_ids" not in given or lengths.items[0] != length:
            raise InvalidRequest("input_lengths", f"is {lengths.items[0]}, input_ids has {length} tokens")


def _set_ends(asked: Asked, given: Mapping[str, Values]) -> None:
    sampling = asked.message.sampling
    if end := given.get("end_id"):
        token = end.items[0]
        asked.names["sampling.ignore_eos"] = asked.names["sampling.stop_token_ids"] = "end_id"
        if token == -1:
            sampling.ignore_eos = True
        else:
            _checked("end_id", end.items, lambda: sampling.stop_token_ids.append(token))
    if pad := given.get("pad_id"):
        asked.pad_id = pad.items[0]


def _set_guide(asked: Asked, given: Mapping[str, Values]) -> None:
    kinds, guides = given.get("guided_decoding_guide_type"), given.get("guided_decoding_guide")
    if kinds is None:
        if guides is not None:
            raise InvalidRequest("guided_decoding_guide", "needs a guided_decoding_guide_type")
        return
    kind = kinds.items[0]
    asked.names["grammar"] = "guided_decoding_guide"
    if kind == "json":
        if guides is not None and guides.items[0]:
            raise InvalidRequest("guided_decoding_guide", "is given with the type json, which has none")
        asked.names["grammar"] = "guided_decoding_guide_type"
        asked.message.grammar.json_object = True
    elif kind not in _GUIDES:
        raise InvalidRequest(
            "guided_decoding_guide_type", f"{kind!r} is not known; known are {', '.join(['json', *_GUIDES])}"
        )
    elif guides is None:
        raise InvalidRequest("guided_decoding_guide", f"is required with the type {kind}")
    else:
        setattr(asked.message.grammar, _GUIDES[kind], guides.items[0])
        asked.names[f"grammar.{_GUIDES[kind]}"] = "guided_decoding_guide"


def _set_processors(asked: Asked, given: Mapping[str, Values]) -> None:
    names, arguments = (
        given[name].items if name in given else [] for name in ("logits_processors", "logits_processor_arguments")
    )
    if arguments and len(arguments) != len(names):
        raise InvalidRequest(
            "logits_processor_arguments", f"has {len(arguments)} elements, logits_processors has {len(names)}"
        )
    for i, name in enumerate(names):
        asked.message.logits_processors.add(name=name, arguments=arguments[i] if arguments else "")
        asked.names[f"logits_processors[{i}].arguments"] = f"logits_processor_arguments[{i}]"
        asked.names[f"logits_processors[{i}].name"] = f"logits_processors[{i}]"


def _set_beams(asked: Asked, given: Mapping[str, Values]) -> None:
    widths = given.get("beam_width")
    width = widths.items[0] if widths else 1
    penalties = [name for name in ("length_penalty", "len_penalty") if name in given]
    asked.names["beam_search"] = "beam_width"
    if width == 1:
        # Clients of TensorRT-LLM send all three with every request.
        return
    search = asked.message.beam_search
    asked.names["beam_search.beam_width"] = "beam_width"
    if "num_return_sequences" not in given and width > 0:  # TensorRT-LLM returns every beam
        asked.message.sampling.n = width
        asked.names["sampling.n"] = "beam_width"
    _checked("beam_width", [width], lambda: setattr(search, "beam_width", width))
    for name in penalties:
        search.length_penalty = given[name].items[0]
        asked.names["beam_search.length_penalty"] = name
    if stopping := given.get("early_stopping"):
        number = stopping.items[0]
        if number not in _EARLY_STOPPING:
            raise InvalidRequest("early_stopping", f"is {number}, must be 0 (heuristic), 1 (at once) or 2 (never)")
        search.early_stopping = _EARLY_STOPPING[number]


def _set_answer(asked: Asked, request: pb.ModelInferRequest, given: Mapping[str, Values], *, decoupled: bool) -> None:
    stream = given.get("stream") or given.get("streaming")
    asked.stream = bool(stream and stream.items[0])
    if asked.stream and not decoupled:
        raise InvalidRequest("stream", "needs ModelStreamInfer; ModelInfer sends one response")
    # As Triton's models do: a whole answer begins with the prompt, a stream has what is new.
    exclude = given.get("exclude_input_in_output")
    asked.message.response.echo = not (exclude.items[0] if exclude else asked.stream)
    asked.names["response.echo"] = "exclude_input_in_output"
    wanted = {name for name in NEEDS.values() if name in given and given[name].items[0]}
    if not asked.message.HasField("beam_search"):
        wanted.discard("beam_width")
    if "return_log_probs" in wanted:
        asked.message.sampling.logprobs = 0
        asked.names["sampling.logprobs"] = "return_log_probs"
    for name in LOGITS:
        if NEEDS[name] in wanted:
            if asked.message.sampling.n > 1 and not asked.stream:
                raise NotSupported(f"{NEEDS[name]}: a whole answer of more than one sequence has no logits; use stream")
            setattr(asked.message.response, name, True)
            asked.names[f"response.{name}"] = NEEDS[name]
    asked.outputs = _outputs(request, wanted)
    asked.message.response.omit_text = not TEXTS & set(asked.outputs)


def _outputs(request: pb.ModelInferRequest, wanted: Collection[str]) -> tuple[str, ...]:
    """Return the tensors of the responses. `wanted`: the inputs of NEEDS that are true."""
    if not request.outputs:
        return tuple(name for name in OUTPUTS if name not in NEEDS or NEEDS[name] in wanted)
    for output in request.outputs:
        if output.name not in OUTPUTS:
            raise InvalidRequest("outputs", unknown("tensor", output.name, OUTPUTS))
        if output.name in NEEDS and NEEDS[output.name] not in wanted:
            raise InvalidRequest("outputs", f"{output.name} needs {NEEDS[output.name]}")
        refuse_parameters(output.name, output.parameters)
    return tuple(dict.fromkeys(output.name for output in request.outputs))


def _set_parameters(asked: Asked, parameters: Mapping[str, pb.InferParameter]) -> None:
    for name, value in parameters.items():
        match name:
            case "priority":
                level = _whole(name, value)
                if not 0 <= level <= 2 * NORMAL_PRIORITY:
                    raise InvalidRequest(name, f"is {level}, must be in [0, {2 * NORMAL_PRIORITY}]")
                asked.message.priority = NORMAL_PRIORITY - level if level else 0
            case "timeout":
                asked.names["max_queue_ms"] = name
                _checked(name, [_whole(name, value)], partial(_set_timeout, asked.message, _whole(name, value)))
            case "triton_enable_empty_final_response":
                _flag(name, value)
            case other:
                known: Collection[str] = ("priority", "timeout", FINAL_RESPONSE)
                raise InvalidRequest("parameters", unknown("parameter", other, known))


def _set_timeout(message: engine.GenerateRequest, microseconds: int) -> None:
    if microseconds:  # rounded away from 0
        message.max_queue_ms = (microseconds + 999) // 1000 if microseconds > 0 else microseconds


def _whole(name: str, value: pb.InferParameter) -> int:
    choice = value.WhichOneof("parameter_choice")
    if choice not in ("int64_param", "uint64_param"):
        raise InvalidRequest(name, f"is a {choice or 'parameter without a value'}, must be a whole number")
    return int(getattr(value, choice))


def _flag(name: str, value: pb.InferParameter) -> bool:
    if value.WhichOneof("parameter_choice") != "bool_param":
        raise InvalidRequest(name, "must be a bool_param")
    return value.bool_param
