"""What both clients share of a call: the methods of the service, and a request made from arguments.

The invariant: pure; a wrong argument is refused here, before anything is sent.

Not responsible for: sending (see client.py and async_client.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message as Wire

from lockstep_client.answers import Tokens, from_message
from lockstep_client.grammars import CompiledGrammar, Grammar, grammar_of
from lockstep_client.joining import Joined, Parse
from lockstep_client.messages import AnyTool, Conversation, conversation, tools_message
from lockstep_client.options import request_of
from lockstep_client.values import parser_of_items
from lockstep_client.wire import engine_pb2 as pb

Prompt = str | Sequence[int]
"""A text, or the ids of its tokens."""
AnyGrammar = Grammar | CompiledGrammar

UNARY_TIMEOUT_S = 30.0
"""Default limit of a call that generates nothing and compiles nothing."""
LOAD_TIMEOUT_S = 300.0
"""Default limit of a call that loads a model."""

Q = TypeVar("Q", bound=Wire)
R = TypeVar("R", bound=Wire)


@dataclass(frozen=True, slots=True)
class Method(Generic[Q, R]):
    """A method of the service, with the types of its messages."""

    name: str
    request: type[Q]
    response: type[R]

    @property
    def path(self) -> str:
        """Its path in HTTP/2."""
        return f"/{pb.DESCRIPTOR.services_by_name['Engine'].full_name}/{self.name}"


GENERATE = Method("Generate", pb.GenerateRequest, pb.GenerateResponse)
ABORT = Method("Abort", pb.AbortRequest, pb.AbortResponse)
COMPILE = Method("Compile", pb.CompileRequest, pb.CompileResponse)
MODEL_INFO = Method("GetModelInfo", pb.GetModelInfoRequest, pb.GetModelInfoResponse)
STATS = Method("GetStats", pb.GetStatsRequest, pb.GetStatsResponse)
TOKENIZE = Method("Tokenize", pb.TokenizeRequest, pb.TokenizeResponse)
DETOKENIZE = Method("Detokenize", pb.DetokenizeRequest, pb.DetokenizeResponse)
TOKENIZER_INFO = Method("GetTokenizerInfo", pb.GetTokenizerInfoRequest, pb.GetTokenizerInfoResponse)
CLEAR_GRAMMAR_CACHE = Method("ClearGrammarCache", pb.ClearGrammarCacheRequest, pb.ClearGrammarCacheResponse)
LOAD_ADAPTER = Method("LoadAdapter", pb.LoadAdapterRequest, pb.LoadAdapterResponse)
UNLOAD_ADAPTER = Method("UnloadAdapter", pb.UnloadAdapterRequest, pb.UnloadAdapterResponse)
LIST_ADAPTERS = Method("ListAdapters", pb.ListAdaptersRequest, pb.ListAdaptersResponse)
EXCHANGE_DRAFTER = Method("ExchangeDrafter", pb.ExchangeDrafterRequest, pb.ExchangeDrafterResponse)
GENERATE_MANY = Method("GenerateMany", pb.GenerateManyRequest, pb.GenerateManyResponse)
WATCH_STATS = Method("WatchStats", pb.WatchStatsRequest, pb.WatchStatsResponse)

HEALTH_PATH = "/grpc.health.v1.Health/Check"
HEALTH_SERVING = b"\x08\x01"
"""A HealthCheckResponse with the status SERVING. The messages of the health service would be a third dependency."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request, ready to be sent as often as needed."""

    request: pb.GenerateRequest
    parse: Parse | None
    timeout_s: float | None

    def joined(self) -> Joined:
        """Return what joins the deltas of its stream."""
        return Joined(self.parse, self.request.sampling.n or 1, cumulative=self.request.response.cumulative)


def text_request(
    prompt: Prompt, schema: object, grammar: AnyGrammar | None, options: Mapping[str, Any], timeout_s: float | None
) -> Prepared:
    """Return the request of `generate`. Raises TypeError or ValueError that names the argument."""
    grammar = grammar_of(schema, grammar)
    request = request_of(options, grammar, chat=False)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    return _prepared(request, grammar, options, timeout_s)


def chat_request(
    messages: Conversation,
    schema: object,
    grammar: AnyGrammar | None,
    options: Mapping[str, Any],
    timeout_s: float | None,
) -> Prepared:
    """Return the request of `chat`. Raises TypeError or ValueError that names the argument."""
    grammar = grammar_of(schema, grammar)
    request = request_of(options, grammar, chat=True)
    arguments, continues = options.get("template_arguments"), options.get("continue_final_message", False)
    request.messages.CopyFrom(conversation(messages, arguments, continue_final=continues))
    return _prepared(request, grammar, options, timeout_s)


