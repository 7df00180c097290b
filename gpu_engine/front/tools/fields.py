"""Checks of a request's messages, tools and reasoning.

Invariant: a returned value is within every limit that the proto states; otherwise InvalidRequest names the field.

Not responsible for: whether a schema, a Lark grammar or a regular expression is correct (the grammar process says so),
the bytes of a prompt (see front/validation.py).
"""

from __future__ import annotations

import json
import re
from typing import Any

from gpu_engine.api.conversation import Chat, InputKind, Reasoning, Tool, ToolCall, ToolChoice, Tools, Turn
from gpu_engine.api.errors import InvalidRequest
from protos.engine.v1 import engine_pb2 as pb

MAX_MESSAGES = 4096
MAX_TOOLS = 512
MAX_MARKER_BYTES = 64
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_RESERVED = frozenset(
    {"messages", "tools", "tokenize", "add_generation_prompt", "continue_final_message", "chat_template", "documents"}
)
"""Names that a request may not give to the chat template."""


def check_chat(chat: pb.ChatMessages) -> Chat:
    """Return the conversation. Raises InvalidRequest."""
    messages = chat.messages
    if not messages:
        raise InvalidRequest("messages.messages", "is empty")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest("messages.messages", f"has {len(messages)} turns, at most {MAX_MESSAGES} are allowed")
    turns = tuple(_turn(message, f"messages.messages[{i}]") for i, message in enumerate(messages))
    if chat.continue_final_message and (turns[-1].role != "assistant" or turns[-1].tool_calls):
        raise InvalidRequest(
            "messages.continue_final_message", "needs a last message of the assistant without tool calls"
        )
    return Chat(turns, _arguments(chat.template_arguments), chat.continue_final_message)


def chat_bytes(chat: Chat) -> int:
    """Return the bytes of all texts of a conversation and of its functions."""
    tools = chat.tools.tools if chat.tools else ()
    of_tools = sum(len(text.encode()) for tool in tools for text in (tool.name, tool.description, tool.source))
    return of_tools + sum(
        len(text.encode())
        for turn in chat.turns
        for text in (
            *(turn.role, turn.content, turn.name, turn.tool_call_id, turn.reasoning),
            *(text for call in turn.tool_calls for text in (call.id, call.name, call.arguments)),
        )
    )


def check_tools(request: pb.GenerateRequest) -> Tools | None:
    """Return the checked functions of a request, or None if its field `tools` is not set. Raises InvalidRequest."""
    if not request.HasField("tools"):
        return None
    message = request.tools
    if not message.tools:
        raise InvalidRequest("tools.tools", "is empty; leave tools out for an answer without them")
    if len(message.tools) > MAX_TOOLS:
        raise InvalidRequest("tools.tools", f"has {len(message.tools)} functions, at most {MAX_TOOLS} are allowed")
    if message.choice not in pb.ToolChoice.values():
        raise InvalidRequest("tools.choice", f"{message.choice} is not a value of ToolChoice")
    tools = tuple(_tool(tool, f"tools.tools[{i}]") for i, tool in enumerate(message.tools))
    numbers: dict[str, int] = {}
    for i, tool in enumerate(tools):
        if tool.name in numbers:
            raise InvalidRequest(
                f"tools.tools[{i}].name", f"{tool.name!r} is also the name of function {numbers[tool.name]}"
            )
        numbers[tool.name] = i
    choice = ToolChoice(message.choice or ToolChoice.AUTO.value)
    if choice is ToolChoice.NAMED and message.name not in numbers:
        raise InvalidRequest("tools.name", f"{message.name[:64]!r} is not one of the functions")
    if choice is not ToolChoice.NAMED and message.name:
        raise InvalidRequest("tools.name", "is allowed only with the choice TOOL_CHOICE_NAMED")
    return Tools(tools, choice, message.name, not message.HasField("parallel") or message.parallel)


