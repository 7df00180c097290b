"""The body of `/v1/responses`, and its translation into a chat body: one conversation, whatever its shape.

Invariant: the server keeps nothing between calls; a field that refers to an earlier response is refused.

Not responsible for: answers (answers/responses.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, ValidationError

from http_gateway.wire.chat import (
    TEXT_ALONE,
    ChatRequest,
    Content,
    CustomFormat,
    TextPart,
)
from http_gateway.wire.errors import ApiError
from http_gateway.wire.fields import Fields, Refusal, problem
from http_gateway.wire.outputs import JsonObjectFormat, Schema, StructuredOutputs, TextFormat
from http_gateway.wire.sampling import Number, Seed, Signed, Speculation, Unsigned

KEEPS_NOTHING = "the server keeps no responses; send the whole conversation as input"


class MessageItem(Fields):
    """A turn."""

    REFUSED: ClassVar[Mapping[str, Refusal]] = {"phase": Refusal("turns have none")}

    type: Literal["message"] = "message"
    role: Annotated[str, Field(min_length=1)]
    content: Content
    id: str | None = None
    status: str | None = None


class FunctionCallItem(Fields):
    """A call that the assistant made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class CustomCallItem(Fields):
    """A call of a custom tool that the assistant made."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    id: str | None = None
    status: str | None = None


class OutputItem(Fields):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    status: str | None = None


class ReasoningText(Fields):
    """What the assistant thought."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Fields):
    """What the assistant thought before its next turn."""

    REFUSED: ClassVar[Mapping[str, Refusal]] = {"encrypted_content": Refusal("reasoning is plain text")}

    type: Literal["reasoning"]
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    id: str | None = None
    status: str | None = None


def _item_type(value: Any) -> str:
    kind = value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", "message")
    return "output" if str(kind).endswith("_output") else str(kind)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[OutputItem, Tag("output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_item_type),
]


def _input(value: Any) -> str:
    return "text" if isinstance(value, str) else "items"


Input = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[Item], Field(min_length=1), Tag("items")], Discriminator(_input)
]


class SchemaFormat(Fields):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    name: str = "answer"
    schema_: Schema = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(Fields):
    """What the answer must look like."""

    REFUSED: ClassVar[Mapping[str, Refusal]] = {"verbosity": Refusal("say it in the prompt", ("medium",))}

    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None


class ReasoningOptions(Fields):
    """The phase before the answer."""

    REFUSED: ClassVar[Mapping[str, Refusal]] = {
        "summary": Refusal("reasoning is shown whole", ("auto",)),
        "generate_summary": Refusal("reasoning is shown whole"),
    }

    effort: str | None = None


