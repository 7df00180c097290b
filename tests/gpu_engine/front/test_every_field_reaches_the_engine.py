"""From each scalar field of a GenerateRequest to its effect: the value in the Request that the engine gets, or the part
of the response that the field changes.

Each row is sent over gRPC through the checks of the public service to an engine that records its requests. The effect
must be the expected one, and it must be another one when the field is cleared. A new field of the proto needs a row.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from google.protobuf import json_format

from gpu_engine.api.config import ServerConfig
from gpu_engine.api.processors import LoadedProcessor, ProcessorRequest, Processors
from gpu_engine.api.request import (
    Backtracking,
    EarlyStopping,
    FinishReason,
    GrammarExact,
    GrammarKind,
    Logprobs,
    Request,
    Speculation,
    TokenEvent,
)
from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc
from service_runtime.repetition import RepetitionLimit
from tests.fakes import EOS, ByteTokenizer, FakeEngine, FakeModel
from tests.gpu_engine.front.serving import serving
from tests.waiting import eventually

ANSWER = '{"a": 1}'
TEMPLATE = (
    "{{ messages | tojson }} tools={{ tools | default([]) | tojson }} thinking={{ enable_thinking }} "
    "effort={{ reasoning_effort }} hue={{ hue }} begins={{ add_generation_prompt }}{# <tool_call> tool <think> #}"
)


@dataclass(frozen=True)
class Seen:
    """The requests that reached the engine, and the responses to the client."""

    requests: list[Request]
    responses: list[pb.GenerateResponse]

    @property
    def request(self) -> Request:
        return self.requests[0]

    @property
    def prompt(self) -> str:
        return bytes(self.request.prompt_ids).decode()

    @property
    def turn(self) -> dict[str, Any]:
        """The last turn that the chat template has read."""
        turn: dict[str, Any] = json.loads(self.prompt.partition(" tools=")[0])[-1]
        return turn

    @property
    def tag(self) -> str:
        """The grammar of the whole answer that was made of tools, reasoning and a grammar."""
        grammar = self.request.grammar
        assert grammar is not None
        assert grammar.kind is GrammarKind.COMPOSED
        return grammar.source

    @property
    def text(self) -> list[str]:
        return [response.text for response in self.responses]


Effect = Callable[[Seen], Any]


class Row(NamedTuple):
    fields: dict[str, Any]
    effect: Effect
    expected: Any


def sampling(field: str, value: Any, effect: Effect, expected: Any, *, by_grammar: bool = False, **others: Any) -> Row:
    fields = {"grammar": {"regex": "a+"}} if by_grammar else {}
    return Row({"text": "hi", "sampling": {field: value, **others}, **fields}, effect, expected)


def grammar(effect: Effect, expected: Any, **fields: Any) -> Row:
    return Row({"text": "hi", "grammar": fields}, effect, expected)


def source(seen: Seen) -> Any:
    spec = seen.request.grammar
    return spec and (spec.kind, spec.source)


def verified(effect: Effect, expected: Any, **fields: Any) -> Row:
    return grammar(effect, expected, json_schema="{}", unenforced="UNENFORCED_VERIFY", **fields)


def response(effect: Effect, expected: Any, **fields: Any) -> Row:
    return Row({"text": "hi", "response": fields, "grammar": {"json_object": True}}, effect, expected)


def chat(effect: Effect, expected: Any, turn: dict[str, Any], **fields: Any) -> Row:
    return Row({"messages": {"messages": [{"role": "user", "content": "q"}, turn], **fields}}, effect, expected)


def tools(effect: Effect, expected: Any, *tool: dict[str, Any], **fields: Any) -> Row:
    chosen = {"tools": list(tool), **fields}
    return Row({"messages": {"messages": [{"role": "user", "content": "q"}]}, "tools": chosen}, effect, expected)


def reasoning(effect: Effect, expected: Any, **fields: Any) -> Row:
    asked = {"messages": {"messages": [{"role": "user", "content": "q"}]}, "reasoning": fields}
    return Row({**asked, "grammar": {"regex": "a"}}, effect, expected)


def beams(effect: Effect, expected: Any, **fields: Any) -> Row:
    return Row({"text": "hi", "beam_search": {"beam_width": 3, **fields}}, effect, expected)


CALL = {"id": "call12345", "name": "f", "arguments": '{"x": 5}'}
F, G = {"name": "f"}, {"name": "g"}
RAW = {"choice": "TOOL_CHOICE_REQUIRED"}

ROWS: dict[str, Row] = {
    "request_id": Row({"text": "hi", "request_id": "mine"}, lambda s: s.request.request_id, "mine"),
    "text": Row({"text": "hello"}, lambda s: s.prompt, "hello"),
    "token_ids.ids": Row({"token_ids": {"ids": [7, 9]}}, lambda s: s.request.prompt_ids, [7, 9]),
    "messages.messages.role": chat(lambda s: s.turn["role"], "system", {"role": "system", "content": "x"}),
    "messages.messages.content": chat(lambda s: s.turn["content"], "x", {"role": "user", "content": "x"}),
    "messages.messages.parts.text": chat(
        lambda s: s.turn["content"], "xy", {"role": "user", "parts": [{"text": "x"}, {"text": "y"}]}
    ),
    "messages.messages.name": chat(
        lambda s: s.turn.get("name"), "ann", {"role": "user", "content": "x", "name": "ann"}
    ),
    "messages.messages.tool_calls.id": chat(
        lambda s: s.turn["tool_calls"][0]["id"], "call12345", {"role": "assistant", "tool_calls": [CALL]}
    ),
    "messages.messages.tool_calls.name": chat(
        lambda s: s.turn["tool_calls"][0]["function"]["name"], "f", {"role": "assistant", "tool_calls": [CALL]}
    ),
    "messages.messages.tool_calls.arguments": chat(
        lambda s: s.turn["tool_calls"][0]["function"]["arguments"],
        {"x": 5},
        {"role": "assistant", "tool_calls": [CALL]},
    ),
    "messages.messages.tool_call_id": chat(
        lambda s: s.turn.get("tool_call_id"), "c1", {"role": "tool", "content": "x", "tool_call_id": "c1"}
    ),
    "messages.messages.reasoning": chat(
        lambda s: s.turn.get("reasoning_content"), "hm", {"role": "assistant", "content": "x", "reasoning": "hm"}
    ),
    "messages.template_arguments": chat(
        lambda s: "hue=red" in s.prompt, True, {"role": "user", "content": "x"}, template_arguments='{"hue": "red"}'
    ),
    "messages.continue_final_message": chat(
        lambda s: "begins=False" in s.prompt, True, {"role": "assistant", "content": "x"}, continue_final_message=True
    ),
    "tools.tools.name": tools(lambda s: '"name": "f"' in s.prompt, True, F),
    "tools.tools.description": tools(lambda s: "adds numbers" in s.prompt, True, {**F, "description": "adds numbers"}),
    "tools.tools.parameters": tools(
        lambda s: "sum_of_all" in s.tag, True, {**F, "parameters": '{"properties": {"sum_of_all": {}}}'}, **RAW
    ),
    "tools.tools.text": tools(lambda s: "any_text" in s.tag, True, {**F, "text": True}, **RAW),
    "tools.tools.lark": tools(lambda s: "start: FOO" in s.prompt, True, {**F, "lark": 'start: FOO\nFOO: "f"'}, **RAW),
    "tools.tools.regex": tools(lambda s: "[xy]{3}" in s.tag, True, {**F, "regex": "[xy]{3}"}, **RAW),
    "tools.tools.strict": tools(
        lambda s: "sum_of_all" in s.tag,
        False,
        {**F, "parameters": '{"properties": {"sum_of_all": {}}}', "strict": False},
    ),
    "tools.choice": tools(lambda s: "triggered" in s.tag, False, F, choice="TOOL_CHOICE_REQUIRED"),
    "tools.name": tools(lambda s: '"name\\": \\"f' in s.tag, False, F, G, choice="TOOL_CHOICE_NAMED", name="g"),
    "tools.parallel": tools(lambda s: '"stop_after_first": true' in s.tag, True, F, parallel=False),
    "reasoning.enabled": reasoning(
        lambda s: s.request.grammar and s.request.grammar.kind, GrammarKind.REGEX, enabled=False
    ),
    "reasoning.max_tokens": reasoning(lambda s: '"max_tokens": 17' in s.tag, True, max_tokens=17),
    "reasoning.effort": reasoning(lambda s: "effort=high" in s.prompt, True, effort="high"),
    "reasoning.begin": reasoning(lambda s: "<musing>" in s.tag, True, begin="<musing>", end="</musing>"),
    "reasoning.end": reasoning(lambda s: "</musing>" in s.tag, True, begin="<musing>", end="</musing>"),
    "sampling.max_tokens": sampling("max_tokens", 5, lambda s: s.request.sampling.max_tokens, 5),
    "sampling.min_tokens": sampling("min_tokens", 3, lambda s: s.request.sampling.min_tokens, 3),
    "sampling.temperature": sampling("temperature", 0.5, lambda s: s.request.sampling.temperature, 0.5),
    "sampling.top_p": sampling("top_p", 0.5, lambda s: s.request.sampling.top_p, 0.5),
    "sampling.top_k": sampling("top_k", 4, lambda s: s.request.sampling.top_k, 4),
    "sampling.min_p": sampling("min_p", 0.25, lambda s: s.request.sampling.min_p, 0.25),
    "sampling.seed": sampling("seed", 77, lambda s: s.request.sampling.seed, 77),
    "sampling.repetition_penalty": sampling(
        "repetition_penalty", 1.5, lambda s: s.request.sampling.repetition_penalty, 1.5
    ),
    "sampling.presence_penalty": sampling("presence_penalty", 0.5, lambda s: s.request.sampling.presence_penalty, 0.5),
    "sampling.frequency_penalty": sampling(
        "frequency_penalty", 0.5, lambda s: s.request.sampling.frequency_penalty, 0.5
    ),
    "sampling.stop": sampling("stop", ["zz"], lambda s: s.request.sampling.stop, ("zz",)),
    "sampling.stop_token_ids": sampling("stop_token_ids", [9], lambda s: s.request.sampling.stop_token_ids, (9,)),
    "sampling.bad_token_ids": sampling("bad_token_ids", [8], lambda s: s.request.sampling.bad_token_ids, (8,)),
    "sampling.bad_words": sampling(
        "bad_words", ["qu"], lambda s: s.request.sampling.bad_words, ((113, 117), (32, 113, 117))
    ),
    "sampling.ignore_eos": sampling("ignore_eos", True, lambda s: s.request.sampling.ignore_eos, True),
    "sampling.logprobs": sampling("logprobs", 2, lambda s: s.request.outputs.logprobs, 2),
    "sampling.masked_logprobs": sampling(
        "masked_logprobs", True, lambda s: s.request.outputs.masked_logprobs, True, logprobs=2
    ),
    "sampling.n": sampling("n", 2, lambda s: [request.index for request in s.requests], [0, 1]),
    "sampling.include_stop_str_in_output": sampling(
        "include_stop_str_in_output", True, lambda s: s.request.response.include_stop_str_in_output, True
    ),
    "sampling.skip_special_tokens": sampling(
        "skip_special_tokens",
        False,
        lambda s: (s.request.response.skip_special_tokens, s.text[0][:9]),
        (False, "<|start|>"),
    ),
    "sampling.logit_bias": sampling("logit_bias", {"65": 1.5}, lambda s: s.request.sampling.logit_bias, ((65, 1.5),)),
    "sampling.repetition_max_pattern_size": sampling(
        "repetition_max_pattern_size", 6, lambda s: s.request.sampling.repetition, RepetitionLimit(6, 1, 8, 0)
    ),
    "sampling.repetition_min_pattern_size": sampling(
        "repetition_min_pattern_size",
        3,
        lambda s: s.request.sampling.repetition,
        RepetitionLimit(6, 3, 8, 0),
        repetition_max_pattern_size=6,
    ),
    "sampling.repetition_min_count": sampling(
        "repetition_min_count",
        5,
        lambda s: s.request.sampling.repetition,
        RepetitionLimit(6, 1, 5, 0),
        repetition_max_pattern_size=6,
    ),
    "sampling.grammar_exact": sampling(
        "grammar_exact", True, lambda s: s.request.sampling.grammar_exact, GrammarExact(1000, 60.0), by_grammar=True
    ),
    "sampling.grammar_exact_tries": sampling(
        "grammar_exact_tries",
        7,
        lambda s: s.request.sampling.grammar_exact,
        GrammarExact(7, 60.0),
        grammar_exact=True,
        by_grammar=True,
    ),
    "sampling.grammar_exact_ms": sampling(
        "grammar_exact_ms",
        500,
        lambda s: s.request.sampling.grammar_exact,
        GrammarExact(1000, 0.5),
        grammar_exact=True,
        by_grammar=True,
    ),
    "sampling.grammar_exact_error": sampling(
        "grammar_exact_error",
        True,
        lambda s: s.request.sampling.grammar_exact,
        GrammarExact(1000, 60.0, fails=True),
        grammar_exact=True,
        by_grammar=True,
    ),
    "sampling.grammar_exact_shared_tries": sampling(
        "grammar_exact_shared_tries",
        9,
        lambda s: s.request.sampling.grammar_exact,
        GrammarExact(1000, 60.0, shared_tries=9),
        grammar_exact=True,
        by_grammar=True,
    ),
    "sampling.grammar_exact_any_spelling": sampling(
        "grammar_exact_any_spelling",
        True,
        lambda s: s.request.sampling.grammar_exact,
        GrammarExact(1000, 60.0, any_spelling=True),
        grammar_exact=True,
        by_grammar=True,
    ),
    "grammar.json_object": grammar(source, (GrammarKind.JSON_OBJECT, ""), json_object=True),
    "grammar.json_schema": grammar(source, (GrammarKind.JSON_SCHEMA, "{}"), json_schema="{}"),
    "grammar.regex": grammar(source, (GrammarKind.REGEX, "a+"), regex="a+"),
    "grammar.ebnf": grammar(source, (GrammarKind.EBNF, 'root ::= "a"'), ebnf='root ::= "a"'),
    "grammar.lark": grammar(source, (GrammarKind.LARK, 'start: "a"'), lark='start: "a"'),
    "grammar.choice.choices": grammar(source, (GrammarKind.CHOICE, '["x", "y"]'), choice={"choices": ["x", "y", "x"]}),
    "grammar.structural_tag": grammar(source, (GrammarKind.STRUCTURAL_TAG, "{}"), structural_tag="{}"),
    "grammar.grammar_id": grammar(source, (GrammarKind.REGEX, "compiled"), grammar_id="COMPILED"),
    "grammar.whitespace": grammar(
        lambda s: s.request.grammar and s.request.grammar.whitespace,
        1,
        json_object=True,
        whitespace="WHITESPACE_COMPACT",
    ),
    "grammar.backend": grammar(
        lambda s: s.request.grammar and s.request.grammar.backend, 2, json_object=True, backend="BACKEND_LLGUIDANCE"
    ),
    "grammar.allow_unenforced": grammar(
        lambda s: s.request.grammar and s.request.grammar.allow_unenforced,
        True,
        json_object=True,
        allow_unenforced=True,
    ),
    "grammar.unenforced": verified(lambda s: s.request.grammar and s.request.grammar.verify, True),
    **{
        f"grammar.{name}": grammar(
            lambda s: s.request.grammar and s.request.grammar.bounds, ((name, 3),), json_object=True, **{name: 3}
        )
        for name in ("max_string_length", "max_array_items", "max_number_digits", "max_whitespace")
    },
    "grammar.closed_objects": grammar(
        lambda s: s.request.grammar and s.request.grammar.closed_objects, False, json_object=True, closed_objects=False
    ),
    "grammar.max_backtracks": verified(lambda s: s.request.backtracking, Backtracking(3, 32), max_backtracks=3),
    "grammar.hold_tokens": verified(lambda s: s.request.backtracking, Backtracking(8, 5), hold_tokens=5),
    "speculation.num_draft_tokens": Row(
        {"text": "hi", "speculation": {"num_draft_tokens": 2}},
        lambda s: s.request.speculation,
        Speculation(2, 2),
    ),
    "speculation.draft_index": Row(
        {"text": "hi", "speculation": {"draft_index": False}, "grammar": {"json_object": True}},
        lambda s: s.request.suffix_scope is None,
        True,
    ),
    "response.omit_text": response(lambda s: "".join(s.text), "", omit_text=True),
    "response.omit_token_ids": response(
        lambda s: [token for each in s.responses for token in each.token_ids], [], omit_token_ids=True
    ),
    "response.echo": response(lambda s: (s.request.echo_text, s.text[0][:2]), ("hi", "hi"), echo=True),
    "response.prompt_logprobs": response(lambda s: s.request.outputs.prompt_logprobs, 2, prompt_logprobs=2),
    "response.per_field_logprobs": response(
        lambda s: [leaf.pointer for leaf in s.responses[-1].field_logprobs], ["/a"], per_field_logprobs=True
    ),
    "response.whole": response(lambda s: s.text, [ANSWER], whole=True),
    "response.cumulative": response(lambda s: s.responses[-1].text, ANSWER, cumulative=True),
    "response.context_logits": response(
        lambda s: [(each.name, each.context, each.answer) for each in s.request.outputs.tensors],
        [("context_logits", True, False)],
        context_logits=True,
    ),
    "response.generation_logits": response(
        lambda s: [(each.name, each.context, each.answer) for each in s.request.outputs.tensors],
        [("generation_logits", False, True)],
        generation_logits=True,
    ),
    "response.additional_outputs.name": response(
        lambda s: [each.source for each in s.request.outputs.tensors],
        ["logits"],
        additional_outputs=[{"name": "logits"}],
    ),
    "response.additional_outputs.context": response(
        lambda s: [each.context for each in s.request.outputs.tensors],
        [True],
        additional_outputs=[{"name": "logits", "context": True}],
    ),
    "response.token_origins": response(
        lambda s: (s.request.outputs.token_origins, any(each.token_origins for each in s.responses)),
        (True, True),
        token_origins=True,
    ),
    "response.value_events": response(
        lambda s: [event.pointer for each in s.responses for event in each.value_events],
        ["", "/a", "/a", ""],
        value_events=True,
    ),
    "response.items_of": response(
        lambda s: s.request.outputs.items_of,
        "/a",
        items_of="/a",
    ),
    "response.receipt_nonce": response(
        lambda s: s.request.outputs.receipt and s.request.outputs.receipt.nonce,
        b"0123456789abcdef",
        receipt_nonce="MDEyMzQ1Njc4OWFiY2RlZg==",
    ),
    "cache_salt": Row(
        {"text": "hi", "cache_salt": "s"}, lambda s: (s.request.scheduling.cache_salt, s.request.salt), ("s", "s")
    ),
    "priority": Row({"text": "hi", "priority": 7}, lambda s: s.request.scheduling.priority, 7),
    "client_id": Row(
        {"text": "hi", "client_id": "me", "logits_processors": [{"name": "noted"}]},
        lambda s: (s.request.scheduling.client_id, s.request.logits_processors[0].arguments),
        ("me", ("me", {})),
    ),
    "logits_processors.name": Row(
        {"text": "hi", "logits_processors": [{"name": "noted"}]},
        lambda s: [use.loaded.name for use in s.request.logits_processors],
        ["noted"],
    ),
    "logits_processors.arguments": Row(
        {"text": "hi", "logits_processors": [{"name": "noted", "arguments": '{"size": 3}'}]},
        lambda s: s.request.logits_processors[0].arguments,
        ("", {"size": 3}),
    ),
    "lora": Row({"text": "hi", "lora": "low"}, lambda s: s.request.lora and s.request.lora.name, "low"),
    "prompt_adapter": Row(
        {"text": "hi", "prompt_adapter": "virtual"},
        lambda s: s.request.prompt_adapter and (s.request.prompt_adapter.name, s.request.prompt_ids[:1]),
        ("virtual", [1000]),
    ),
    "beam_search.beam_width": beams(lambda s: s.request.beams and s.request.beams.width, 3),
    "beam_search.length_penalty": beams(
        lambda s: s.request.beams and s.request.beams.length_penalty, 2.0, length_penalty=2
    ),
    "beam_search.early_stopping": beams(
        lambda s: s.request.beams and s.request.beams.early_stopping,
        EarlyStopping.NEVER,
        early_stopping="EARLY_STOPPING_NEVER",
    ),
    "max_queue_ms": Row({"text": "hi", "max_queue_ms": 250}, lambda s: s.request.scheduling.max_queue_s, 0.25),
    "never_preempt": Row({"text": "hi", "never_preempt": True}, lambda s: s.request.scheduling.never_preempt, True),
}
"""By the path of the field: a request that sets it, its effect, and the expected effect."""


def scalars(message: Any, prefix: str = "") -> Iterator[str]:
    """Yield the path of each field that is no message, and of each map."""
    for field in message.fields:
        inner = field.message_type
        if inner is None or inner.GetOptions().map_entry:
            yield prefix + field.name
        else:
            yield from scalars(inner, f"{prefix}{field.name}.")


def clear(message: Any, path: str) -> None:
    """Clear the field of a path, in each element of a repeated message."""
    name, _, rest = path.partition(".")
    if not rest:
        message.ClearField(name)
        return
    inner = getattr(message, name)
    for each in inner if message.DESCRIPTOR.fields_by_name[name].is_repeated else (inner,):
        clear(each, rest)


class Noted:
    """A logits processor that is never called; its arguments say what `prepare` was told."""

    def prepare(self, request: ProcessorRequest) -> tuple[str, dict[str, Any]]:
        return request.client_id, dict(request.arguments)

    process: Any = None


def events_of(request: Request) -> Iterator[TokenEvent]:
    """Yield one event for each token of the answer, with what the request asks for."""
    for token in (257, *ANSWER.encode(), EOS):
        scores = () if request.outputs.num_logprobs is None else (Logprobs(-0.5, ()),)
        finish = FinishReason.STOP if token == EOS else None
        yield TokenEvent(request.index, (token,), scores, finish, EOS if token == EOS else None)


async def play(engine: FakeEngine, requests: list[Request]) -> None:
    """Answer in two parts, the second of which comes after the servicer has read the first."""
    for part in (slice(0, 4), slice(4, None)):
        for request in requests:
            for event in list(events_of(request))[part]:
                engine.emit(request, event)
        engine.settle()
        for _ in range(20):
            await asyncio.sleep(0)


def test_each_scalar_field_has_a_row() -> None:
    assert sorted(ROWS) == sorted(scalars(pb.GenerateRequest.DESCRIPTOR))


async def test_each_field_reaches_the_engine(tmp_path: Path) -> None:
    noted = LoadedProcessor("noted", 0, Noted())
    setup = serving(
        tmp_path,
        model=FakeModel(ByteTokenizer(TEMPLATE)),
        server_config=ServerConfig(
            max_n=4, max_prompt_bytes=10_000, allow_never_preempt=True, stream_pace_ms=0, receipt_key="k"
        ),
        processors=Processors((noted,)),
        device="cpu",
        max_model_len=2048,
    )
    async with setup as s, grpc.aio.insecure_channel(s.address) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        s.engine.adapters.load("low", "low-rank")
        s.engine.adapters.load("virtual", "prompt")
        compiled = await stub.Compile(pb.CompileRequest(grammar=pb.Grammar(regex="compiled")))

        async def effect(row: Row, message: pb.GenerateRequest) -> Any:
            """Return the effect, or the message of the error that refuses the request."""
            before = len(s.engine.submitted)

            async def responses() -> list[pb.GenerateResponse]:
                return [each async for each in stub.Generate(message, timeout=60)]

            answer = asyncio.create_task(responses())
            await eventually(lambda: answer.done() or len(s.engine.submitted) > before)
            requests = s.engine.submitted[before:]
            await play(s.engine, requests)
            try:
                return row.effect(Seen(requests, await answer))
            except grpc.aio.AioRpcError as error:
                return error.details()

        wrong: dict[str, Any] = {}
        for path, row in ROWS.items():
            message = json_format.ParseDict(row.fields, pb.GenerateRequest())
            if message.grammar.grammar_id:
                message.grammar.grammar_id = compiled.grammar_id
            found = await effect(row, message)
            clear(message, path)
            without = await effect(row, message)
            if found != row.expected or without == row.expected:
                wrong[path] = f"expected {row.expected!r}, found {found!r}, without the field {without!r}"
    assert not wrong, "\n".join(f"{path}: {problem}" for path, problem in wrong.items())
