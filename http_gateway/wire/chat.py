"""The body of `/v1/chat/completions`: messages, tools, reasoning.

Not responsible for: fields that completions have, too (see sampling.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from http_gateway.wire.fields import Fields, Refusal
from http_gateway.wire.sampling import SHARED_REFUSALS, SamplingFields, Unsigned

TEXT_ALONE = "the model reads only text"
NO_THOUGHT = "none"
"""The reasoning effort that turns the reasoning off."""


class TextPart(Fields):
    """A part of a turn. `input_text` and `output_text` are the names of the Responses API."""

    REFUSED: ClassVar[Mapping[str, Refusal]] = {
        **{
            name: Refusal(TEXT_ALONE)
            for name in ("image_url", "input_audio", "file", "image", "audio_url", "video_url", "file_id", "detail")
        },
        "annotations": Refusal("an answer has none", ([],)),
        "logprobs": Refusal("a turn has none", ([],)),
    }

    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str = ""
    refusal: str | None = None
    """The text of a part of type refusal."""

    def content(self) -> str:
        """Return the text, whatever its name is."""
        return self.refusal or self.text


def _content(value: Any) -> str:
    return "text" if isinstance(value, str) else "parts"


Content = Annotated[Annotated[str, Tag("text")] | Annotated[list[TextPart], Tag("parts")], Discriminator(_content)]


class FunctionCall(Fields):
    """The call of a function."""

    name: str
    arguments: str = ""


class CustomCall(Fields):
    """The call of a custom tool."""

    name: str
    input: str = ""


class ToolCall(Fields):
    """A call that the assistant made."""

    id: str = ""
    type: Literal["function", "custom"] = "function"
    function: FunctionCall | None = None
    custom: CustomCall | None = None
    index: int | None = None
    """As a stream has it; without effect."""


class Message(Fields):
    """One turn."""

    REFUSED: ClassVar[Mapping[str, Refusal]] = {
        "audio": Refusal(TEXT_ALONE),
        "function_call": Refusal("use tool_calls"),
        "annotations": Refusal("an answer has none", ([],)),
    }

    role: Annotated[str, Field(min_length=1)]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The name of reasoning_content in newer versions of vLLM."""
    refusal: str | None = None
    """The assistant's refusal, in the place of content."""


class FunctionTool(Fields):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class GrammarDefinition(Fields):
    """The grammar of a custom tool's input."""

    syntax: Literal["lark", "regex"]
    definition: str


class CustomFormat(Fields):
    """What a custom tool's input is."""

    type: Literal["text", "grammar"]
    grammar: GrammarDefinition | None = None
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None
    """`syntax` and `definition` stand here in the Responses API."""


class CustomTool(Fields):
    """A tool whose input is text."""

    name: str
    description: str | None = None
    format: CustomFormat | None = None


class Tool(Fields):
    """A function, or a custom tool."""

    type: Literal["function", "custom"]
    function: FunctionTool | None = None
    custom: CustomTool | None = None


class NamedFunction(Fields):
    """The function or custom tool that a tool choice names."""

    name: str


class AllowedTools(Fields):
    """A choice among some of the tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[dict[str, Any]], Field(min_length=1)]


class NamedChoice(Fields):
    """The tool that the model must call, or the tools among which it chooses."""

    type: Literal["function", "custom", "allowed_tools"]
    function: NamedFunction | None = None
    custom: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


def _choice(value: Any) -> str:
    return "word" if isinstance(value, str) else "tool"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")] | Annotated[NamedChoice, Tag("tool")],
    Discriminator(_choice),
]


class ChatRequest(SamplingFields):
    """The body of `/v1/chat/completions`."""

    REFUSED: ClassVar[Mapping[str, Refusal]] = {
        **SHARED_REFUSALS,
        "functions": Refusal("use tools"),
        "function_call": Refusal("use tool_choice"),
        "audio": Refusal(TEXT_ALONE),
        "modalities": Refusal(TEXT_ALONE, (["text"],)),
        "prediction": Refusal("only the server drafts; a text in the prompt is drafted from"),
        "web_search_options": Refusal("the server reaches no web"),
        "verbosity": Refusal("say it in the prompt", ("medium",)),
        "store": Refusal("the server keeps no answers", (False,)),
        "service_tier": Refusal("there is one tier; see priority", ("auto", "default")),
        "moderation": Refusal("there is no moderation"),
        "documents": Refusal("use chat_template_kwargs"),
        "chat_template": Refusal("the model's own chat template is used"),
        "add_generation_prompt": Refusal("use continue_final_message", (True,)),
        "echo": Refusal("only completions echo their prompt", (False,)),
        "prompt_cache_retention": Refusal("the prefix cache keeps what its memory holds"),
    }

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Unsigned | None = None
    logprobs: bool | None = None
    top_logprobs: Unsigned | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Unsigned | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    metadata: dict[str, str] | None = None
    """Without effect on the answer."""
    prompt_cache_key: str | None = None
    """Without effect: prompts with one prefix share it anyway."""
    safety_identifier: str | None = None
    """Without effect on the answer."""