def values_request(
    prompt: Prompt | None,
    messages: Conversation | None,
    schema: object,
    grammar: AnyGrammar | None,
    options: Mapping[str, Any],
    timeout_s: float | None,
) -> Prepared:
    """Return the request of `stream_values`. Raises TypeError or ValueError that names the argument."""
    options = {"value_events": True, **options}
    if (prompt is None) == (messages is None):
        raise ValueError("prompt, messages: exactly one of them is required")
    if prompt is not None:
        return text_request(prompt, schema, grammar, options, timeout_s)
    assert messages is not None
    return chat_request(messages, schema, grammar, options, timeout_s)


def items_request(
    prompt: Prompt | None,
    messages: Conversation | None,
    schema: object,
    grammar: AnyGrammar | None,
    item: object,
    options: Mapping[str, Any],
    timeout_s: float | None,
) -> tuple[Prepared, Callable[[str], Any]]:
    """Return the request of `stream_items`, and what makes an item of its JSON text. Raises TypeError or ValueError
    that names the argument."""
    for name, is_wrong in (("n", options.get("n", 1) != 1), ("omit_text", options.get("omit_text", False))):
        if is_wrong:
            raise ValueError(f"{name}: is not for items; read the events with stream_values")
    options = {"items_of": "", "value_events": False, **options}
    parse = parser_of_items(schema, item, options["items_of"])
    prepared = values_request(prompt, messages, schema, grammar, options, timeout_s)
    return replace(prepared, parse=json.loads), parse


def _prepared(
    request: pb.GenerateRequest, grammar: AnyGrammar | None, options: Mapping[str, Any], timeout_s: float | None
) -> Prepared:
    given_s = options.get("timeout_s")
    return Prepared(request, grammar.parse if grammar else None, timeout_s if given_s is None else given_s)


def check_choices(prompt: Prompt | None, messages: Conversation | None, choices: Sequence[str]) -> None:
    """Raise ValueError that names a wrong argument of `choice_probs`."""
    if (prompt is None) == (messages is None):
        raise ValueError("prompt, messages: exactly one of them is required")
    if isinstance(choices, str) or not choices or not all(choices) or len(set(choices)) != len(choices):
        raise ValueError("choices: must be texts that are not empty, each once")


def scored_request(token_ids: Sequence[int], timeout_s: float | None) -> Prepared:
    """Return the request for the log-probabilities of these tokens."""
    return text_request(token_ids, None, None, {"prompt_logprobs": 0, "max_tokens": 1}, timeout_s)


def shares(choices: Sequence[str], logprobs: Sequence[float]) -> dict[str, float]:
    """Return each choice's probability divided by the sum of all."""
    most = max(logprobs)
    weights = [math.exp(each - most) for each in logprobs]
    return {choice: weight / sum(weights) for choice, weight in zip(choices, weights, strict=True)}


def compile_request(schema: object, grammar: Grammar | None) -> tuple[pb.CompileRequest, Grammar]:
    """Return the request of `compile`, and its grammar. Raises ValueError without one."""
    source = grammar_of(schema, grammar)
    if not isinstance(source, Grammar):
        raise ValueError("schema, grammar: one of them is required, and no CompiledGrammar")
    return pb.CompileRequest(grammar=source.message()), source


def compiled(response: pb.CompileResponse, source: Grammar) -> CompiledGrammar:
    """Return the compiled grammar of `source`."""
    return from_message(CompiledGrammar, response, parse=source.parse)


def tokenize_request(
    text: str | None, messages: Conversation | None, tools: Sequence[AnyTool], *, special: bool | None, texts: bool
) -> pb.TokenizeRequest:
    """Return the request of `tokenize`. Raises TypeError or ValueError that names the argument."""
    if (text is None) == (messages is None):
        raise ValueError("text, messages: exactly one is required")
    request = pb.TokenizeRequest(text=text, add_special_tokens=special, with_texts=texts)
    if messages is not None:
        request.messages.CopyFrom(conversation(messages))
    if tools:
        request.tools.CopyFrom(tools_message(tools, None))
    return request


def tokens(response: pb.TokenizeResponse) -> Tokens:
    """Return the tokens of a response."""
    return from_message(Tokens, response)
