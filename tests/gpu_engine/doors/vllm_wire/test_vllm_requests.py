"""vLLM's request becomes our own: no field is dropped, and errors have the names of vLLM's fields."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from smg_grpc_proto import vllm_engine_pb2 as vllm

from gpu_engine.api.errors import InvalidRequest, NotSupported
from gpu_engine.doors.vllm_wire.vllm_requests import UNSERVED, field_name, likely_lark, to_engine

TEXT_ALONE = {"sampling_params.spaces_between_special_tokens", "sampling_params.grammar_from_first_token"}
"""Handed on in no field: tokens do not depend on the first, and grammars always begin as the second says."""


def translated(**sampling: Any) -> dict[str, Any]:
    request = vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=[1]), sampling_params=sampling)
    return dict(json_format.MessageToDict(to_engine(request), preserving_proto_field_name=True))


def test_a_prompt_of_tokens_and_one_of_text() -> None:
    given = vllm.TokenizedInput(input_ids=[5, 6], original_text="ab")
    assert list(to_engine(vllm.GenerateRequest(request_id="r", tokenized=given)).token_ids.ids) == [5, 6]
    request = to_engine(vllm.GenerateRequest(request_id="r", text="ab"))
    assert (request.request_id, request.text, request.response.omit_text) == ("r", "ab", True)
    assert to_engine(vllm.GenerateRequest()).WhichOneof("prompt") is None


def test_every_value_of_the_sampling_parameters_arrives() -> None:
    given = {
        "temperature": 0.0, "top_p": 0.5, "top_k": 3, "min_p": 0.25, "frequency_penalty": -1.0, "presence_penalty": 1.0,
        "repetition_penalty": 1.5, "max_tokens": 9, "min_tokens": 2, "stop": ["a", "b"], "stop_token_ids": [7],
        "skip_special_tokens": True, "ignore_eos": True, "n": 2, "logprobs": 0, "include_stop_str_in_output": True,
    }  # fmt: skip
    assert translated(**given)["sampling"] == given
    unset = {"token_ids": {"ids": [1]}, "sampling": {"skip_special_tokens": False}, "response": {"omit_text": True}}
    assert translated() == unset, "scalars without presence are unset at zero"
    assert translated(prompt_logprobs=2)["response"] == {"omit_text": True, "prompt_logprobs": 2}
    assert translated(logit_bias={5: -1.5})["sampling"]["logit_bias"] == {"5": -1.5}
    assert translated(seed=7)["sampling"]["seed"] == "7"
    assert translated(seed=-1)["sampling"]["seed"] == str(2**64 - 1), "a sign is a part of the seed's bits"


@pytest.mark.parametrize(
    ("constraint", "grammar"),
    [
        ({"json_schema": "{}"}, {"json_schema": "{}"}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"json_object": True}, {"json_object": True}),
        ({"structural_tag": "{}"}, {"structural_tag": "{}"}),
        ({"choice": {"choices": ["a", "b"]}}, {"choice": {"choices": ["a", "b"]}}),
        ({"choice": {}}, {"choice": {}}),
        ({"grammar": 'root ::= "a"'}, {"ebnf": 'root ::= "a"'}),
        ({"grammar": 'start: "a"'}, {"lark": 'start: "a"'}),
    ],
)
def test_structured_outputs_are_our_grammars(constraint: dict[str, Any], grammar: dict[str, Any]) -> None:
    assert translated(**constraint)["grammar"] == grammar
    assert likely_lark('// root ::= "a"\nstart: "a"  # ::='), "a rule of EBNF in a comment"
    assert not likely_lark('# start: "a"\nroot ::= "a"')


SERVED = {
    *("request_id", "tokenized", "text", "sampling_params", "stream", "data_parallel_rank"),
    *("kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "extra_mm_inputs", "media_refs"),
}


def filled(message: Any, field: FieldDescriptor) -> None:
    """Set `field` of `message` to a value that is not its default."""
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        if field.message_type.GetOptions().map_entry:
            getattr(message, field.name)[1] = 1.0
        elif field.is_repeated:
            getattr(message, field.name).add()
        else:
            getattr(message, field.name).SetInParent()
        return
    value: Any = "1" if field.cpp_type == FieldDescriptor.CPPTYPE_STRING else 1
    if field.is_repeated:
        getattr(message, field.name).append(value)
    else:
        setattr(message, field.name, value)


def outcome(request: vllm.GenerateRequest) -> bytes | str:
    """Return our own request, or the name that the error begins with."""
    try:
        return to_engine(request).SerializeToString(deterministic=True)
    except (InvalidRequest, NotSupported) as error:
        return str(error).partition(":")[0]


def test_no_field_of_a_request_is_dropped() -> None:
    """A new field of smg-grpc-proto is handed on, or refused by name."""
    before = outcome(vllm.GenerateRequest(text="x"))
    for field in vllm.SamplingParams.DESCRIPTOR.fields:
        request, name = vllm.GenerateRequest(text="x"), f"sampling_params.{field.name}"
        filled(request.sampling_params, field)
        after = outcome(request)
        assert (after == before) == (name in TEXT_ALONE), name
        assert isinstance(after, bytes) or after == name
    fields = vllm.GenerateRequest.DESCRIPTOR.fields
    assert {field.name for field in fields} == SERVED
    for field in fields:
        if field.name in UNSERVED:
            request = vllm.GenerateRequest(text="x")
            filled(request, field)
            assert outcome(request) == field.name


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data_parallel_rank": 1}, "data_parallel_rank: is 1"),
        ({"sampling_params": {"top_k": 2**31}}, "sampling_params.top_k: is 2147483648"),
        ({"sampling_params": {"logprobs": -1}}, "sampling_params.logprobs: is -1"),
        ({"sampling_params": {"prompt_logprobs": -1}}, "sampling_params.prompt_logprobs: is -1"),
        ({"sampling_params": {"logit_bias": {-1: 1.0}}}, "sampling_params.logit_bias: has the token -1"),
        ({"sampling_params": {"truncate_prompt_tokens": 5}}, "sampling_params.truncate_prompt_tokens: "),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((InvalidRequest, NotSupported)) as caught:
        to_engine(vllm.GenerateRequest(text="x", **fields))
    assert str(caught.value).startswith(message)
    assert to_engine(vllm.GenerateRequest(text="x", data_parallel_rank=0)).text == "x"


def test_a_field_of_a_newer_release_is_refused_by_its_number() -> None:
    # Field 999, a varint of 1: a constraint of tomorrow must not turn into free text.
    unknown = b"\xb8\x3e\x01"
    with pytest.raises(NotSupported, match=r"^sampling_params\.999: "):
        to_engine(vllm.GenerateRequest(sampling_params=vllm.SamplingParams.FromString(unknown)))
    with pytest.raises(NotSupported, match=r"^999: "):
        to_engine(vllm.GenerateRequest.FromString(unknown))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("sampling.temperature", "sampling_params.temperature"),
        ("sampling.stop[1]", "sampling_params.stop[1]"),
        ("token_ids.ids[3]", "tokenized.input_ids[3]"),
        ("response.prompt_logprobs", "sampling_params.prompt_logprobs"),
        ("prompt", "input"),
        ("request_id", "request_id"),
        ("grammar", "sampling_params.choice"),
        ("grammar.choice.choices[2]", "sampling_params.choice.choices[2]"),
    ],
)
def test_errors_have_the_names_of_the_fields_of_vllm(ours: str, theirs: str) -> None:
    request = vllm.GenerateRequest(sampling_params={"choice": {"choices": ["a"]}})
    assert field_name(request, ours) == theirs
    guided = vllm.GenerateRequest(sampling_params={"grammar": "start: x"})
    assert field_name(guided, "grammar.lark") == field_name(guided, "grammar") == "sampling_params.grammar"
