"""The bodies of Anthropic's `/v1/messages`, and their translation into a chat body.

Invariant: the server keeps nothing between calls. A block or tool that it cannot serve is refused by its type.

Not responsible for: answers (answers/messages.py), Anthropic's shape of errors (errors.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NoReturn

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from http_gateway.wire.chat import NO_THOUGHT, TEXT_ALONE, ChatRequest
from http_gateway.wire.errors import ApiError
from http_gateway.wire.fields import REFUSED, Fields, Refusal, problem
from http_gateway.wire.outputs import Schema
from http_gateway.wire.responses import KEEPS_NOTHING
from http_gateway.wire.sampling import Number, Signed, Unsigned

RUNS_NO_TOOLS = "the server runs no tools; give the tool an input_schema"
CacheControl = dict[str, Any]
"""Without effect: the prefix cache keeps what its memory holds."""


def _refuse_type(reason: str) -> NoReturn:
    raise PydanticCustomError(REFUSED, "is not supported: {reason}", {"name": "type", "reason": reason})


class TextBlock(Fields):
    """Text of a turn."""

    REFUSED: ClassVar[Mapping[str, Refusal]] = {"citations": Refusal("the server cites nothing", ([],))}

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class ThinkingBlock(Fields):
    """What the assistant thought."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None
    """Without effect: thinking is plain text."""


class ToolUseBlock(Fields):
    """A call that the assistant made."""

    REFUSED: ClassVar[Mapping[str, Refusal]] = {
        "caller": Refusal("only the model calls tools", ({"type": "direct"},)),
        "toolset_name": Refusal(RUNS_NO_TOOLS),
    }

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class OtherBlock(Fields):
    """A block that the server does not serve: no value of it is valid."""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else data
        _refuse_type(f"{kind!r} is no block that the server reads; {TEXT_ALONE}")


def _block_type(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"{kind if kind in ('text', 'thinking', 'tool_use', 'tool_result') else 'other'} block"


def _text_type(value: Any) -> str:
    return "text block" if _block_type(value) == "text block" else "other block"


def _is_text(value: Any) -> str:
    return "string" if isinstance(value, str) else "blocks"


Text = Annotated[
    Annotated[str, Tag("string")]
    | Annotated[
        list[
            Annotated[
                Annotated[TextBlock, Tag("text block")] | Annotated[OtherBlock, Tag("other block")],
                Discriminator(_text_type),
            ]
        ],
        Tag("blocks"),
    ],
    Discriminator(_is_text),
]
"""Text by itself, or in blocks."""


class ToolResultBlock(Fields):
    """The result of a call."""

    REFUSED: ClassVar[Mapping[str, Refusal]] = {"toolset_name": Refusal(RUNS_NO_TOOLS)}

    type: Literal["tool_result"]
    tool_use_id: str
    content: Text | None = None
    is_error: bool | None = None
    """Without effect: no chat template has a mark for it."""
    cache_control: CacheControl | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("text block")]
    | Annotated[ThinkingBlock, Tag("thinking block")]
    | Annotated[ToolUseBlock, Tag("tool_use block")]
    | Annotated[ToolResultBlock, Tag("tool_result block")]
    | Annotated[OtherBlock, Tag("other block")],
    Discriminator(_block_type),
]


class Turn(Fields):
    """One turn."""

    role: Literal["user", "assistant"]
    content: Annotated[
        Annotated[str, Tag("string")] | Annotated[list[Block], Tag("blocks")],
        Discriminator(_is_text),
    ]


