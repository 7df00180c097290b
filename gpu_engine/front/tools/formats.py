"""How a model writes tool calls, and the markers of its reasoning: read from the text of its chat template.

    answer = content_begin text | first call (separator call)* last      all but text and call may be empty
    call   = begin arguments end                                         begin holds the function's name

A custom tool's input is no JSON: its call is `raw_begin input raw_end`.
Invariant: `first + begin` and `raw_begin` both begin with `trigger`, with which a call begins in free text.
Not responsible for: the grammar of an answer (see composition.py), reading one (see parts.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from gpu_engine.api.ports import Tokenizer

NAME = "\0"
"""Stands for the function's name in the texts of a format."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format of a model's tool calls."""

    name: str
    """The name that GetModelInfo shows."""
    trigger: str
    begin: str
    end: str
    raw_begin: str
    raw_end: str
    separator: str = "\n"
    first: str = ""
    last: str = ""
    content_begin: str = ""
    """The text before content. With it, calls do not begin within text: an answer is calls or content."""
    parallel: bool = True
    """An answer may hold several calls."""
    short_ids: bool = False
    """The chat template takes only ids of calls with 9 letters and digits."""
    served: bool = True
    """False: the server recognises the format, and refuses requests that may be answered with calls in it."""
    native: bool = True
    """The chat template shows functions, calls and results itself. False: they become text of the conversation."""

    def begin_of(self, tool: str, *, raw: bool) -> str:
        """Return the text before the arguments of a call of `tool`."""
        return (self.raw_begin if raw else self.begin).replace(NAME, tool)

    def end_of(self, *, raw: bool) -> str:
        """Return the text after the arguments of a call."""
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
"""The format of a model whose chat template shows no functions."""

HERMES = ToolFormat(
    "hermes",
    trigger="<tool_call>",
    begin=f'<tool_call>\n{{"name": "{NAME}", "arguments": ',
    end="}\n</tool_call>",
    raw_begin=f'<tool_call>\n{{"name": "{NAME}"}}\n',
    raw_end="\n</tool_call>",
)
"""Hermes, Qwen 2.5, Qwen 3 and many others."""

LLAMA3 = ToolFormat(
    "llama3",
    trigger='{"name": "',
    begin=f'{{"name": "{NAME}", "parameters": ',
    end="}",
    raw_begin=f'{{"name": "{NAME}"}}\n',
    raw_end="\n{/}",
    separator="; ",
)
"""Llama 3.1, 3.2 and 3.3."""

MISTRAL = ToolFormat(
    "mistral",
    trigger="[TOOL_CALLS]",
    first="[TOOL_CALLS][",
    begin=f'{{"name": "{NAME}", "arguments": ',
    end="}",
    raw_begin=f'{{"name": "{NAME}"}}\n',
    raw_end="\n{/}",
    separator=", ",
    last="]",
    short_ids=True,
)
"""Mistral and Mixtral up to tokenizer version 7."""

MISTRAL_ARGS = ToolFormat(
    "mistral-args",
    trigger="[TOOL_CALLS]",
    begin=f"[TOOL_CALLS]{NAME}[ARGS]",
    end="",
    raw_begin=f"[TOOL_CALLS]{NAME}[ARGS]\n",
    raw_end="\n{/}",
    separator="",
    short_ids=True,
)
"""Mistral from tokenizer version 11 on."""


def _deepseek(name: str) -> str:
    """Return a marker of DeepSeek's vocabulary, which is written with U+FF5C and U+2581."""
    return "<\uff5c" + name.replace(" ", "\u2581") + "\uff5c>"


_CALLS_BEGIN, _CALLS_END = _deepseek("tool calls begin"), _deepseek("tool calls end")
_CALL_BEGIN, _CALL_END, _SEP = _deepseek("tool call begin"), _deepseek("tool call end"), _deepseek("tool sep")

DEEPSEEK = ToolFormat(
    "deepseek",
    trigger=_CALLS_BEGIN,
    first=_CALLS_BEGIN,
    begin=f"{_CALL_BEGIN}function{_SEP}{NAME}\n```json\n",
    end=f"\n```{_CALL_END}",
    raw_begin=f"{_CALL_BEGIN}function{_SEP}{NAME}\n```text\n",
    raw_end=f"\n```{_CALL_END}",
    last=_CALLS_END,
)
"""DeepSeek V3 and R1."""

