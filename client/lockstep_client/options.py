"""The keyword arguments of a request, and the message that they make.

The invariant: an argument that is not given leaves its field unset, so that the server's default applies. Values are
checked only by the server, which names the field; an argument that is not known is a TypeError.

Not responsible for: the prompt's parts (see messages.py), the grammar (see grammars.py).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from lockstep_client.grammars import CompiledGrammar, Grammar
from lockstep_client.messages import AnyTool, refuse_unknown, tools_message
from lockstep_client.wire import engine_pb2 as pb


@dataclass(frozen=True, slots=True)
class AdditionalOutput:
    """A tensor of the model to be returned.

    Attributes:
        name: one of `info().output_names`: `logits`, `hidden_states.L`, or a module.
        context: also at the tokens of the prompt.

    """

    name: str
    context: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """The phase before the answer in which the model thinks freely.

    Attributes:
        enabled: whether the answer may begin with such a phase. None: where the chat template has one.
        max_tokens: most tokens of the phase, its markers included.
        effort: handed to the chat template: "low", "medium", "high", or what the template knows.
        begin, end: the markers of the phase. "": the model's own.

    """

    enabled: bool | None = None
    max_tokens: int | None = None
    effort: str = ""
    begin: str = ""
    end: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearch:
    """Beam search instead of sampling; `n` says how many of its sequences are returned, best first.

    Attributes:
        beam_width: beams, at least 2, at most the server's limit.
        length_penalty: the sum of log-probabilities is divided by the length to this power. None: 1.
        early_stopping: when the search ends, once it has as many complete sequences as beams: True: at once;
            "heuristic": when no running beam is better now than the worst complete one; "never": when none can become
            better. None: "heuristic".

    """

    beam_width: int
    length_penalty: float | None = None
    early_stopping: bool | Literal["heuristic", "never"] | None = None

    def message(self) -> pb.BeamSearch:
        """Return the message for the server. Raises ValueError for an unknown `early_stopping`."""
        if self.early_stopping not in _EARLY_STOPPING:
            raise ValueError(f"early_stopping: {self.early_stopping!r} is none of True, 'heuristic' and 'never'")
        return pb.BeamSearch(
            beam_width=self.beam_width,
            length_penalty=self.length_penalty,
            early_stopping=_EARLY_STOPPING[self.early_stopping],
        )


@dataclass(frozen=True, slots=True)
class LogitsProcessor:
    """A logits processor that the server has loaded, by its name, with arguments that JSON can hold."""

    name: str
    arguments: Mapping[str, Any] | None = None

    def message(self) -> pb.LogitsProcessor:
        """Return the message for the server."""
        given = self.arguments
        return pb.LogitsProcessor(name=self.name, arguments="" if given is None else json.dumps(given))


class Options(TypedDict, total=False):
    """Arguments of `generate`, `chat` and their streams; engine.proto documents each field with its default."""

    # Sampling.
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    bad_token_ids: Sequence[int]
    bad_words: Sequence[str]
    ignore_eos: bool
    logprobs: int
    masked_logprobs: bool
    n: int
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    repetition_max_pattern_size: int
    repetition_min_pattern_size: int
    repetition_min_count: int
    grammar_exact: bool
    """Sample from the model's own distribution, given that the whole answer matches the grammar."""
    grammar_exact_tries: int
    grammar_exact_ms: int
    grammar_exact_error: bool
    grammar_exact_shared_tries: int
    """Tries whose lessons later requests with the same prompt, grammar and sampling parameters begin with."""
    grammar_exact_any_spelling: bool
    logit_bias: Mapping[int, float]
    # Speculation.
    num_draft_tokens: int
    draft_index: bool
    # Parts of the response.
    omit_text: bool
    omit_token_ids: bool
    echo: bool
    prompt_logprobs: int
    per_field_logprobs: bool
    whole: bool
    cumulative: bool
    context_logits: bool
    generation_logits: bool
    additional_outputs: Sequence[str | AdditionalOutput]
    token_origins: bool
    value_events: bool
    items_of: str
    receipt_nonce: bytes
    """16 to 64 secret bytes, such as `secrets.token_bytes(16)`. The answer then has a signed `receipt`, whose digests
    can be checked with them."""
    # The request.
    request_id: str
    client_id: str
    cache_salt: str
    priority: int
    max_queue_ms: int
    never_preempt: bool
    # What changes the model's answer.
    logits_processors: Sequence[str | LogitsProcessor]
    lora: str
    prompt_adapter: str
    beam_search: int | BeamSearch
    """The number of beams, or more of the search."""
    # The call.
    timeout_s: float
    """End the call after this time, attempts and pauses included. Default: the client's `timeout_s`."""


