"""The engine's prompt, tools and reasoning from a chat body.

Not responsible for: the chat template, and which calls an answer may have (the engine).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from http_gateway.wire.chat import (
    NO_THOUGHT,
    ChatRequest,
    CustomFormat,
    CustomTool,
    FunctionTool,
    Message,
    NamedChoice,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
)
from http_gateway.wire.errors import ApiError
from protos.engine.v1 import engine_pb2 as pb

_WORDS: dict[str, pb.ToolChoice] = {
    "none": pb.TOOL_CHOICE_NONE,
    "auto": pb.TOOL_CHOICE_AUTO,
    "required": pb.TOOL_CHOICE_REQUIRED,
}


def chat_messages(messages: Iterable[Message], arguments: dict[str, object] | None, *, go_on: bool) -> pb.ChatMessages:
    """Return the conversation.

    Args:
        messages: oldest first.
        arguments: variables for the chat template; None: none.
        go_on: continue the last message.
    """
    return pb.ChatMessages(
        messages=[_message(message) for message in messages],
        template_arguments=json.dumps(arguments, ensure_ascii=False) if arguments else "",
        continue_final_message=go_on,
    )


def _message(message: Message) -> pb.ChatMessage:
    # Most chat templates know no developer; the role is OpenAI's newer name of system.
    turn = pb.ChatMessage(
        role="system" if message.role == "developer" else message.role,
        name=message.name or "",
        tool_calls=[_call(call) for call in message.tool_calls or ()],
        tool_call_id=message.tool_call_id or "",
        reasoning=message.reasoning_content or message.reasoning or "",
    )
    content = message.content if message.content is not None else message.refusal
    if isinstance(content, str):
        turn.content = content
    elif content is not None:
        _set_parts(turn, content)
    return turn


def _set_parts(turn: pb.ChatMessage, parts: Sequence[TextPart]) -> None:
    if len(parts) == 1:  # every chat template knows plain content
        turn.content = parts[0].content()
        return
    turn.parts.extend(pb.ContentPart(text=part.content()) for part in parts)


def _call(call: ToolCall) -> pb.ToolCall:
    if call.function is not None:
        return pb.ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
    if call.custom is not None:
        return pb.ToolCall(id=call.id, name=call.custom.name, arguments=call.custom.input)
    raise ApiError(
        "messages: a tool call needs function or custom", param="messages", code="missing_required_parameter"
    )


def chat_tools(tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> pb.Tools | None:
    """Return the tools and the choice among them; None: there are none. Raises ApiError."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ApiError("tool_choice: needs tools", param="tool_choice", code="invalid_value")
        return None
    result = pb.Tools(tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)])
    if parallel is not None:
        result.parallel = parallel
    if isinstance(choice, str):
        result.choice = _WORDS[choice]
    elif choice is not None:
        _apply_choice(result, choice)
    return result


def _apply_choice(tools: pb.Tools, choice: NamedChoice) -> None:
    names = {tool.name for tool in tools.tools}
    if choice.type == "allowed_tools":
        if choice.allowed_tools is None:
            raise ApiError(
                "tool_choice.allowed_tools: is required", param="tool_choice", code="missing_required_parameter"
            )
        allowed = allowed_names(choice.allowed_tools.tools)
        _require_known(allowed, names)
        kept = [tool for tool in tools.tools if tool.name in allowed]
        del tools.tools[:]
        tools.tools.extend(kept)
        tools.choice = _WORDS[choice.allowed_tools.mode]
        return
    named = choice.function if choice.type == "function" else choice.custom
    if named is None:
        where = f"tool_choice.{choice.type}"
        raise ApiError(f"{where}: is required", param=where, code="missing_required_parameter")
    _require_known({named.name}, names)
    tools.choice, tools.name = pb.TOOL_CHOICE_NAMED, named.name


def allowed_names(tools: Iterable[dict[str, object]]) -> set[str]:
    """Return the names of a choice of allowed tools."""
    return {_allowed_name(entry) for entry in tools}


def _allowed_name(entry: dict[str, object]) -> str:
    inner = entry.get(str(entry.get("type")))
    return str(inner.get("name", "") if isinstance(inner, dict) else entry.get("name", ""))


def _require_known(asked: set[str], names: set[str]) -> None:
    if unknown := sorted(asked - names):
        raise ApiError(f"tool_choice: {unknown[0]!r} is none of the tools", param="tool_choice", code="invalid_value")


def _tool(tool: Tool, where: str) -> pb.Tool:
    if tool.type == "function" and tool.function is not None:
        return function_tool(tool.function)
    if tool.type == "custom" and tool.custom is not None:
        return custom_tool(tool.custom, f"{where}.custom")
    raise ApiError(f"{where}.{tool.type}: is required", param=where, code="missing_required_parameter")


def function_tool(function: FunctionTool) -> pb.Tool:
    """Return the engine's tool of a function."""
    tool = pb.Tool(name=function.name, description=function.description or "")
    if function.parameters is not None:
        tool.parameters = json.dumps(function.parameters, ensure_ascii=False)
    if function.strict is not None:
        tool.strict = function.strict
    return tool


def custom_tool(custom: CustomTool, where: str) -> pb.Tool:
    """Return the engine's tool of a custom tool. Raises ApiError."""
    tool = pb.Tool(name=custom.name, description=custom.description or "")
    form = custom.format or CustomFormat(type="text")
    if form.type == "text":
        tool.text = True
        return tool
    grammar = form.grammar or form
    if grammar.syntax is None or grammar.definition is None:
        where = f"{where}.format.{'syntax' if grammar.syntax is None else 'definition'}"
        raise ApiError(f"{where}: is required", param=where, code="missing_required_parameter")
    setattr(tool, grammar.syntax, grammar.definition)
    return tool


def custom_names(tools: pb.Tools | None) -> frozenset[str]:
    """Return the names of the tools whose input is text."""
    return (
        frozenset(t.name for t in tools.tools if t.WhichOneof("input") in ("text", "lark", "regex"))
        if tools
        else frozenset()
    )


def reasoning(fields: ChatRequest, *, thinks: bool) -> pb.Reasoning | None:
    """Return the phase before the answer; None: there is none to be told apart.

    thinks: the model has markers of its own for what it thinks.
    """
    effort, max_tokens = fields.reasoning_effort, fields.thinking_token_budget
    if effort is None and max_tokens is None and not thinks:
        return None
    phase = pb.Reasoning()
    if effort == NO_THOUGHT:
        phase.enabled = False
    elif effort is not None:
        phase.effort = effort
    if max_tokens is not None:
        phase.max_tokens = max_tokens
    return phase
