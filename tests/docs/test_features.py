"""docs/features.md says which features work together; this runs its pairs and its refusals."""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

import grpc
import pytest
from google.protobuf import json_format

from gpu_engine.api.config import EngineConfig, ServerConfig
from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc
from tests.docs.pages import ROOT, rows

PAGE = ROOT / "docs/features.md"
PARTS = 4
"""The pairs are run in so many parts; all but the first are slow. Each part has every feature, with others."""


def code(cell: str) -> str:
    """Return the text of a cell that is one code span."""
    assert (cell[0], cell[-1]) == ("`", "`"), cell
    return cell[1:-1]


def feature_fields() -> dict[str, dict[str, Any]]:
    return {name: json.loads(code(cell)) for name, cell in rows(PAGE, "Request features")}


def pairs() -> dict[tuple[str, str], bool]:
    """Return whether the page says that each pair of features works."""
    names = list(feature_fields())
    found = {}
    for row in rows(PAGE, "Pairs of request features"):
        for column, cell in zip(names[1:], row[1:], strict=True):
            if cell:
                assert cell in ("yes", "no")
                found[row[0], column] = cell == "yes"
    return found


def part_of(part: int) -> dict[tuple[str, str], bool]:
    """Return the pairs of one part: those whose two places on the page add up to its number, modulo `PARTS`."""
    place = {name: number for number, name in enumerate(feature_fields())}
    return {pair: works for pair, works in pairs().items() if sum(place[name] for name in pair) % PARTS == part}


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else value
    return result


def ask(stub: engine_pb2_grpc.EngineStub, fields: dict[str, Any]) -> list[pb.GenerateResponse] | grpc.RpcError:
    request = json_format.ParseDict(fields, pb.GenerateRequest())
    try:
        return list(stub.Generate(request, timeout=300))
    except grpc.RpcError as error:
        return error


def test_every_pair_has_one_cell() -> None:
    assert list(pairs()) == list(itertools.combinations(feature_fields(), 2))


def test_every_pair_is_in_one_part_and_every_feature_in_each() -> None:
    parts = [part_of(part) for part in range(PARTS)]
    assert sorted(pair for part in parts for pair in part) == sorted(pairs())
    for part in parts:
        assert set(itertools.chain.from_iterable(part)) == set(feature_fields())
        assert set(part.values()) == {True, False}


VALUES = {
    *("request_id", "token_ids", "messages.template_arguments", "messages.continue_final_message"),
    *("sampling.max_tokens", "grammar.json_object", "grammar.regex", "grammar.ebnf", "grammar.lark", "grammar.choice"),
    *("grammar.structural_tag", "grammar.grammar_id", "grammar.whitespace", "grammar.backend"),
    *("grammar.allow_unenforced", "tools.choice", "tools.name", "tools.parallel", "reasoning.enabled"),
    *("reasoning.effort", "beam_search.length_penalty", "beam_search.early_stopping", "text"),
}
"""Fields of a request that are no features of their own: other forms of a prompt or a grammar, and what a feature's
other field already has."""


def fields_of(message: Any, prefix: str = "") -> set[str]:
    """Return the fields of a message that are set, those of messages inside of it with a dot."""
    found = set()
    for field, value in message.ListFields():
        inner = field.message_type is not None and not field.is_repeated
        found |= (
            fields_of(value, f"{prefix}{field.name}.") or {f"{prefix}{field.name}"} if inner else {prefix + field.name}
        )
    return found


def test_every_field_of_a_request_belongs_to_a_feature() -> None:
    used = set(VALUES)
    for given in feature_fields().values():
        used |= fields_of(json_format.ParseDict(given, pb.GenerateRequest()))
    every = set()
    for field in pb.GenerateRequest.DESCRIPTOR.fields:
        inner = field.message_type is not None and not field.is_repeated and field.name != "token_ids"
        every |= {f"{field.name}.{each.name}" for each in field.message_type.fields} if inner else {field.name}
    assert every - used == set(), "a new field needs a row and a column"
    assert VALUES - every == set()


