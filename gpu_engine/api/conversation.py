"""The prompt of a request, and the tools and the reasoning of a conversation, as values within all limits.

The invariant: nothing here is changed once it is made.

Not responsible for: the checks (front/tools/fields.py).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function in an earlier turn."""

    id: str
    name: str
    arguments: str
    """The text of a JSON object; of a custom tool its input."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation."""

    role: str
    content: str = ""
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""


class ToolChoice(enum.Enum):
    """Whether an answer has tool calls; the values equal the proto enum's."""

    AUTO = 1
    NONE = 2
    REQUIRED = 3
    NAMED = 4


TOOL_FORMATS = (
    *("hermes", "json", "llama3", "mistral", "mistral-args", "deepseek", "deepseek-v3.1", "harmony", "deepseek-v3.2"),
    *("qwen3-coder", "seed-oss", "glm", "glm-4.7", "minimax-m2", "kimi-k2", "granite", "phi-4"),
    *("pythonic", "lfm2", "gemma-4", "function-gemma"),
)
"""The names of the formats in which models write tool calls."""


class InputKind(enum.Enum):
    """What a tool's input is."""

    JSON = "parameters"
    TEXT = "text"
    LARK = "lark"
    REGEX = "regex"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    input: InputKind = InputKind.JSON
    source: str = ""
    """The JSON Schema of the arguments, the Lark grammar or the regular expression; "" for none."""
    strict: bool = True

    @property
    def raw(self) -> bool:
        """The input is text and not JSON."""
        return self.input is not InputKind.JSON


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions of a request."""

    tools: tuple[Tool, ...]
    choice: ToolChoice = ToolChoice.AUTO
    name: str = ""
    """The function that must be called, for NAMED."""
    parallel: bool = True

    @property
    def callable(self) -> tuple[tuple[int, Tool], ...]:
        """The functions that the answer may call, each with its number in the request."""
        if self.choice is ToolChoice.NONE:
            return ()
        named = self.choice is ToolChoice.NAMED
        return tuple((i, tool) for i, tool in enumerate(self.tools) if not named or tool.name == self.name)


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What a request says about the reasoning phase."""

    enabled: bool | None = None
    """Whether the answer may begin with reasoning; None: if the model has such a phase."""
    max_tokens: int | None = None
    effort: str = ""
    begin: str = ""
    """"": the model's own marker."""
    end: str = ""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, the oldest message first."""

    turns: tuple[Turn, ...]
    template_arguments: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template; never changed."""
    continue_final_message: bool = False
    tools: Tools | None = None
    reasoning: Reasoning | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """A prompt that the client tokenised."""

    ids: tuple[int, ...]


Prompt = str | Tokens | Chat
