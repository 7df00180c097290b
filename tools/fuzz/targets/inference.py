"""Bytes at KServe's service, before an engine that answers at once.

The tensors of a request must fit their descriptions, each of them, before any is read: bytes and single fields that
change at random fit none. So changes here are of whole tensors, of the names, datatypes and shapes that the service
knows. Invariant: as in engine_services.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

from google.protobuf.message import DecodeError

from tools.fuzz import rpc
from tools.fuzz.target import Mutate, Target
from tools.fuzz.targets.engine_services import VERSION, method_of, service_target
from tools.fuzz.words import REQUEST

MODEL = "lockstep"
_DATATYPES = {
    "BOOL": "bool_contents",
    "BYTES": "bytes_contents",
    "FP32": "fp32_contents",
    "INT32": "int_contents",
    "UINT64": "uint64_contents",
}
"""Datatype -> the field that has its elements."""
_NUMBERS: Mapping[str, tuple[Any, ...]] = {
    "BOOL": (True, False),
    "FP32": (0.0, 0.5, 0.9, 1.0, 1.0, 2.0, -1.0, 1e30, float("inf"), float("nan")),
    "INT32": (0, 1, 1, 2, 3, 4, 5, 8, 16, 97, 255, -1, (1 << 31) - 1, -(1 << 31)),
    "UINT64": (0, 1, 1, 2, 7, 1 << 63, (1 << 64) - 1),
}
_GUIDES = (
    *('{"type":"object"}', '{"type":"integer","maximum":9}', "[a-c]{2}", 'root ::= "a" | "b"', 'start: "a"', "", "{"),
    '{"type":"structural_tag","format":{"type":"any_text"}}',
)
_TEXTS: Mapping[str, tuple[str, ...]] = {
    "text_input": ("hello", "a", "", "\u00e9", "x" * 300),
    "guided_decoding_guide_type": ("json", "json_schema", "regex", "ebnf_grammar", "structural_tag", "lark", "xml"),
    "guided_decoding_guide": _GUIDES,
    "logits_processors": ("bias", "nope", ""),
    "logits_processor_arguments": ("{}", "[]", "", "{"),
}
_ANY_TEXT = ("a", "b", "", "\n", "ab", "\u00e9", "x" * 70)
_PARAMETERS = ("priority", "timeout", "triton_enable_empty_final_response", "sequence_id")


def kserve_service() -> Target:
    """Return the target of KServe's service."""
    # Its messages have the names of Triton's client, which a process may have loaded already.
    from gpu_engine.doors.kserve.infer_requests import INPUTS
    from gpu_engine.doors.kserve.inference_servicer import InferenceServicer
    from protos.kserve.v2 import inference_pb2

    service = inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    words = (*REQUEST, *INPUTS, *_DATATYPES, *_PARAMETERS, MODEL, "INT64", "shared_memory_region")
    target = service_target(service, lambda calls: InferenceServicer(calls, version=VERSION), words)
    return replace(target, mutate=_mutation(target.mutate))


def _mutation(plain: Mutate) -> Mutate:
    from protos.kserve.v2 import inference_pb2

    known = rpc.methods(inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"])

    def mutate(data: bytes, random: Random) -> bytes:
        method = method_of(known, data)
        if method.input_type.name != "ModelInferRequest" or random.random() < 0.35:
            return plain(data, random)
        if not method.client_streaming:
            return data[:1] + mutate_request(data[1:], random)
        messages = rpc.split(data[1:]) or [b""]
        at = random.randrange(len(messages))
        messages[at] = mutate_request(messages[at], random)
        if random.random() < 0.2:
            messages.insert(random.randint(0, len(messages)), random.choice(messages))
        return data[:1] + rpc.joined(messages[:8])

    return mutate


def mutate_request(data: bytes, random: Random) -> bytes:
    """Return another request: with tensors, outputs or parameters that were set, replaced or left out."""
    from gpu_engine.doors.kserve.infer_requests import INPUTS, REFUSED, UNSERVED
    from gpu_engine.doors.kserve.infer_responses import OUTPUTS
    from protos.kserve.v2 import inference_pb2 as pb

    request = pb.ModelInferRequest()
    try:
        request.ParseFromString(data)
    except DecodeError:
        request.Clear()
    if len(request.raw_input_contents) != len(request.inputs):
        del request.raw_input_contents[:]
    if not request.inputs:
        request.model_name = MODEL
        _put(request, "text_input", INPUTS["text_input"], random, raw=random.random() < 0.3)
    for _ in range(random.randint(1, 4)):
        kind, raw = random.randrange(10), bool(request.raw_input_contents)
        if kind < 6:
            unserved = {name: tensor for name, (tensor, _) in UNSERVED.items()}
            known = INPUTS if random.random() < 0.95 else unserved | dict.fromkeys(REFUSED, INPUTS["text_input"])
            name = random.choice(list(known))
            _put(request, name, known[name], random, raw=raw)
        elif kind == 6 and len(request.inputs) > 1:
            _drop(request, random.randrange(len(request.inputs)))
        elif kind == 7:
            request.outputs.add(name=random.choice(list(OUTPUTS)))
        elif kind == 8:
            _set_parameter(request.parameters[random.choice(_PARAMETERS)], random)
        else:
            request.id = random.choice(("", "1", "a" * 300))
            request.model_name = random.choice((MODEL, MODEL, "fuzzed", ""))
    return request.SerializeToString(deterministic=True)


def _put(request: Any, name: str, described: Any, random: Random, *, raw: bool) -> None:
    """Add a tensor, in place of one of that name."""
    from gpu_engine.doors.kserve.tensors import SCALAR, add_output
    from protos.kserve.v2 import inference_pb2 as pb

    for i in reversed([i for i, tensor in enumerate(request.inputs) if tensor.name == name]):
        _drop(request, i)
    count = 1 if described.shape == SCALAR else random.choice((0, 1, 1, 2, 3, 17))
    values = _NUMBERS.get(described.datatype) or _TEXTS.get(name, _ANY_TEXT)
    items = [random.choice(values) for _ in range(count)]
    if name == "input_lengths" and random.random() < 0.7:
        items = [len(tensor.contents.int_contents) for tensor in request.inputs if tensor.name == "input_ids"] or [1]
    shape = [1, count] if random.random() < 0.5 else [count]
    if random.random() < 0.03:
        shape.append(random.choice((0, 1, -1, 1 << 40)))
    tensor = request.inputs.add(name=name, datatype=described.datatype, shape=shape)
    if raw:
        packed = pb.ModelInferResponse()
        add_output(packed, name, described.datatype, shape, items)
        request.raw_input_contents.append(packed.raw_output_contents[0])
    else:
        field = getattr(tensor.contents, _DATATYPES[described.datatype])
        field.extend(item.encode() if isinstance(item, str) else item for item in items)


def _drop(request: Any, index: int) -> None:
    del request.inputs[index]
    if request.raw_input_contents:
        del request.raw_input_contents[index]


def _set_parameter(value: Any, random: Random) -> None:
    match random.randrange(5):
        case 0:
            value.bool_param = random.random() < 0.5
        case 1 | 2:
            value.int64_param = random.choice((0, 1, 1000, 2000, 2001, -1, 1 << 62, -(1 << 63)))
        case 3:
            value.uint64_param = random.choice((0, 1, 1000, (1 << 64) - 1))
        case _:
            value.string_param = random.choice(_ANY_TEXT)