def check_reasoning(request: pb.GenerateRequest) -> Reasoning | None:
    """Return what a request says about reasoning; None: it has no such field. Raises InvalidRequest."""
    if not request.HasField("reasoning"):
        return None
    message = request.reasoning
    for name in ("begin", "end"):
        size = len(getattr(message, name).encode())
        if size > MAX_MARKER_BYTES:
            raise InvalidRequest(f"reasoning.{name}", f"has {size} bytes, at most {MAX_MARKER_BYTES} are allowed")
    if bool(message.begin) != bool(message.end):
        missing = "end" if message.begin else "begin"
        raise InvalidRequest(f"reasoning.{missing}", "is empty; give both markers, or neither for the model's own")
    budget = message.max_tokens if message.HasField("max_tokens") else None
    enabled = message.enabled if message.HasField("enabled") else None
    if enabled is False and (budget is not None or message.begin):
        raise InvalidRequest("reasoning.enabled", "is false, which allows no max_tokens and no markers")
    if budget == 0:
        raise InvalidRequest("reasoning.max_tokens", "is 0, must be at least 1; use enabled=false for no reasoning")
    return Reasoning(enabled, budget, message.effort, message.begin, message.end)


def _turn(message: pb.ChatMessage, field: str) -> Turn:
    if not message.role:
        raise InvalidRequest(f"{field}.role", "is empty")
    if message.content and message.parts:
        raise InvalidRequest(f"{field}.parts", "is allowed only without content")
    for i, part in enumerate(message.parts):
        if part.WhichOneof("part") is None:
            raise InvalidRequest(f"{field}.parts[{i}].part", "one of its kinds is required")
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest(
            f"{field}.tool_calls", f"is allowed only in turns of the assistant, not of {message.role!r}"
        )
    for i, call in enumerate(message.tool_calls):
        if not call.name:
            raise InvalidRequest(f"{field}.tool_calls[{i}].name", "is empty")
    calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls)
    content = message.content or "".join(part.text for part in message.parts)
    return Turn(message.role, content, message.name, calls, message.tool_call_id, message.reasoning)


def _arguments(text: str) -> dict[str, Any]:
    if not text:
        return {}
    arguments = read_json(text, "messages.template_arguments")
    if not isinstance(arguments, dict):
        raise InvalidRequest("messages.template_arguments", "must be the text of a JSON object")
    if reserved := sorted(_RESERVED & arguments.keys()):
        raise InvalidRequest("messages.template_arguments", f"{reserved[0]!r} is set by the server")
    return arguments


def _tool(message: pb.Tool, field: str) -> Tool:
    if not _TOOL_NAME.fullmatch(message.name):
        raise InvalidRequest(
            f"{field}.name", f"{message.name[:80]!r} must be 1 to 64 letters, digits, '_', '-' and '.'"
        )
    strict = not message.HasField("strict") or message.strict
    match message.WhichOneof("input"):
        case None:
            return Tool(message.name, message.description, strict=strict)
        case "parameters":
            _check_parameters(message.parameters, f"{field}.parameters")
            return Tool(message.name, message.description, InputKind.JSON, message.parameters, strict)
        case "text":
            if not message.text:
                raise InvalidRequest(f"{field}.text", "must be true; give parameters, lark or regex instead")
            return Tool(message.name, message.description, InputKind.TEXT)
        case kind:
            source = str(getattr(message, kind))
            if not source:
                raise InvalidRequest(f"{field}.{kind}", "is empty")
            return Tool(message.name, message.description, InputKind(kind), source)


def read_json(text: str, field: str) -> Any:
    """Return the value of a JSON text, which can be encoded. Raises InvalidRequest, also for a key that occurs twice in
    one object."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidRequest(field, f"the key {twice!r} occurs twice in one object")
        return value

    def no_constant(name: str) -> Any:
        raise InvalidRequest(field, f"{name} is not JSON")

    try:
        value = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError:
        raise InvalidRequest(field, "contains a lone surrogate (\\ud800-\\udfff), which is not a character") from None
    except json.JSONDecodeError as error:
        raise InvalidRequest(field, f"is not JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    except ValueError:
        raise InvalidRequest(field, "contains a number with too many digits") from None
    except RecursionError:
        raise InvalidRequest(field, "is nested too deeply") from None


def _check_parameters(text: str, field: str) -> None:
    schema = read_json(text, field)
    if not isinstance(schema, dict):
        raise InvalidRequest(field, "must be the text of a JSON Schema that is an object")
    if schema.get("type", "object") != "object":
        raise InvalidRequest(field, f'has "type": {json.dumps(schema["type"])}, but arguments are always an object')
