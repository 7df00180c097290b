"""The client's own name of a field at fault, from the name that the engine or the chat body has for it.

Invariant: an error's `param` is a field that the client finds in the body that it sent.

Not responsible for: the engine's names at the top of a body (wire/errors.py), bodies that do not validate
(wire/fields.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from http_gateway.answers.grammar import grammar_field
from http_gateway.answers.prompts import allowed_names
from http_gateway.wire.chat import ChatRequest, NamedChoice
from http_gateway.wire.errors import ApiError
from http_gateway.wire.fields import Fields
from http_gateway.wire.messages import CountTokensRequest
from http_gateway.wire.messages import chat_body as chat_of_message
from http_gateway.wire.messages import places as places_of_message
from http_gateway.wire.outputs import StructuredOutputs
from http_gateway.wire.responses import ResponsesRequest
from http_gateway.wire.responses import chat_body as chat_of_response
from http_gateway.wire.responses import places as places_of_response
from http_gateway.wire.sampling import SamplingFields

_GRAMMAR = re.compile(r"grammar(\.(?P<part>[a-z_]+))?(\.choices)?(?P<rest>(\[\d+\])?)")
"""A field of the engine's grammar: its text, or an option."""
_KINDS = {"json_object", "regex", "choice", "ebnf", "lark", "structural_tag", "grammar_id"}
_OPTIONS = StructuredOutputs.names() - _KINDS
_TOOL = re.compile(r"tools\[(\d+)\]\.(name|parameters|text|lark|regex)")
"""A field of one of the engine's tools."""
_TURN = re.compile(r"messages\[(\d+)\](?P<within>|\.(role|content)|\.(name|reasoning|tool_call|part).*)")
"""A turn of the engine's, or of the chat body's. Anthropic's own names go on with `.content[`."""
_MESSAGE_NAMES = {
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""The chat body's names -> Anthropic's."""
_RESPONSE_NAMES = {
    "messages": "input",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.allowed_tools": "tool_choice",
}
"""The chat body's names -> those of the Responses API."""
_TOOL_WORDS = re.compile(r"(tools\[\d+\])\.(function|custom)\b")


def name_as_sent(error: ApiError, fields: Fields) -> ApiError:
    """Return the error with the name that its field has in the client's body, in `param` and in the message."""
    if error.param is not None:
        error.rename(_as_sent(error.param, fields))
    return error


def _as_sent(field: str, fields: Fields) -> str:
    # Only a body that became a request of the engine has an error with the engine's names.
    turn = _TURN.fullmatch(field)
    of_engine = bool(_GRAMMAR.fullmatch(field) or _TOOL.fullmatch(field))
    match fields:
        case ChatRequest() | ResponsesRequest() if field == "logprobs" and fields.top_logprobs:
            return "top_logprobs"
        case SamplingFields() if of_engine:
            return _in_chat(field, fields)
        case ResponsesRequest() if turn:
            return _placed(turn, places_of_response(fields))
        case CountTokensRequest() if turn:
            return _placed(turn, places_of_message(fields))
        case ResponsesRequest():
            return _translated(_in_chat(field, chat_of_response(fields, "")) if of_engine else field, _RESPONSE_NAMES)
        case CountTokensRequest():
            named = _in_chat(field, chat_of_message(fields, "", thinks=False)) if of_engine else field
            named = _translated(named, _MESSAGE_NAMES)
            return re.sub(r"^(tools\[\d+\])\.parameters", r"\1.input_schema", named)
    return field


def _placed(turn: re.Match[str], places: Sequence[str]) -> str:
    """Return the client's field of a turn; the parts of an item have other names than a turn's."""
    place = places[int(turn[1])]
    return place + turn["within"] if place.startswith("messages") and turn["within"] in (".role", ".content") else place


def _in_chat(field: str, fields: SamplingFields) -> str:
    """Return the name that a field of the engine's grammar or tools has in a body of chat or completions."""
    if grammar := _GRAMMAR.fullmatch(field):
        if grammar["part"] in _OPTIONS:
            return f"structured_outputs.{grammar['part']}"
        return (grammar_field(fields) or "tools") + grammar["rest"]
    tool = _TOOL.fullmatch(field)
    return _tool(int(tool[1]), tool[2], fields) if tool and isinstance(fields, ChatRequest) else field


def _tool(index: int, part: str, fields: ChatRequest) -> str:
    tools, choice = fields.tools or [], fields.tool_choice
    sent = [*range(len(tools))]
    if isinstance(choice, NamedChoice) and choice.allowed_tools is not None:
        allowed = allowed_names(choice.allowed_tools.tools)
        sent = [i for i in sent if any(one and one.name in allowed for one in (tools[i].function, tools[i].custom))]
    if index >= len(sent):
        return "tools"
    place = f"tools[{sent[index]}]"
    custom = tools[sent[index]].custom
    if custom is None:
        return f"{place}.function.{part}"
    if part == "name":
        return f"{place}.custom.name"
    within = ".grammar" if custom.format is not None and custom.format.grammar is not None else ""
    return f"{place}.custom.format{within}.definition"


def _translated(field: str, names: Mapping[str, str]) -> str:
    """Return another API's name of a field of the chat body."""
    field = _TOOL_WORDS.sub(r"\1", field)
    for name, other in names.items():
        if field == name or field.startswith((f"{name}.", f"{name}[")):
            return other + field.removeprefix(name)
    return field