class ChatOptions(Options, total=False):
    """Arguments of `chat` and its stream."""

    tools: Sequence[AnyTool]
    """Functions with types, `Tool`s, or mappings in the form of OpenAI's tools."""
    tool_choice: str
    """"auto", "none", "required", or the name of the one tool to call."""
    parallel_tool_calls: bool
    reasoning: bool | Reasoning
    template_arguments: Mapping[str, Any]
    """Variables for the chat template besides the messages."""
    continue_final_message: bool
    """Go on with the last message, which is the assistant's."""


_SCALARS = {
    "sampling": (
        "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty",
        "presence_penalty", "frequency_penalty", "ignore_eos", "logprobs", "masked_logprobs", "n",
        "include_stop_str_in_output", "skip_special_tokens",
        "repetition_max_pattern_size", "repetition_min_pattern_size", "repetition_min_count",
        "grammar_exact", "grammar_exact_tries", "grammar_exact_ms", "grammar_exact_error", "grammar_exact_shared_tries",
        "grammar_exact_any_spelling",
    ),
    "speculation": ("num_draft_tokens", "draft_index"),
    "response": (
        "omit_text", "omit_token_ids", "echo", "prompt_logprobs", "per_field_logprobs", "whole", "cumulative",
        "token_origins", "value_events", "items_of", "receipt_nonce", "context_logits", "generation_logits",
    ),
}  # fmt: skip
"""Options by the message that holds them."""
_LISTS = ("stop", "stop_token_ids", "bad_token_ids", "bad_words")
_OWN = (
    "request_id", "client_id", "cache_salt", "priority", "max_queue_ms", "never_preempt", "lora", "prompt_adapter",
)  # fmt: skip
_EARLY_STOPPING: Mapping[bool | str | None, pb.EarlyStopping] = {
    None: pb.EARLY_STOPPING_UNSPECIFIED,
    True: pb.EARLY_STOPPING_TRUE,
    "heuristic": pb.EARLY_STOPPING_HEURISTIC,
    "never": pb.EARLY_STOPPING_NEVER,
}
OPTIONS = frozenset(Options.__annotations__)
CHAT_OPTIONS = OPTIONS | frozenset(ChatOptions.__annotations__)


def request_of(
    options: Mapping[str, Any], grammar: Grammar | CompiledGrammar | None, *, chat: bool
) -> pb.GenerateRequest:
    """Return the request without its prompt.

    Raises TypeError for an option that is not known, ValueError for a value that its field cannot hold; both name it.
    """
    refuse_unknown(options, CHAT_OPTIONS if chat else OPTIONS, "chat()" if chat else "generate()")
    given = {name: value for name, value in options.items() if value is not None}
    request = pb.GenerateRequest()
    for part, names in _SCALARS.items():
        for name in names:
            if name in given:
                _set(getattr(request, part), name, given[name])
    for name in _OWN:
        if name in given:
            _set(request, name, given[name])
    for name in _LISTS:
        if name in given:
            values = [given[name]] if isinstance(given[name], str) else given[name]
            _extend(request.sampling, name, values)
    for token, bias in given.get("logit_bias", {}).items():
        request.sampling.logit_bias[token] = bias
    if grammar is not None:
        request.grammar.CopyFrom(grammar.message())
    _add_parts(request, given)
    _add_tools(request, given)
    return request


def _add_parts(request: pb.GenerateRequest, given: Mapping[str, Any]) -> None:
    for each in given.get("logits_processors", ()):
        processor = LogitsProcessor(each) if isinstance(each, str) else each
        request.logits_processors.append(processor.message())
    for each in given.get("additional_outputs", ()):
        output = AdditionalOutput(each) if isinstance(each, str) else each
        request.response.additional_outputs.add(name=output.name, context=output.context)
    beams = given.get("beam_search")
    if beams is not None:
        search = BeamSearch(beam_width=beams) if isinstance(beams, int) else beams
        request.beam_search.CopyFrom(search.message())


def _add_tools(request: pb.GenerateRequest, given: Mapping[str, Any]) -> None:
    choice, parallel = given.get("tool_choice"), given.get("parallel_tool_calls")
    if given.get("tools"):
        request.tools.CopyFrom(tools_message(given["tools"], choice, parallel))
    elif choice is not None or parallel is not None:
        raise ValueError("tool_choice, parallel_tool_calls: need tools")
    reasoning = given.get("reasoning")
    if isinstance(reasoning, bool):
        reasoning = Reasoning(enabled=reasoning)
    if reasoning is not None:
        request.reasoning.CopyFrom(pb.Reasoning(**dataclasses.asdict(reasoning)))


def _set(message: Any, name: str, value: Any) -> None:
    try:
        setattr(message, name, value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None


def _extend(message: Any, name: str, values: Sequence[Any]) -> None:
    try:
        getattr(message, name).extend(values)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None
