"""Tensors in a request: names that exist, and bytes within the limit before anything runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpu_engine.api.errors import InvalidRequest
from gpu_engine.api.output_tensors import OutputSpec, WantedOutput
from gpu_engine.front.outputs_field import check_bytes, check_outputs, tensors_of
from gpu_engine.front.prompt import build_requests
from gpu_engine.front.validation import check
from protos.engine.v1 import engine_pb2 as pb
from tests.fakes import ByteTokenizer
from tests.gpu_engine.front import serving

LOGITS, HIDDEN = OutputSpec("float32", (320,)), OutputSpec("bfloat16", (8,))
LIMITS = replace(
    serving.LIMITS,
    max_output_bytes=100_000,
    outputs={"logits": LOGITS, "hidden_states.0": HIDDEN, "hidden_states.1": HIDDEN, "model.layers.0.mlp": HIDDEN},
)


def asked(*names: str, context: bool = False, **options: Any) -> pb.GenerateRequest:
    outputs = [pb.AdditionalOutput(name=name, context=context) for name in names]
    return pb.GenerateRequest(text="hello", response=pb.ResponseOptions(additional_outputs=outputs, **options))


def test_the_fields_say_which_rows_are_wanted() -> None:
    request = asked("hidden_states.1", "logits", context_logits=True, generation_logits=True)
    request.response.additional_outputs[1].context = True
    assert check_outputs(request, LIMITS) == (
        WantedOutput("context_logits", "logits", LOGITS, context=True, answer=False),
        WantedOutput("generation_logits", "logits", LOGITS, context=False, answer=True),
        WantedOutput("hidden_states.1", "hidden_states.1", HIDDEN, context=False, answer=True),
        WantedOutput("logits", "logits", LOGITS, context=True, answer=True),
    )
    assert check_outputs(asked(), LIMITS) == ()
    beams = asked(generation_logits=True)
    beams.beam_search.beam_width = 2
    with pytest.raises(InvalidRequest, match=r"^response\.generation_logits: is not supported with beam_search"):
        check_outputs(beams, LIMITS)


def test_a_model_without_outputs_says_so() -> None:
    with pytest.raises(InvalidRequest, match=r"'logits': a model with recurrent layers has no output_names$"):
        check_outputs(asked("logits"), replace(LIMITS, outputs={}))


@pytest.mark.parametrize(
    ("names", "field", "problem"),
    [
        (["hidden_states.2"], "[0].name", "'hidden_states.2' is no output of the model; near: hidden_states.1"),
        (["logits", "model.layers.0.mpl"], "[1].name", "near: model.layers.0.mlp"),
        (["x" * 9999], "[0].name", "near: logits, hidden_states.0"),
        (["logits", "logits"], "[1].name", "'logits' is given twice"),
        (["logits"] * 9, "", "has 9 outputs, at most 8 are allowed"),
    ],
)
def test_a_name_that_is_no_output_is_refused_with_the_nearest(names: list[str], field: str, problem: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(asked(*names), LIMITS, ())
    assert caught.value.field == f"response.additional_outputs{field}"
    assert problem in caught.value.problem
    assert len(str(caught.value)) < 1000


def test_the_first_sequence_alone_has_the_rows_of_the_prompt() -> None:
    wanted = check_outputs(asked("logits", context=True, context_logits=True), LIMITS)
    assert tensors_of(wanted, 0) == wanted
    assert tensors_of(wanted, 1) == (WantedOutput("logits", "logits", LOGITS, context=False, answer=True),)


@pytest.mark.parametrize("n", [1, 3])
def test_the_bytes_are_counted_from_the_prompt_and_max_tokens_before_anything_runs(n: int) -> None:
    wanted = check_outputs(asked("hidden_states.1", context=True, generation_logits=True), LIMITS)
    rows = {"prompt_length": 5, "max_tokens": 7}
    exact = n * 7 * 320 * 4 + (5 + 7 - 1) * 16 + (n - 1) * 7 * 16
    check_bytes(wanted, num_sequences=n, **rows, limits=replace(LIMITS, max_output_bytes=exact))
    with pytest.raises(InvalidRequest) as caught:
        check_bytes(wanted, num_sequences=n, **rows, limits=replace(LIMITS, max_output_bytes=exact - 1))
    assert caught.value.field == "response.generation_logits"
    assert f"may have {exact} bytes" in caught.value.problem
    assert f"at most {exact - 1} fit (a quarter of output_memory_bytes)" in caught.value.problem


def test_a_request_without_max_tokens_counts_as_long_as_the_context() -> None:
    request = asked(generation_logits=True)
    checked = check(request, replace(LIMITS, max_output_bytes=58 * 1280), ())
    with pytest.raises(InvalidRequest, match=r"59 \(max_tokens\)"):
        build_requests(
            checked, ByteTokenizer(), replace(LIMITS, max_output_bytes=58 * 1280), lambda event: None, arrived_s=0.0
        )
    (built,) = build_requests(checked, ByteTokenizer(), LIMITS, lambda event: None, arrived_s=0.0)
    assert [each.name for each in built.outputs.tensors] == ["generation_logits"]
