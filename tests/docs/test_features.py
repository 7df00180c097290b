"""docs/features.md says which features do not work together; this combines all others, and checks the refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import pytest
from google.protobuf import json_format

from gpu_engine.api.config import EngineConfig, ServerConfig
from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc
from tests.docs.conftest import PROCESSORS
from tests.docs.covering import covering_rows, pairs_of
from tests.docs.feature_effects import EFFECTS, Answer
from tests.docs.pages import ROOT, rows
from tests.docs.recorded_server import recorded_server
from tests.receipt_keys import new_key

Send = Callable[[Collection[str]], Answer | grpc.RpcError]

PAGE = ROOT / "docs/features.md"
NEEDS = {"bounds": "grammar", "fields": "bounds", "events": "bounds", "exact": "bounds"}
"""Features that have no effect without another one; within bounds an answer reaches its end."""
COMPANY = {
    "bounds": ("grammar",),
    "fields": ("grammar", "bounds"),
    "events": ("grammar", "bounds"),
    "exact": ("grammar", "bounds"),
    "min_tokens": ("stop",),
}
"""The least features with which a feature shows its effect."""
FEATURES_IN_A_ROW = 8
BASE = {"text": "abcabcabc"}
SAMPLED = {"sampling": {"seed": 8, "temperature": 0.5}}
"""With it the answer to `BASE` has tokens that features change, and an end before its 40 tokens."""
LIMIT = {"sampling": {"maxTokens": 40}}


def code(cell: str) -> str:
    """Return the text of a cell that is one code span."""
    assert (cell[0], cell[-1]) == ("`", "`"), cell
    return cell[1:-1]


FEATURES: dict[str, dict[str, Any]] = {name: json.loads(code(cell)) for name, cell in rows(PAGE, "Request features")}
REFUSED = {frozenset((first, second)): code(begins) for first, second, begins in rows(PAGE, "Pairs that are refused")}
COVERING = covering_rows(list(FEATURES), REFUSED, NEEDS, FEATURES_IN_A_ROW)


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else value
    return result


def request_with(names: Collection[str]) -> dict[str, Any]:
    """Return the fields of a request with some features."""
    prompt = {} if any("messages" in FEATURES[name] for name in names) else BASE
    drawn = {} if "beams" in names else SAMPLED
    return merged(prompt, LIMIT, drawn, *(FEATURES[name] for name in FEATURES if name in names))


def ask(stub: engine_pb2_grpc.EngineStub, fields: dict[str, Any]) -> list[pb.GenerateResponse] | grpc.RpcError:
    request = json_format.ParseDict(fields, pb.GenerateRequest())
    try:
        return list(stub.Generate(request, timeout=300))
    except grpc.RpcError as error:
        return error


VALUES = {
    *("request_id", "token_ids", "messages.template_arguments", "messages.continue_final_message"),
    *("sampling.max_tokens", "grammar.json_object", "grammar.regex", "grammar.ebnf", "grammar.lark", "grammar.choice"),
    *(
        "grammar.structural_tag",
        "grammar.grammar_id",
        "grammar.whitespace",
        "grammar.backend",
        "grammar.closed_objects",
    ),
    *("grammar.allow_unenforced", "tools.choice", "tools.name", "tools.parallel", "reasoning.enabled"),
    *(
        "reasoning.effort",
        "beam_search.length_penalty",
        "beam_search.early_stopping",
        "text",
        "sampling.masked_logprobs",
        "sampling.grammar_exact_error",
        "sampling.grammar_exact_shared_tries",
        "sampling.grammar_exact_any_spelling",
    ),
}
"""Fields of a request that are no features of their own: other forms of a prompt or a grammar, and what a feature's
other field already has."""


def fields_of(message: Any, prefix: str = "") -> set[str]:
    """Return the fields of a message that are set, those of messages inside it with a dot."""
    found = set()
    for field, value in message.ListFields():
        inner = field.message_type is not None and not field.is_repeated
        found |= (
            fields_of(value, f"{prefix}{field.name}.") or {f"{prefix}{field.name}"} if inner else {prefix + field.name}
        )
    return found


def test_every_field_of_a_request_belongs_to_a_feature() -> None:
    used = set(VALUES)
    for given in FEATURES.values():
        used |= fields_of(json_format.ParseDict(given, pb.GenerateRequest()))
    every = set()
    for field in pb.GenerateRequest.DESCRIPTOR.fields:
        inner = field.message_type is not None and not field.is_repeated and field.name != "token_ids"
        every |= {f"{field.name}.{each.name}" for each in field.message_type.fields} if inner else {field.name}
    assert every - used == set(), "a new field needs a row and a column"
    assert VALUES - every == set()


def test_each_feature_has_an_effect() -> None:
    assert list(EFFECTS) == list(FEATURES)


def test_each_pair_is_refused_or_in_a_row() -> None:
    together = set().union(*(pairs_of(row) for row in COVERING))
    assert together | REFUSED.keys() | {frozenset(("ignore_eos", name)) for name in NEEDS} == pairs_of(FEATURES)
    assert not together & REFUSED.keys()


@pytest.fixture(scope="module")
def send(model_folder: Path, adapters: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Send]:
    """Return a function that sends a request with some features to a server whose engine takes notes."""
    folder = tmp_path_factory.mktemp("noted")
    engine = EngineConfig(
        model=str(model_folder),
        adapters=adapters,
        logits_processors=PROCESSORS,
        device="cpu",
        dtype="float32",
        num_threads=1,
        max_batch_size=8,
        max_model_len=512,
        draft_index_shared=True,
    )
    server = ServerConfig(
        listen=f"unix:{folder}/s",
        grammar_dir=str(folder),
        compile_timeout_s=120.0,
        grammar_wait_s=120.0,
        stream_pace_ms=0.0,
        allow_never_preempt=True,
        output_memory_bytes=36_000_000,
        receipt_key=str(new_key(folder / "key.pem")),
    )
    with recorded_server(engine, server) as (address, notes), grpc.insecure_channel(address) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)

        def send(names: Collection[str]) -> Answer | grpc.RpcError:
            fields = request_with(names) | {"request_id": f"request {uuid4()}"}
            answer = ask(stub, fields)
            if isinstance(answer, grpc.RpcError):
                return answer
            return Answer(frozenset(names), fields, answer, notes[fields["request_id"]])

        yield send


def problems_of(row: Collection[str], answer: Answer | grpc.RpcError) -> list[str]:
    """Return what is wrong with the answer to a request with the features of a row."""
    if isinstance(answer, grpc.RpcError):
        return [f"{answer.code().name}: {answer.details()}"]
    ended = [response.index for response in answer.responses if response.finish_reason]
    failed = any(response.finish_reason == pb.FINISH_REASON_GRAMMAR_ERROR for response in answer.responses)
    problems = (
        [] if sorted(ended) == list(range(2 if "n" in row else 1)) and not failed else [f"ended: {ended}, {failed}"]
    )
    return problems + [f"no effect of {name}" for name in row if not EFFECTS[name](answer)]


def test_every_feature_has_its_effect_with_every_other(send: Send) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(send, COVERING)
        wrong = {
            row: found for row, answer in zip(COVERING, answers, strict=True) if (found := problems_of(row, answer))
        }
    assert not wrong, "\n".join(f"{', '.join(row)}: {problems}" for row, problems in wrong.items())


def dropped(send: Send, row: Collection[str], name: str) -> bool:
    """Return whether the check of a feature fails for a row whose request leaves the feature out."""
    answer = send([each for each in row if each != name])
    assert isinstance(answer, Answer), (row, name, answer)
    if name in ("whole", "cumulative"):
        # A short answer may come in one response anyway, and so does one without text and token ids.
        in_one = len(answer.noted.events) < 10 * len(answer.indexes) or {"output", "no_text"} <= {*row}
        if in_one:
            return True
    return not EFFECTS[name](replace(answer, features=frozenset(row)))


def test_a_feature_that_is_dropped_is_missed(send: Send) -> None:
    tries = {name: (name, *COMPANY.get(name, ())) for name in FEATURES}
    assert [name for name, row in tries.items() if not dropped(send, row, name)] == []


SUBSUMED = {
    ("grammar", "verified"),  # a stricter schema
    ("chat", "tools"),  # the same messages
    ("cumulative", "whole"),  # one response has all
    *(("whole", "beams"), ("cumulative", "beams")),  # a search has its answers at its end
    ("index", "beams"),  # it drafts nothing
}
"""Pairs of which the second feature has the effect of the first."""


@pytest.mark.slow
def test_a_feature_that_is_dropped_is_missed_with_every_other(send: Send) -> None:
    """Whatever another feature of a request makes the server ignore is noticed."""
    tries = [(row, name) for row in COVERING for name in row if not {(name, each) for each in row} & SUBSUMED]
    tries = [(row, name) for row, name in tries if name not in {NEEDS.get(each) for each in row}]
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda each: dropped(send, *each), tries)
        silent = [each for each, is_missed in zip(tries, found, strict=True) if not is_missed]
    assert not silent, "\n".join(f"{name} in {', '.join(row)}" for row, name in silent)


@pytest.mark.parametrize("pair", REFUSED, ids=lambda pair: " and ".join(sorted(pair)))
def test_a_refused_pair_names_its_field(server: str, pair: frozenset[str]) -> None:
    with grpc.insecure_channel(server) as channel:
        answer = ask(engine_pb2_grpc.EngineStub(channel), request_with(pair))
    assert isinstance(answer, grpc.RpcError)
    assert answer.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(answer.details()).startswith(REFUSED[pair])


@pytest.mark.parametrize("row", rows(PAGE, "Refused requests"), ids=lambda row: row[0])
def test_a_refused_request_names_its_field(server: str, row: list[str]) -> None:
    _, fields, status, begins = row
    with grpc.insecure_channel(server) as channel:
        answer = ask(engine_pb2_grpc.EngineStub(channel), json.loads(code(fields)))
    assert isinstance(answer, grpc.RpcError)
    assert answer.code().name == code(status)
    assert str(answer.details()).startswith(code(begins))