class MessageTool(Fields):
    """A function that the model may call."""

    REFUSED: ClassVar[Mapping[str, Refusal]] = {
        "allowed_callers": Refusal("only the model calls tools", (["direct"],)),
        "defer_loading": Refusal("the model sees every tool", (False,)),
        "eager_input_streaming": Refusal("input is always sent as it comes", (True, False)),
        "input_examples": Refusal("put them into the description", ([],)),
    }

    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_others(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("type") not in (None, "custom"):
            _refuse_type(RUNS_NO_TOOLS)
        return data


class Choice(Fields):
    """Whether the model calls a tool, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Fields):
    """The phase before the answer."""

    REFUSED: ClassVar[Mapping[str, Refusal]] = {"display": Refusal("thinking is shown whole", ("summarized",))}

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Unsigned | None = None


class JsonOutput(Fields):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


class OutputConfig(Fields):
    """What the answer must look like, and how long the model thinks."""

    effort: str | None = None
    format: JsonOutput | None = None


class Metadata(Fields):
    """Without effect on the answer."""

    user_id: str | None = None


class CountTokensRequest(Fields):
    """The body of `/v1/messages/count_tokens`: what the prompt is made of."""

    REFUSED: ClassVar[Mapping[str, Refusal]] = {
        "container": Refusal(KEEPS_NOTHING),
        "mcp_servers": Refusal(RUNS_NO_TOOLS, ([],)),
        "context_management": Refusal("a prompt is never cut; send a shorter one"),
        "diagnostics": Refusal("there are none"),
        "inference_geo": Refusal("there is one server"),
        "speed": Refusal("there is one speed; see speculation in /v1/chat/completions", ("standard",)),
        "output_format": Refusal("use output_config.format"),
    }

    model: str | None = None
    """A name that `/v1/models` lists, of a model or of an adapter. Unset: the first one."""
    messages: Annotated[list[Turn], Field(min_length=1)]
    system: Text | None = None
    tools: list[MessageTool] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None


class MessagesRequest(CountTokensRequest):
    """The body of `/v1/messages`."""

    REFUSED: ClassVar[Mapping[str, Refusal]] = {
        **CountTokensRequest.REFUSED,
        "service_tier": Refusal("there is one tier", ("auto", "standard_only")),
    }

    max_tokens: Annotated[Unsigned, Field(ge=1)]
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Signed | None = None
    stop_sequences: list[str] | None = None
    metadata: Metadata | None = None
    stream: bool | None = None


def chat_body(fields: CountTokensRequest, request_id: str, *, thinks: bool) -> ChatRequest:
    """Return the chat body that asks for the same answer. Raises ApiError.

    thinks: the model has markers of its own for what it thinks.
    """
    turns, config = [turn for _, turn in _messages(fields)], fields.output_config or OutputConfig()
    body: dict[str, Any] = {
        "model": fields.model,
        "messages": turns,
        "request_id": request_id,
        "continue_final_message": turns[-1]["role"] == "assistant",
        "reasoning_effort": config.effort,
        "tools": [_tool(tool) for tool in fields.tools] if fields.tools else None,
    }
    if config.format is not None:
        form = {"name": "answer", "schema": config.format.schema_, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    if (thinking := fields.thinking) is not None:
        if (thinking.type == "enabled") != (thinking.budget_tokens is not None):
            raise _wrong("thinking.budget_tokens", "is required with type: enabled, and only with it")
        body["thinking_token_budget"] = thinking.budget_tokens
        if thinking.type == "disabled":
            body["reasoning_effort"] = NO_THOUGHT if thinks else None
    if (choice := fields.tool_choice) is not None:
        body |= _chosen(choice)
    if isinstance(fields, MessagesRequest):
        body |= {
            "max_tokens": fields.max_tokens,
            "temperature": fields.temperature,
            "top_p": fields.top_p,
            "top_k": fields.top_k,
            "stop": fields.stop_sequences,
            "stream": fields.stream,
            "user": fields.metadata.user_id if fields.metadata else None,
        }
    try:
        return ChatRequest.model_validate(body)
    except ValidationError as error:
        raise problem(error, body) from error


def _wrong(field: str, what: str) -> ApiError:
    return ApiError(f"{field}: {what}", param=field, code="invalid_value")


def _tool(tool: MessageTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function | {"strict": tool.strict}}


def _chosen(choice: Choice) -> dict[str, Any]:
    if (choice.type == "tool") != (choice.name is not None):
        raise _wrong("tool_choice.name", "is required with type: tool, and only with it")
    words = {"auto": "auto", "any": "required", "none": "none"}
    named = {"type": "function", "function": {"name": choice.name}}
    parallel = None if choice.disable_parallel_tool_use is None else not choice.disable_parallel_tool_use
    return {"tool_choice": words.get(choice.type, named), "parallel_tool_calls": parallel}


def places(fields: CountTokensRequest) -> list[str]:
    """Return the client's own field of each turn of the chat body. Raises ApiError."""
    return [place for place, _ in _messages(fields)]


def _messages(fields: CountTokensRequest) -> list[tuple[str, dict[str, Any]]]:
    """Return the chat body's turns, each with the client's field that it comes from."""
    turns: list[tuple[str, dict[str, Any]]] = []
    if fields.system:
        turns.append(("system", {"role": "system", "content": _content(fields.system)}))
    calls: set[str] = set()
    for number, turn in enumerate(fields.messages):
        place = f"messages[{number}]"
        if isinstance(turn.content, str):
            turns.append((place, {"role": turn.role, "content": turn.content}))
        elif turn.role == "assistant":
            turns.append((place, _assistant(turn.content, calls, place)))
        else:
            turns += [(place, made) for made in _user(turn.content, calls, place)]
    return turns


def _user(blocks: Sequence[Any], calls: set[str], where: str) -> list[dict[str, Any]]:
    """Return the turns of a user's message: one for each result, and one for the text between two of them."""
    turns: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        match block:
            case ToolResultBlock():
                if block.tool_use_id not in calls:
                    field = f"{where}.content[{number}].tool_use_id"
                    raise _wrong(field, f"{block.tool_use_id!r} is the id of no tool_use block before it")
                content = "" if block.content is None else _content(block.content)
                turns.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
            case TextBlock():
                if not turns or turns[-1]["role"] != "user":
                    turns.append({"role": "user", "content": []})
                turns[-1]["content"].append({"type": "text", "text": block.text})
            case _:
                raise _wrong(f"{where}.content[{number}].type", f"{block.type} is for the assistant")
    return turns or [{"role": "user", "content": ""}]


def _assistant(blocks: Sequence[Any], calls: set[str], where: str) -> dict[str, Any]:
    """Return the assistant's turn; the ids of its calls are added to `calls`."""
    turn: dict[str, Any] = {"role": "assistant"}
    for number, block in enumerate(blocks):
        match block:
            case ThinkingBlock():
                turn["reasoning_content"] = turn.get("reasoning_content", "") + block.thinking
            case TextBlock():
                turn["content"] = turn.get("content", "") + block.text
            case ToolUseBlock():
                call = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                turn.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": call})
                calls.add(block.id)
            case _:
                raise _wrong(f"{where}.content[{number}].type", f"{block.type} is for the user")
    return turn


def _content(text: Any) -> str | list[dict[str, Any]]:
    return text if isinstance(text, str) else [{"type": "text", "text": block.text} for block in text]
