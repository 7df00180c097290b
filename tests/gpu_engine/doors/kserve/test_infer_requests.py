"""From tensors and parameters to a request of our own: meanings, names in errors, and what is refused."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_engine.api.errors import InvalidRequest, NotSupported
from gpu_engine.doors.kserve.infer_requests import INPUTS, REFUSED, UNSERVED, Asked, ends_another, to_engine
from gpu_engine.doors.kserve.infer_responses import NEEDS, OUTPUTS
from protos.engine.v1 import engine_pb2 as engine
from protos.kserve.v2 import inference_pb2 as pb

_KINDS = {"BYTES": "bytes", "BOOL": "bool", "INT32": "int", "UINT64": "uint64", "FP32": "fp32"}
FIELDS = {datatype: f"{kind}_contents" for datatype, kind in _KINDS.items()}


def request(parameters: dict[str, dict[str, Any]] | None = None, **tensors: Any) -> pb.ModelInferRequest:
    """Return a request; a text or a number becomes a tensor with one element."""
    message = pb.ModelInferRequest(model_name="m")
    for name, value in tensors.items():
        items = value if isinstance(value, list) else [value]
        items = [item.encode() if isinstance(item, str) else item for item in items]
        tensor = INPUTS[name] if name in INPUTS else UNSERVED[name][0]
        contents = pb.InferTensorContents(**{FIELDS[tensor.datatype]: items})
        message.inputs.add(name=name, datatype=tensor.datatype, shape=[len(items)], contents=contents)
    for name, parameter in (parameters or {}).items():
        message.parameters[name].CopyFrom(pb.InferParameter(**parameter))
    return message


def asked(*, decoupled: bool = True, **tensors: Any) -> Asked:
    return to_engine(request(**{"text_input": "hi"} | tensors), decoupled=decoupled)


def refusal(message: pb.ModelInferRequest, decoupled: bool = True) -> str:
    with pytest.raises((InvalidRequest, NotSupported)) as caught:
        to_engine(message, decoupled=decoupled)
    return str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({}, {}),
        ({"max_tokens": 5, "temperature": 0.0, "top_k": 3}, {"max_tokens": 5, "temperature": 0.0, "top_k": 3}),
        ({"request_output_len": 5, "runtime_top_k": 3}, {"max_tokens": 5, "top_k": 3}),
        ({"random_seed": 2**64 - 1, "min_length": 2}, {"seed": 2**64 - 1, "min_tokens": 2}),
        ({"seed": 0}, {"seed": 0}),
        ({"num_return_sequences": 2}, {"n": 2}),
        ({"stop_words": ["a", "b"], "bad_words": ["c"]}, {"stop": ["a", "b"], "bad_words": ["c"]}),
        ({"stop_words": [""], "bad_words": [""]}, {}),
        ({"end_id": 7}, {"stop_token_ids": [7]}),
        ({"end_id": -1}, {"ignore_eos": True}),
        ({"return_log_probs": True}, {"logprobs": 0}),
        ({"return_log_probs": False, "beam_width": 1, "length_penalty": 1.0, "early_stopping": 0}, {}),
    ],
)
def test_a_tensor_sets_its_field_alone(tensors: dict[str, Any], expected: dict[str, Any]) -> None:
    assert asked(**tensors).message.sampling == engine.SamplingParams(**expected)


def test_every_input_is_handed_on() -> None:
    samples: dict[str, Any] = {"BYTES": "x", "BOOL": True, "INT32": 3, "UINT64": 3, "FP32": 0.5}
    needed = {
        "length_penalty": {"beam_width": 2},
        "len_penalty": {"beam_width": 2},
        "early_stopping": {"beam_width": 2},
        "guided_decoding_guide": {"guided_decoding_guide_type": "regex"},
        "guided_decoding_guide_type": {"guided_decoding_guide": "x"},
        "input_lengths": {"input_ids": [1, 2]},
        "logits_processor_arguments": {"logits_processors": "p"},
    }
    values: dict[str, Any] = {"guided_decoding_guide_type": "regex", "early_stopping": 2, "input_lengths": 2}
    ignored = {"pad_id", "stop", "stream", "streaming", "input_lengths"}
    for name, tensor in INPUTS.items():
        others: dict[str, Any] = {"text_input": "p"} | needed.get(name, {})
        if name in ("input_ids", "input_lengths"):
            others.pop("text_input")
        with_it = to_engine(request(**others | {name: values.get(name, samples[tensor.datatype])}), decoupled=True)
        if name in ("text_input", "input_ids", "guided_decoding_guide_type", "guided_decoding_guide"):
            assert "x" in str(with_it.message) or with_it.message.token_ids.ids == [3]
        elif name not in ignored:
            others.setdefault("text_input", "p")
            assert with_it.message != to_engine(request(**others), decoupled=True).message, name
    assert asked(pad_id=3).pad_id == 3
    assert asked(stream=True).stream
    assert asked(streaming=True).stream


@pytest.mark.parametrize(
    ("kind", "guide", "grammar"),
    [
        ("json", None, {"json_object": True}),
        ("json_schema", "{}", {"json_schema": "{}"}),
        ("regex", "a+", {"regex": "a+"}),
        ("ebnf_grammar", 'root ::= "a"', {"ebnf": 'root ::= "a"'}),
        ("structural_tag", "{}", {"structural_tag": "{}"}),
        ("lark", 'start: "a"', {"lark": 'start: "a"'}),
    ],
)
def test_a_guide_becomes_a_grammar(kind: str, guide: str | None, grammar: dict[str, Any]) -> None:
    guides = {} if guide is None else {"guided_decoding_guide": guide}
    assert asked(guided_decoding_guide_type=kind, **guides).message.grammar == engine.Grammar(**grammar)


def test_processors_have_a_name_and_arguments_and_a_stop_names_a_request() -> None:
    found = asked(logits_processors=["a", "b"], logits_processor_arguments=["", "{}"])
    assert [(each.name, each.arguments) for each in found.message.logits_processors] == [("a", ""), ("b", "{}")]
    assert found.field_name("logits_processors[1].arguments") == "logits_processor_arguments[1]"
    assert found.field_name("logits_processors[1].name") == "logits_processors[1]"
    assert len(asked(logits_processors=["a"]).message.logits_processors) == 1
    stops = [request(text_input="a"), request(stop=False, text_input="a"), request(stop=True, request_id=7)]
    assert [ends_another(each) for each in stops] == [None, None, "7"]


def test_beams_have_a_width_a_penalty_and_a_rule_for_the_end() -> None:
    search = asked(beam_width=4, length_penalty=0.5, early_stopping=1).message.beam_search
    assert search == engine.BeamSearch(beam_width=4, length_penalty=0.5, early_stopping=engine.EARLY_STOPPING_TRUE)
    assert asked(beam_width=4).message.sampling.n == 4
    assert asked(beam_width=4, num_return_sequences=2).message.sampling.n == 2
    assert "beam_scores" in asked(beam_width=4).outputs
    assert "beam_scores" not in asked(beam_width=1).outputs


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"priority": {"uint64_param": 1}}, {"priority": 999}),
        ({"priority": {"int64_param": 2000}}, {"priority": -1000}),
        ({"priority": {"uint64_param": 0}}, {}),
        ({"timeout": {"int64_param": 1_500_001}}, {"max_queue_ms": 1501}),
        ({"timeout": {"int64_param": 0}}, {}),
        ({"triton_enable_empty_final_response": {"bool_param": True}}, {}),
    ],
)
def test_parameters_set_the_fields_beside_the_tensors(parameters: Any, expected: dict[str, Any]) -> None:
    found = to_engine(request(parameters, text_input="hi"), decoupled=True).message
    names = ("priority", "max_queue_ms")
    assert {name: getattr(found, name) for name in names if getattr(found, name)} == expected


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"priority": {"uint64_param": 2001}}, "priority: is 2001, must be in [0, 2000]"),
        ({"priority": {"string_param": "1"}}, "priority: is a string_param, must be a whole number"),
        ({"priority": {}}, "priority: is a parameter without a value, must be a whole number"),
        ({"timeout": {"int64_param": -1}}, "timeout: is -1, must not be negative"),
        ({"timeout": {"int64_param": 2**62}}, "timeout: has a number that is too large"),
        ({"prioriti": {}}, "parameters: the parameter 'prioriti' is not known; did you mean 'priority'?"),
        ({"sequence_id": {}}, "parameters: the parameter 'sequence_id' is not known; known are priority"),
        ({"triton_enable_empty_final_response": {"int64_param": 1}}, "triton_enable_empty_final_response: must be"),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(parameters: Any, message: str) -> None:
    assert refusal(request(parameters, text_input="hi")).startswith(message)


def guided(kind: str | None, guide: str | None) -> dict[str, Any]:
    tensors = {"text_input": "a", "guided_decoding_guide_type": kind, "guided_decoding_guide": guide}
    return {name: value for name, value in tensors.items() if value is not None}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"text_input": "a", "input_ids": [1]}, "input_ids: cannot be combined with text_input; give one of them"),
        ({"input_ids": [1, -2]}, "input_ids: is -2, must not be negative"),
        ({"input_ids": [1, 2], "input_lengths": 3}, "input_lengths: is 3, input_ids has 2 tokens"),
        ({"text_input": "a", "input_lengths": 1}, "input_lengths: is 1, input_ids has 0 tokens"),
        ({"text_input": "a", "seed": 1, "random_seed": 1}, "random_seed: means the same as seed; give one of them"),
        ({"text_input": "a", "end_id": -2}, "end_id: is -2, must not be negative"),
        ({"text_input": "a", "beam_width": -1}, "beam_width: is -1, must not be negative"),
        ({"text_input": "a", "beam_width": 2, "early_stopping": 3}, "early_stopping: is 3, must be 0 (heuristic)"),
        (guided(None, "x"), "guided_decoding_guide: needs a guided_decoding_guide_type"),
        (guided("yaml", None), "guided_decoding_guide_type: 'yaml' is not known; known"),
        (guided("lark", None), "guided_decoding_guide: is required with the type"),
        (guided("json", "{}"), "guided_decoding_guide: is given with the type json, which has none"),
        (
            {"text_input": "a", "logits_processors": ["p", "q"], "logits_processor_arguments": ["{}"]},
            "logits_processor_arguments: has 1 elements, logits_processors has 2",
        ),
        ({"text_input": "a", "return_perf_metrics": True}, "return_perf_metrics: this server does not do this: Model"),
    ],
)
def test_a_wrong_tensor_is_refused_by_name(tensors: dict[str, Any], message: str) -> None:
    assert refusal(request(**tensors)).startswith(message)


def test_tensors_of_other_models_are_refused_unless_they_are_switched_off() -> None:
    for name, (tensor, *_) in UNSERVED.items():
        off = {"BOOL": False, "FP32": 0.0, "INT32": 0}[tensor.datatype]
        assert asked(**{name: off}).message == asked().message, name
    for name, reason in REFUSED.items():
        message = request(text_input="a")
        message.inputs.add(name=name, datatype="FP32", shape=[1])
        assert refusal(message) == f"{name}: this server does not take it: {reason}"
        assert name not in INPUTS


def test_errors_name_the_tensor_that_the_client_sent() -> None:
    found = asked(request_output_len=3, stop_words=["a"], guided_decoding_guide_type="regex", guided_decoding_guide="a")
    for name, tensor in (
        ("sampling.max_tokens", "request_output_len"),
        ("sampling.stop[3]", "stop_words[3]"),
        ("sampling.stop_token_ids", "sampling.stop_token_ids"),  # of no tensor
        ("grammar", "guided_decoding_guide"),
        ("grammar.regex", "guided_decoding_guide"),
        ("beam_search", "beam_width"),
    ):
        assert found.field_name(name) == tensor


def test_whole_answers_echo_and_text_is_left_out_where_no_output_needs_it() -> None:
    assert asked().message.response.echo
    assert not asked(stream=True).message.response.echo
    assert asked(stream=True, exclude_input_in_output=False).message.response.echo
    assert not asked(exclude_input_in_output=True).message.response.echo
    message = request(text_input="a")
    for _ in range(2):
        message.outputs.add(name="output_ids")
    found = to_engine(message, decoupled=True)
    assert found.outputs == ("output_ids",)
    assert found.message.response.omit_text
    assert not asked().message.response.omit_text
    assert set(asked(stream=True, **dict.fromkeys(NEEDS.values(), True) | {"beam_width": 2}).outputs) == set(OUTPUTS)


def raw(datatype: str, shape: list[int], content: bytes, name: str = "text_input") -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="m", raw_input_contents=[content])
    message.inputs.add(name=name, datatype=datatype, shape=shape)
    return message


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (raw("BYTES", [1], b"\1\0"), "text_input: has an element that goes beyond the 2 bytes of the tensor"),
        (raw("BYTES", [1], b"\5\0\0\0abcd"), "text_input: has an element that goes beyond the 8 bytes"),
        (raw("BYTES", [1], b""), "text_input: has 0 elements, the shape [1] says 1"),
        (raw("BYTES", [1], b"\1\0\0\0\xff"), "text_input: is not UTF-8 at byte 0"),
        (raw("BYTES", [], b""), "text_input: has the shape [], must be [1] or [1, 1]"),
        (raw("INT32", [1], b"\1\0\0"), "text_input: has the datatype 'INT32', must be BYTES"),
        (raw("INT32", [1], b"\1\0\0", "input_ids"), "input_ids: has 3 bytes, an element of INT32 has 4"),
        (raw("INT32", [-1], b"", "input_ids"), "input_ids: has the shape [-1], must be [-1] or [1, -1]"),
        (raw("INT32", [3], b"\1\0\0\0", "input_ids"), "input_ids: has 1 elements, the shape [3] says 3"),
        (
            raw("INT32", [2**40, 2**40], b"", "input_ids"),
            "input_ids: has a batch of 1099511627776; send each request by itself",
        ),
        (pb.ModelInferRequest(raw_input_contents=[b"a"]), "raw_input_contents: has 1 entries for 0 inputs"),
    ],
)
def test_elements_that_do_not_fit_are_refused(message: pb.ModelInferRequest, problem: str) -> None:
    assert refusal(message).startswith(problem)


def test_elements_are_in_one_place_and_in_the_field_of_their_datatype() -> None:
    both = raw("BYTES", [1], struct.pack("<I", 1) + b"a")
    both.inputs[0].contents.bytes_contents.append(b"a")
    assert refusal(both) == "text_input: has contents and an entry of raw_input_contents"
    other = request(text_input="a")
    other.inputs.add(name="max_tokens", datatype="INT32", shape=[1]).contents.int64_contents.append(3)
    assert refusal(other) == "max_tokens: contents: elements of INT32 are in int_contents, not int64_contents"
    twice = request(text_input="a")
    twice.inputs.append(twice.inputs[0])
    assert refusal(twice) == "text_input: is given twice"


_NAMES = st.sampled_from([*INPUTS, *UNSERVED, *REFUSED, "", "text_inputs"])
_NUMBERS = st.integers(-(2**31), 2**31 - 1)
_SHAPES = st.lists(st.integers(-2, 4), max_size=3) | st.just([1])
_CONTENTS = st.builds(
    pb.InferTensorContents,
    bool_contents=st.lists(st.booleans(), max_size=2),
    int_contents=st.lists(_NUMBERS, max_size=2),
    uint64_contents=st.lists(st.integers(0, 2**64 - 1), max_size=2),
    fp32_contents=st.lists(st.floats(width=32), max_size=2),
    bytes_contents=st.lists(st.binary(max_size=4) | st.sampled_from([b"json", b"regex"]), max_size=2),
)
_PARAMETERS = st.dictionaries(
    st.sampled_from(["priority", "timeout", "triton_enable_empty_final_response", "x"]),
    st.builds(pb.InferParameter, int64_param=st.integers(-(2**63), 2**63 - 1))
    | st.builds(pb.InferParameter, bool_param=st.booleans())
    | st.builds(pb.InferParameter, double_param=st.floats()),
    max_size=2,
)


@st.composite
def _tensors(draw: st.DrawFn) -> pb.ModelInferRequest.InferInputTensor:
    """A tensor of any name, mostly with its datatype and elements for it."""
    name = draw(_NAMES)
    datatype = (
        INPUTS[name].datatype if name in INPUTS and draw(st.integers(0, 9)) else draw(st.sampled_from([*FIELDS, "FP8"]))
    )
    contents = draw(_CONTENTS)
    if datatype in FIELDS and draw(st.integers(0, 9)):
        for field in set(FIELDS.values()) - {FIELDS[datatype]}:
            contents.ClearField(field)
    return pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=draw(_SHAPES), contents=contents)


@settings(max_examples=80)
@given(st.lists(_tensors(), max_size=4), st.lists(st.binary(max_size=9), max_size=4), _PARAMETERS, st.booleans())
def test_any_request_is_understood_or_refused_with_a_reason(
    tensors: list[Any], raw_contents: list[bytes], parameters: dict[str, Any], decoupled: bool
) -> None:
    message = pb.ModelInferRequest(inputs=tensors, parameters=parameters)
    if decoupled and len(raw_contents) == len(tensors):
        message.raw_input_contents.extend(raw_contents)
        for tensor in message.inputs:
            tensor.ClearField("contents")
    refused: Exception | None = None
    try:
        ends_another(message)
        to_engine(message, decoupled=decoupled)
    except (InvalidRequest, NotSupported) as error:
        refused = error
    assert refused is None or ": " in str(refused)
