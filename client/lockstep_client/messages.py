"""Conversations and tools, from plain Python values to the messages of the server.

The invariant: a key that is not known is an error that names it and the nearest known one; nothing is dropped.
A conversation may come as a string (one user message), as `Message`s, or as mappings in the form of OpenAI's chat
messages; an answer's `message` is one of them.

Not responsible for: the chat template, which the server applies.
"""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep_client.schemas import parameters_of, schema_of
from lockstep_client.wire import engine_pb2 as pb


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function that the model made.

    Attributes:
        id: unique in the conversation; a tool's result names it.
        name: the function's name.
        arguments: the text of a JSON object; of a custom tool: its input.

    """

    id: str
    name: str
    arguments: str

    def json(self) -> Any:
        """Return the arguments as a value. Raises ValueError for the input of a custom tool that is no JSON."""
        return json.loads(self.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation.

    Attributes:
        role: "system", "user", "assistant", "tool", or another role that the model's chat template knows.
        content: its text.
        name: the speaker's name, where the template knows one.
        tool_calls: the calls that the assistant made in this turn.
        tool_call_id: in a turn with a tool's result: the call that it answers.
        reasoning: what the assistant thought, where the template keeps it.

    """

    role: str
    content: str = ""
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call, or a custom tool whose input is text.

    Attributes:
        name: 1 to 64 letters, digits, `_`, `-` and `.`.
        description: tells the model what the tool does.
        parameters: a type or a JSON Schema for the arguments, which form an object. None: any object.
        text, lark, regex: make this a custom tool: its input is free text, or text that matches a Lark grammar or a
            regular expression.
        strict: whether the arguments must match `parameters` even if the model may choose not to call. None: True.

    """

    name: str
    description: str = ""
    parameters: object = None
    text: bool = False
    lark: str | None = None
    regex: str | None = None
    strict: bool | None = None

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """Return the tool of a function: its name, the first paragraph of its docstring, its typed parameters."""
        description = " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())
        return cls(name=function.__name__, description=description, parameters=parameters_of(function))


Conversation = str | Sequence[Message | Mapping[str, Any]]
AnyTool = Tool | Mapping[str, Any] | Callable[..., Any]

_MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning")
_CHOICES = {
    "auto": pb.TOOL_CHOICE_AUTO,
    "none": pb.TOOL_CHOICE_NONE,
    "required": pb.TOOL_CHOICE_REQUIRED,
}


def conversation(
    messages: Conversation, template_arguments: Mapping[str, Any] | None = None, *, continue_final: bool = False
) -> pb.ChatMessages:
    """Return the message for the server. Raises TypeError or ValueError that names the turn and the key."""
    turns: Sequence[Any] = [Message(role="user", content=messages)] if isinstance(messages, str) else messages
    return pb.ChatMessages(
        messages=[_turn(turn, f"messages[{i}]") for i, turn in enumerate(turns)],
        template_arguments=json.dumps(template_arguments) if template_arguments is not None else "",
        continue_final_message=continue_final,
    )


def _turn(turn: Message | Mapping[str, Any], where: str) -> pb.ChatMessage:
    if isinstance(turn, Message):
        return pb.ChatMessage(
            role=turn.role,
            content=turn.content,
            name=turn.name,
            tool_call_id=turn.tool_call_id,
            reasoning=turn.reasoning,
            tool_calls=[pb.ToolCall(id=c.id, name=c.name, arguments=c.arguments) for c in turn.tool_calls],
        )
    if not isinstance(turn, Mapping):
        raise TypeError(f"{where}: is a {type(turn).__name__}, not a Message or a mapping")
    refuse_unknown(turn, _MESSAGE_KEYS, where)
    content, parts = turn.get("content"), []
    if content is not None and not isinstance(content, str):
        parts = [_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
        content = ""
    calls = turn.get("tool_calls") or ()
    return pb.ChatMessage(
        role=turn.get("role", ""),
        content=content or "",
        parts=parts,
        name=turn.get("name") or "",
        tool_call_id=turn.get("tool_call_id") or "",
        reasoning=turn.get("reasoning") or "",
        tool_calls=[_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)],
    )


def _part(part: Any, where: str) -> pb.ContentPart:
    if isinstance(part, str):
        return pb.ContentPart(text=part)
    if not isinstance(part, Mapping) or part.get("type", "text") != "text":
        raise ValueError(f"{where}: the model reads only text")
    refuse_unknown(part, ("type", "text"), where)
    return pb.ContentPart(text=part["text"])


def _call(call: Any, where: str) -> pb.ToolCall:
    if isinstance(call, ToolCall):
        return pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments)
    if "function" in call:  # OpenAI's form
        refuse_unknown(call, ("id", "type", "function"), where)
        refuse_unknown(call["function"], ("name", "arguments"), f"{where}.function")
        return pb.ToolCall(id=call.get("id", ""), **call["function"])
    refuse_unknown(call, ("id", "name", "arguments"), where)
    return pb.ToolCall(**call)


def tools_message(tools: Sequence[AnyTool], choice: str | None, parallel: bool | None = None) -> pb.Tools:
    """Return the message for the server.

    Args:
        tools: tools, functions, or mappings in the form of OpenAI's tools.
        choice: "auto", "none", "required", or the name of the one tool to call. None: the server's default, "auto".
        parallel: more than one call in an answer. None: the server's default, yes.

    Raises TypeError or ValueError that names the tool.

    """
    message = pb.Tools(tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)], parallel=parallel)
    names = [tool.name for tool in message.tools]
    if choice in _CHOICES:
        message.choice = _CHOICES[choice]
    elif choice in names:
        message.choice, message.name = pb.TOOL_CHOICE_NAMED, choice
    elif choice is not None:
        raise ValueError(f"tool_choice: {choice!r} is none of {', '.join([*_CHOICES, *names])}")
    return message


def _tool(tool: AnyTool, where: str) -> pb.Tool:
    if isinstance(tool, Mapping):
        return _tool_of_mapping(tool, where)
    if not isinstance(tool, Tool):
        if not callable(tool):
            raise TypeError(f"{where}: is a {type(tool).__name__}, not a Tool, a mapping or a function")
        tool = Tool.of(tool)
    message = pb.Tool(name=tool.name, description=tool.description, strict=tool.strict)
    inputs = {"parameters": tool.parameters, "text": tool.text or None, "lark": tool.lark, "regex": tool.regex}
    given = [name for name, value in inputs.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{where}: {' and '.join(given)} exclude each other")
    if tool.parameters is not None:
        message.parameters = schema_of(tool.parameters).text
    elif given:
        setattr(message, given[0], inputs[given[0]])
    return message


def _tool_of_mapping(tool: Mapping[str, Any], where: str) -> pb.Tool:
    kind = tool.get("type", "function")
    if kind != "function":
        raise ValueError(f"{where}.type: {kind!r} is not 'function'; a custom tool is a Tool(...)")
    function = tool.get("function", tool)
    if function is not tool:
        refuse_unknown(tool, ("type", "function"), where)
        where += ".function"
    refuse_unknown(function, ("type", "name", "description", "parameters", "strict"), where)
    return _tool(
        Tool(
            name=function["name"],
            description=function.get("description") or "",
            parameters=function.get("parameters"),
            strict=function.get("strict"),
        ),
        where,
    )


def refuse_unknown(given: Collection[str], known: Collection[str], where: str) -> None:
    """Raise TypeError for a key that is not known; it names the nearest one."""
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            raise TypeError(f"{where}: {key!r} is not known{f'; did you mean {near[0]!r}?' if near else ''}")