def effects(responses: list[pb.GenerateResponse]) -> dict[str, bool]:
    """Return whether the answer shows each feature that adds to it, or leaves out of it."""
    last = [response for response in responses if response.finish_reason]
    tensors = {output.name for response in responses for output in response.outputs}
    return {
        "beams": all(response.HasField("beam_score") for response in last),
        "logits": tensors >= {"context_logits", "generation_logits"},
        "tensors": tensors >= {"hidden_states.1", "model.layers.0.mlp"},
        "origins": any(response.token_origins for response in responses),
        "logprobs": any(response.logprobs for response in responses),
        "prompt_logprobs": any(response.prompt_logprobs for response in responses),
        "fields": any(response.field_logprobs for response in responses),
        "output": not any(response.token_ids for response in responses),
        "whole": sum(bool(response.text) for response in responses) <= len(last),
        "reasoning": any(response.parts for response in responses),
        "tools": any(response.parts for response in responses),
        "no_text": not any(response.text or response.parts for response in responses),
    }


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS))])
def test_every_pair_does_what_its_cell_says(server: str, part: int) -> None:
    features = feature_fields()

    def failure(pair: tuple[str, str], works: bool) -> str | None:
        prompt = {} if any("messages" in features[name] for name in pair) else {"text": "abcabcabc"}
        # With a seed of the server's choice an answer may end at its first token, and then it shows nothing.
        limit = {"sampling": {"maxTokens": 24} | ({} if "beams" in pair else {"seed": 1})}
        answer = ask(stub, merged(prompt, limit, *(features[name] for name in pair)))
        if not works:
            refused = isinstance(answer, grpc.RpcError) and answer.code() == grpc.StatusCode.INVALID_ARGUMENT
            return None if refused else f"{pair}: not refused"
        if isinstance(answer, grpc.RpcError):
            return f"{pair}: {answer.code().name}: {answer.details()}"
        ended = {response.index for response in answer if response.finish_reason}
        failed = {response.finish_reason for response in answer} & {pb.FINISH_REASON_GRAMMAR_ERROR}
        if failed or ended != set(range(2 if "n" in pair else 1)):
            return f"{pair}: {ended}, {failed}"
        shown = effects(answer)
        if "no_text" in pair:  # parts are text
            shown |= dict.fromkeys(("reasoning", "tools"), True)
        missing = [name for name in pair if not shown.get(name, True)]
        return f"{pair}: no sign of {missing}" if missing else None

    with grpc.insecure_channel(server) as channel, ThreadPoolExecutor(8) as pool:
        stub = engine_pb2_grpc.EngineStub(channel)
        chosen = part_of(part)
        assert [problem for problem in pool.map(failure, chosen, chosen.values()) if problem] == []


@pytest.mark.parametrize("row", rows(PAGE, "Refused requests"), ids=lambda row: row[0])
def test_a_refused_request_names_its_field(server: str, row: list[str]) -> None:
    _, fields, status, begins = row
    with grpc.insecure_channel(server) as channel:
        answer = ask(engine_pb2_grpc.EngineStub(channel), json.loads(code(fields)))
    assert isinstance(answer, grpc.RpcError)
    assert answer.code().name == code(status)
    assert str(answer.details()).startswith(code(begins))


@pytest.mark.parametrize("row", rows(PAGE, "Refused settings"), ids=lambda row: row[0])
def test_refused_settings_name_one_of_them(row: list[str]) -> None:
    _, settings, begins = row
    values = tomllib.loads("\n".join(re.findall(r"`([^`]+)`", settings)))
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    engine = {field.name for field in fields(EngineConfig)}
    kind: type[Any] = EngineConfig if set(values) <= engine else ServerConfig
    with pytest.raises(ValueError, match=rf"^{code(begins)}: "):
        kind(**values)