class ResponseTool(Fields):
    """A function, or a custom tool."""

    type: Literal["function", "custom"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat | None = None


class ResponseChoice(Fields):
    """The tool that the model must call, or the tools among which it chooses."""

    type: Literal["function", "custom", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[dict[str, Any]] | None = None


def _choice(value: Any) -> str:
    return "word" if isinstance(value, str) else "tool"


class ResponsesRequest(Fields):
    """The body of `/v1/responses`."""

    REFUSED: ClassVar[Mapping[str, Refusal]] = {
        "previous_response_id": Refusal(KEEPS_NOTHING),
        "conversation": Refusal(KEEPS_NOTHING),
        "background": Refusal(KEEPS_NOTHING, (False,)),
        "store": Refusal(KEEPS_NOTHING, (False,)),
        "prompt": Refusal("there are no stored prompts; use input"),
        "truncation": Refusal("a prompt is never cut; send a shorter one", ("disabled",)),
        "service_tier": Refusal("there is one tier; see priority", ("auto", "default")),
        "max_tool_calls": Refusal("it counts calls of built-in tools, and there are none"),
        "stream_options": Refusal("events are not padded", ({}, {"include_obfuscation": False})),
        "modalities": Refusal(TEXT_ALONE, (["text"],)),
        "context_management": Refusal("a prompt is never cut; send a shorter one"),
        "moderation": Refusal("there is no moderation"),
        "prompt_cache_retention": Refusal("the prefix cache keeps what its memory holds"),
    }

    model: str | None = None
    input: Input
    instructions: str | None = None
    max_output_tokens: Unsigned | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_logprobs: Unsigned | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    """`reasoning.encrypted_content` is without effect: reasoning is plain text."""
    tools: list[ResponseTool] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("word")] | Annotated[ResponseChoice, Tag("tool")],
            Discriminator(_choice),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    seed: Seed | None = None
    top_k: Signed | None = None
    min_p: Number | None = None
    stop: str | list[str] | None = None
    min_tokens: Unsigned | None = None
    ignore_eos: bool | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Signed | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    speculation: Speculation | None = None

    @property
    def with_logprobs(self) -> bool:
        """Whether the answer carries log-probabilities."""
        return "message.output_text.logprobs" in (self.include or ())


_SAME = (
    "model",
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "seed",
    "top_k",
    "min_p",
    "stop",
    "min_tokens",
    "ignore_eos",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "priority",
    "cache_salt",
    "chat_template_kwargs",
)
"""Fields with one name and form on both sides."""


def chat_body(fields: ResponsesRequest, request_id: str) -> ChatRequest:
    """Return the chat body that asks for the same answer. Raises ApiError."""
    if fields.top_logprobs is not None and not fields.with_logprobs:
        raise ApiError(
            "top_logprobs: needs include: message.output_text.logprobs", param="top_logprobs", code="invalid_value"
        )
    body: dict[str, Any] = {name: getattr(fields, name) for name in _SAME}
    body |= {
        "messages": _messages(fields)[0],
        "request_id": request_id,
        "max_tokens": fields.max_output_tokens,
        "logprobs": fields.with_logprobs,
        "top_logprobs": fields.top_logprobs,
        "reasoning_effort": fields.reasoning.effort if fields.reasoning else None,
        "tools": [_tool(tool) for tool in fields.tools] if fields.tools else None,
        "tool_choice": _chosen(fields.tool_choice) if fields.tool_choice is not None else None,
        "response_format": _format(fields.text.format) if fields.text and fields.text.format else None,
    }
    for name in ("structured_outputs", "speculation"):
        if (value := getattr(fields, name)) is not None:
            body[name] = value.model_dump(by_alias=True, exclude_none=True)
    try:
        return ChatRequest.model_validate(body)
    except ValidationError as error:
        raise problem(error, body) from error


def _format(form: TextFormat | JsonObjectFormat | SchemaFormat) -> dict[str, Any]:
    if isinstance(form, SchemaFormat):
        return {
            "type": "json_schema",
            "json_schema": {"name": form.name, "schema": form.schema_, "strict": form.strict},
        }
    return {"type": form.type}


def _tool(tool: ResponseTool) -> dict[str, Any]:
    inner = tool.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
    wrong = "format" if tool.type == "function" else "parameters"
    if wrong in inner:
        raise ApiError(f"tools: {wrong} is not for a tool of type {tool.type}", param="tools", code="invalid_value")
    return {"type": tool.type, tool.type: inner}


def _chosen(choice: str | ResponseChoice) -> str | dict[str, Any]:
    if isinstance(choice, str):
        return choice
    if choice.type == "allowed_tools":
        return {"type": choice.type, "allowed_tools": {"mode": choice.mode or "auto", "tools": choice.tools or []}}
    return {"type": choice.type, choice.type: {"name": choice.name}}


def places(fields: ResponsesRequest) -> list[str]:
    """Return the client's own field of each turn of the chat body; a turn of several items has the first one's."""
    return _messages(fields)[1]


def _messages(fields: ResponsesRequest) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the chat body's turns, and the client's field that each comes from."""
    turns: list[dict[str, Any]] = []
    if fields.instructions:
        turns.append({"role": "system", "content": fields.instructions})
    places = ["instructions"] * len(turns)
    if isinstance(fields.input, str):
        return [*turns, {"role": "user", "content": fields.input}], [*places, "input"]
    for number, item in enumerate(fields.input):
        _append(turns, item)
        places += [f"input[{number}]"] * (len(turns) - len(places))
    return turns, places


def _append(turns: list[dict[str, Any]], item: Any) -> None:
    """Add an item; what the assistant thought, said and called in a row is one turn."""
    match item:
        case MessageItem(role="assistant"):
            _assistant(turns, "content")["content"] = _text(item.content)
        case MessageItem():
            turns.append({"role": item.role, "content": _text(item.content)})
        case ReasoningItem():
            text = "".join(part.text for part in item.content or item.summary or ())
            _assistant(turns, "reasoning_content", "content", "tool_calls")["reasoning_content"] = text
        case FunctionCallItem():
            call = {"name": item.name, "arguments": item.arguments}
            calls = _assistant(turns).setdefault("tool_calls", [])
            calls.append({"id": item.call_id, "type": "function", "function": call})
        case CustomCallItem():
            call = {"name": item.name, "input": item.input}
            calls = _assistant(turns).setdefault("tool_calls", [])
            calls.append({"id": item.call_id, "type": "custom", "custom": call})
        case OutputItem():
            turns.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})


def _assistant(turns: list[dict[str, Any]], *unless: str) -> dict[str, Any]:
    """Return the assistant's turn to be added to: the last one, unless it has one of these fields already."""
    if not turns or turns[-1]["role"] != "assistant" or any(name in turns[-1] for name in unless):
        turns.append({"role": "assistant"})
    return turns[-1]


def _text(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.content() for part in content)
