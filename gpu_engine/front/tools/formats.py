"""How a model writes tool calls, and the markers of its reasoning: read from the text of its chat template.

    answer = text | first call (separator call)* last          first and last may be empty
    call   = begin arguments end                               begin holds the function's name

A custom tool's input is no JSON: its call is `raw_begin input raw_end`.
Invariant: `first + begin`, and `raw_begin` likewise, begins with `trigger`, with which a call begins in free text.
Not responsible for: the grammar of an answer (see composition.py), reading one (see parts.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NAME = "\0"
"""Stands for the function's name in the texts of a format."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format of a model's tool calls."""

    name: str
    """As in GetModelInfo."""
    trigger: str
    begin: str
    end: str
    raw_begin: str
    raw_end: str
    separator: str = "\n"
    first: str = ""
    last: str = ""
    native: bool = True
    """The chat template shows functions, calls and results itself. False: they become text of the conversation."""

    def begin_of(self, tool: str, *, raw: bool) -> str:
        """Return the text in front of the arguments of a call of `tool`."""
        return (self.raw_begin if raw else self.begin).replace(NAME, tool)

    def end_of(self, *, raw: bool) -> str:
        """Return the text behind the arguments of a call."""
        return self.raw_end if raw else self.end


@dataclass(frozen=True, slots=True)
class Markers:
    """The texts with which the reasoning phase begins and ends."""

    begin: str
    end: str


JSON = ToolFormat(
    "json",
    trigger='{"name": "',
    begin=f'{{"name": "{NAME}", "arguments": ',
    end="}",
    raw_begin=f'{{"name": "{NAME}"}}\n',
    raw_end="\n{/}",
    native=False,
)
"""Where the chat template shows no functions."""

HERMES = ToolFormat(
    "hermes",
    trigger="<tool_call>",
    begin=f'<tool_call>\n{{"name": "{NAME}", "arguments": ',
    end="}\n</tool_call>",
    raw_begin=f'<tool_call>\n{{"name": "{NAME}"}}\n',
    raw_end="\n</tool_call>",
)
"""Hermes, Qwen 2.5, Qwen 3 and many others."""

FORMATS = (HERMES, JSON)
"""All formats."""

_MARKERS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


def tool_format(chat_template: Any) -> ToolFormat | None:
    """Return the format in which a model with this chat template calls functions; None: it has no template."""
    text = template_text(chat_template)
    if not text:
        return None
    if "<tool_call>" in text:
        return HERMES
    return JSON


def reasoning_markers(chat_template: Any) -> Markers | None:
    """Return the markers of the reasoning phase that the chat template knows; None: it knows none."""
    text = template_text(chat_template)
    return next((Markers(begin, end) for begin, end in _MARKERS if begin in text or end in text), None)


def template_text(chat_template: Any) -> str:
    """Return the source of a chat template; of several, the one for tools, else the default one; "" for none."""
    if isinstance(chat_template, Mapping):
        return str(chat_template.get("tool_use") or chat_template.get("default") or "")
    return str(chat_template or "")
