"""Every limit of the proto, one row each: the field is named, and so is the limit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from gpu_engine.api.errors import InvalidRequest
from gpu_engine.api.request import (
    BeamParams,
    EarlyStopping,
    GrammarKind,
    Outputs,
    ResponseParams,
    SamplingParams,
    Scheduling,
    Speculation,
)
from gpu_engine.front.validation import check, check_prompt_length
from protos.engine.v1 import engine_pb2 as pb
from service_runtime.repetition import RepetitionLimit
from tests.gpu_engine.front.serving import LIMITS, conversation

Change = Callable[[pb.GenerateRequest], object]


def request(change: Change | None = None) -> pb.GenerateRequest:
    message = pb.GenerateRequest(text="hello")
    if change:
        change(message)
    return message


def sampling(**fields: object) -> Change:
    return lambda m: m.sampling.MergeFrom(pb.SamplingParams(**fields))  # type: ignore[arg-type]


def grammar(**fields: object) -> Change:
    return lambda m: m.grammar.CopyFrom(pb.Grammar(**fields))  # type: ignore[arg-type]


def prompt(**fields: object) -> Change:
    return lambda m: m.MergeFrom(pb.GenerateRequest(**fields))  # type: ignore[arg-type]


def response(**fields: object) -> Change:
    return prompt(response=pb.ResponseOptions(**fields))  # type: ignore[arg-type]


def drafts(count: int) -> Change:
    return prompt(speculation=pb.Speculation(num_draft_tokens=count))


def processors(*names: str, arguments: str = "") -> Change:
    """Add processors; the last one has the arguments."""
    each = [pb.LogitsProcessor(name=name) for name in names]
    each[-1].arguments = arguments
    return prompt(logits_processors=each)


def beams(width: int = 2, change: Change | None = None, **fields: object) -> Change:
    def set_beams(m: pb.GenerateRequest) -> None:
        m.beam_search.MergeFrom(pb.BeamSearch(beam_width=width, **fields))  # type: ignore[arg-type]
        if change:
            change(m)

    return set_beams


WITH_GRAMMAR_AND_IGNORE_EOS = pb.GenerateRequest(
    grammar=pb.Grammar(json_object=True), sampling=pb.SamplingParams(ignore_eos=True)
)
WITH_BEAMS = "not allowed together with beam_search"
BAD: list[tuple[str, str, Change]] = [
    ("beam_search.beam_width", "in [2, 6]", beams(0)),
    ("beam_search.beam_width", "in [2, 6]", beams(1)),
    ("beam_search.beam_width", "is 7, must be in [2, 6] (max_beam_width)", beams(7)),
    ("beam_search.length_penalty", "[-5, 5]", beams(length_penalty=5.5)),
    ("beam_search.length_penalty", "[-5, 5]", beams(length_penalty=math.nan)),
    ("beam_search.early_stopping", "is 9", beams(early_stopping=9)),
    ("sampling.n", "at most beam_width (2)", beams(2, sampling(n=3))),
    ("sampling.stop_token_ids", "at most 10 with 6 beams", beams(6, sampling(stop_token_ids=range(11)))),
    ("sampling.temperature", WITH_BEAMS, beams(2, sampling(temperature=0.0))),
    ("sampling.top_p", WITH_BEAMS, beams(2, sampling(top_p=1.0))),
    ("sampling.top_k", WITH_BEAMS, beams(2, sampling(top_k=0))),
    ("sampling.min_p", WITH_BEAMS, beams(2, sampling(min_p=0.0))),
    ("sampling.seed", WITH_BEAMS, beams(2, sampling(seed=1))),
    ("sampling.stop", WITH_BEAMS, beams(2, sampling(stop=["x"]))),
    ("sampling.logprobs", WITH_BEAMS, beams(2, sampling(logprobs=0))),
    ("speculation.num_draft_tokens", WITH_BEAMS, beams(2, drafts(1))),
    ("max_queue_ms", "at least 1", prompt(max_queue_ms=0)),
    ("never_preempt", "allow_never_preempt", prompt(never_preempt=True)),
    (
        "response.additional_outputs[0].name",
        "output_names",
        response(additional_outputs=[pb.AdditionalOutput(name="x")]),
    ),
    ("sampling.max_tokens", "at least 1", sampling(max_tokens=0)),
    ("sampling.temperature", "[0, 100]", sampling(temperature=-1.0)),
    ("sampling.temperature", "[0, 100]", sampling(temperature=100.5)),
    ("sampling.temperature", "finite", sampling(temperature=math.nan)),
    ("sampling.temperature", "finite", sampling(temperature=math.inf)),
    ("sampling.top_p", "(0, 1]", sampling(top_p=0.0)),
    ("sampling.top_p", "(0, 1]", sampling(top_p=1.5)),
    ("sampling.top_p", "finite", sampling(top_p=-math.inf)),
    ("sampling.top_k", "at least -1", sampling(top_k=-2)),
    ("sampling.min_p", "[0, 1]", sampling(min_p=-0.5)),
    ("sampling.min_p", "finite", sampling(min_p=math.nan)),
    ("sampling.repetition_penalty", "(0, 10]", sampling(repetition_penalty=0.0)),
    ("sampling.repetition_penalty", "(0, 10]", sampling(repetition_penalty=11.0)),
    ("sampling.presence_penalty", "[-2, 2]", sampling(presence_penalty=2.5)),
    ("sampling.frequency_penalty", "[-2, 2]", sampling(frequency_penalty=-2.5)),
    ("sampling.frequency_penalty", "finite", sampling(frequency_penalty=math.nan)),
    ("sampling.stop", "at most 16", sampling(stop=[str(i) for i in range(17)])),
    ("sampling.stop[1]", "empty", sampling(stop=["a", ""])),
    ("sampling.stop[0]", "at most 256", sampling(stop=["\u00e9" * 129])),
    ("sampling.stop_token_ids[1]", "[0, 320)", sampling(stop_token_ids=[0, 320])),
    ("sampling.bad_token_ids[0]", "[0, 320)", sampling(bad_token_ids=[2**32 - 1])),
    ("sampling.bad_token_ids", "all 320", sampling(bad_token_ids=list(range(320)))),
    ("sampling.logit_bias", "has the token 320, token ids are in [0, 320)", sampling(logit_bias={1: 2.0, 320: 1.0})),
    ("sampling.logit_bias[7]", "is -100.5, must be in [-100, 100]", sampling(logit_bias={7: -100.5})),
    ("sampling.logit_bias[7]", "is nan, must be in [-100, 100]", sampling(logit_bias={7: math.nan})),
    ("sampling.logit_bias", "has 1025 tokens, at most 1024", sampling(logit_bias=dict.fromkeys(range(1025), 1.0))),
    ("sampling.bad_words", "at most 64", sampling(bad_words=[str(i) for i in range(65)])),
    ("sampling.bad_words[0]", "empty", sampling(bad_words=[""])),
    ("sampling.logprobs", "at most 20", sampling(logprobs=21)),
    ("response.prompt_logprobs", "is 21, must be at most 20", response(prompt_logprobs=21)),
    ("sampling.n", "at least 1", sampling(n=0)),
    ("sampling.n", "at most 4", sampling(n=5)),
    ("speculation.num_draft_tokens", "at most 7", drafts(8)),
    ("request_id", "at most 128", prompt(request_id="x" * 129)),
    ("request_id", "control", prompt(request_id="a\nb")),
    ("request_id", "running", prompt(request_id="taken")),
    ("priority", "[-1000, 1000]", prompt(priority=1001)),
    ("priority", "[-1000, 1000]", prompt(priority=-1001)),
    ("cache_salt", "has 258 bytes, at most 256", prompt(cache_salt="\u00e9" * 129)),
    ("logits_processors", "has 9 processors, at most 8", processors(*["a"] * 9)),
    ("logits_processors[1].arguments", "has 65537 bytes, at most 65536", processors("a", "b", arguments=" " * 65537)),
    ("logits_processors[0].name", "'a' is no logits processor; this server has none", processors("a")),
    ("prompt", "required", lambda m: m.ClearField("text")),
    ("text", "empty", prompt(text="")),
    ("text", "at most 1000 (max_prompt_bytes)", prompt(text="x" * 1001)),
    ("text", "1002 bytes", prompt(text="\u00e9" * 501)),
    ("token_ids.ids", "empty", prompt(token_ids=pb.TokenIds())),
    ("token_ids.ids[1]", "[0, 320)", prompt(token_ids=pb.TokenIds(ids=[1, 320]))),
    ("token_ids.ids", "has 64 tokens, at most 63 fit (max_model_len 64", prompt(token_ids=pb.TokenIds(ids=[1] * 64))),
    ("messages.messages", "empty", prompt(messages=pb.ChatMessages())),
    ("messages.messages[1].role", "empty", prompt(messages=conversation(("user", "a"), ("", "b")))),
    ("messages.messages", "at most 1000", prompt(messages=conversation(("user", "x" * 1000)))),
    ("grammar.spec", "required", grammar()),
    ("grammar.json_object", "must be true", grammar(json_object=False)),
    ("grammar.json_schema", "empty", grammar(json_schema="")),
    ("grammar.json_schema", "empty", grammar(json_schema=" \n")),
    ("grammar.regex", "empty", grammar(regex="")),
    ("grammar.ebnf", "empty", grammar(ebnf="")),
    ("grammar.lark", "empty", grammar(lark="")),
    ("grammar.structural_tag", "empty", grammar(structural_tag="")),
    ("grammar.choice.choices", "empty", grammar(choice=pb.Choice())),
    ("grammar.choice.choices[1]", "empty", grammar(choice=pb.Choice(choices=["a", ""]))),
    ("grammar.whitespace", "99", grammar(regex="a", whitespace=99)),
    ("grammar.backend", "77", grammar(regex="a", backend=77)),
    ("sampling.ignore_eos", "grammar", lambda m: m.MergeFrom(WITH_GRAMMAR_AND_IGNORE_EOS)),
    ("client_id", "has 130 bytes, at most 128", prompt(client_id="\u00e9" * 65)),
    ("client_id", "control", prompt(client_id="a\nb")),
]


@pytest.mark.parametrize(("field", "limit", "change"), BAD, ids=[f"{field}-{limit}" for field, limit, _ in BAD])
def test_a_bad_field_is_named_with_its_limit(field: str, limit: str, change: Change) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(request(change), LIMITS, {"taken"})
    assert caught.value.field == field
    assert limit in str(caught.value)


def test_unset_fields_take_the_stated_defaults() -> None:
    checked = check(request(), LIMITS, ())
    params = checked.params
    assert (checked.n, checked.max_tokens, checked.bad_words) == (1, None, ())
    assert params.sampling == SamplingParams(max_tokens=LIMITS.max_model_len, seed=params.sampling.seed)
    assert (params.scheduling, params.outputs, params.response) == (Scheduling(), Outputs(), ResponseParams())
    assert params.speculation == Speculation(7, 15)
    assert params.grammar is None
    assert len(checked.request_id) == 32
    assert 0 <= params.sampling.seed < 2**64
    assert params.sampling.seed != check(request(), LIMITS, ()).params.sampling.seed


def test_unset_fields_take_the_models_defaults_and_a_request_overrides_them() -> None:
    own = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    limits = replace(LIMITS, sampling_defaults=own)
    unset = check(request(), limits, ()).params.sampling
    assert {name: getattr(unset, name) for name in own} == own
    given = check(request(sampling(temperature=0.0, top_p=1.0, top_k=0)), limits, ()).params.sampling
    assert (given.temperature, given.top_p, given.top_k, given.min_p) == (0.0, 1.0, 0, 0.1)


def test_the_longest_prompt_leaves_room_for_one_token() -> None:
    for most in (64, 65):
        check_prompt_length("text", most - 1, most)
        with pytest.raises(InvalidRequest, match=f"has {most} tokens, at most {most - 1} fit"):
            check_prompt_length("text", most, most)


def test_values_at_the_limits_pass() -> None:
    lowest = {"temperature": 0.0, "top_k": -1, "presence_penalty": -2.0, "max_tokens": 1, "seed": 0}
    highest = {"top_p": 1.0, "min_p": 1.0, "n": 4, "logprobs": 20, "logit_bias": {7: 100.0, 8: -100.0}}
    params = check(request(sampling(**lowest, **highest)), LIMITS, ()).params
    assert (params.sampling.temperature, params.sampling.top_k, params.sampling.seed) == (0.0, 0, 0)
    assert (params.outputs.logprobs, params.sampling.logit_bias) == (20, ((7, 100.0), (8, -100.0)))
    assert check(request(sampling(max_tokens=2**32 - 1)), LIMITS, ()).max_tokens == 2**32 - 1
    for named in (0, 3, 7):
        assert check(request(drafts(named)), LIMITS, ()).params.speculation == Speculation(named, named)


def test_the_source_of_a_grammar_is_what_was_sent() -> None:
    choice = pb.Choice(choices=["a", '"'])
    for change, source in (
        (grammar(choice=choice, backend=2, whitespace=1), '["a", "\\""]'),
        (grammar(regex=" "), " "),
    ):
        spec = check(request(change), LIMITS, ()).params.grammar
        assert spec is not None
        assert spec.source == source
    assert (spec.kind, spec.backend, spec.whitespace) == (GrammarKind.REGEX, 0, 0)


def test_a_beam_search_has_no_drafts_and_its_defaults_are_transformers() -> None:
    checked = check(request(beams(4, sampling(n=3))), LIMITS, ())
    assert checked.params.beams == BeamParams(4, 1.0, EarlyStopping.HEURISTIC, 3)
    assert (checked.params.speculation, checked.n) == (Speculation(0, 0), 3)
    chosen = check(
        request(beams(2, drafts(0), length_penalty=-0.5, early_stopping=pb.EARLY_STOPPING_NEVER)), LIMITS, ()
    )
    assert chosen.params.beams == BeamParams(2, -0.5, EarlyStopping.NEVER)
    with pytest.raises(InvalidRequest, match=r"^beam_search: .*max_beam_width or max_batch_size is below 2"):
        check(request(beams()), replace(LIMITS, max_beam_width=0), ())


def test_the_servers_settings_hold_for_a_request_without_its_own() -> None:
    server = replace(LIMITS, max_queue_ms=500, repetition=RepetitionLimit(6, 1, 8))
    params = check(request(), server, ()).params
    assert (params.scheduling.max_queue_s, params.sampling.repetition) == (0.5, RepetitionLimit(6, 1, 8, 0))
    own = check(request(lambda m: m.MergeFrom(OWN_SETTINGS)), server, ()).params
    assert (own.scheduling.max_queue_s, own.sampling.repetition) == (0.001, None)
    assert check(request(beams()), server, ()).params.sampling.repetition is None


OWN_SETTINGS = pb.GenerateRequest(max_queue_ms=1, sampling=pb.SamplingParams(repetition_max_pattern_size=0))