DEEPSEEK_V31 = ToolFormat(
    "deepseek-v3.1",
    trigger=_CALLS_BEGIN,
    first=_CALLS_BEGIN,
    begin=f"{_CALL_BEGIN}{NAME}{_SEP}",
    end=_CALL_END,
    raw_begin=f"{_CALL_BEGIN}{NAME}{_SEP}\n",
    raw_end=_CALL_END,
    separator="",
    last=_CALLS_END,
)
"""DeepSeek V3.1."""

HARMONY = ToolFormat(
    "harmony",
    trigger="<|channel|>commentary to=functions.",
    begin=f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>",
    end="",
    raw_begin=f"<|channel|>commentary to=functions.{NAME} <|message|>\n",
    raw_end="<|end|>",
    content_begin="<|channel|>final<|message|>",
    parallel=False,
)
"""gpt-oss. The stop token `<|call|>` ends the answer after a call."""

FORMATS = (HERMES, JSON, LLAMA3, MISTRAL, MISTRAL_ARGS, DEEPSEEK, DEEPSEEK_V31, HARMONY)
"""All formats."""

QWEN3_CODER = replace(HERMES, name="qwen3-coder", served=False)
"""Qwen 3 Coder, whose arguments are XML."""

_MARKERS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
_HARMONY_MARKERS = Markers("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")


def tool_format(chat_template: Any) -> ToolFormat | None:
    """Return the format in which a model with this chat template calls functions.

    None: it has no template.
    """
    text = template_text(chat_template)
    if not text:
        return None
    if "<|channel|>" in text and "<|message|>" in text:
        return HARMONY
    if "<tool_call>" in text:
        return QWEN3_CODER if "<function=" in text else HERMES
    if _CALLS_BEGIN in text:
        return DEEPSEEK if "```json" in text else DEEPSEEK_V31
    if "[TOOL_CALLS]" in text:
        return _mistral(text)
    if "<|start_header_id|>" in text and '"parameters": ' in text:
        return LLAMA3
    return JSON


def _mistral(text: str) -> ToolFormat:
    if "[ARGS]" in text:
        return MISTRAL_ARGS
    return replace(MISTRAL, first="[TOOL_CALLS] [") if "[TOOL_CALLS] [" in text else MISTRAL


def reasoning_markers(chat_template: Any) -> Markers | None:
    """Return the markers of the reasoning phase that the chat template knows; None: it knows none."""
    text = template_text(chat_template)
    if "<|channel|>" in text and "<|message|>" in text:
        return _HARMONY_MARKERS
    return next((Markers(begin, end) for begin, end in _MARKERS if begin in text or end in text), None)


@lru_cache(maxsize=8)
def special_tokens(backend_tokenizer: Any) -> dict[str, int]:
    """Return the special tokens of a Rust tokenizer, by their text. They do not change while a model is loaded."""
    added = backend_tokenizer.get_added_tokens_decoder()
    return {str(token.content): int(number) for number, token in added.items() if token.special}


def opened_tokens(tokenizer: Tokenizer, form: ToolFormat | None, markers: Markers | None) -> tuple[int, ...]:
    """Return the special tokens with which an answer spells its calls and its reasoning, in the order of their ids."""
    texts = [markers.begin, markers.end] if markers else []
    if form is not None:
        texts += [form.trigger, form.begin, form.end, form.raw_begin, form.raw_end, form.separator]
        texts += [form.first, form.last, form.content_begin]
    special = special_tokens(tokenizer.backend_tokenizer)
    return tuple(sorted(number for content, number in special.items() if content and any(content in t for t in texts)))


def template_text(chat_template: Any) -> str:
    """Return the source of a chat template; of several, the one for tools, else the default one; "" for none."""
    if isinstance(chat_template, Mapping):
        return str(chat_template.get("tool_use") or chat_template.get("default") or "")
    return str(chat_template or "")
