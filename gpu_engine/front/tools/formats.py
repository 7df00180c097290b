"""How a model writes tool calls, and the markers of its reasoning: read from the text of its chat template.

    answer    = content_begin text | first call (separator call)* last      all but text and call may be empty
    call      = begin arguments end                                         begin holds the function's name
    arguments = a JSON object, or an argument.begin value argument.end for each of them, or `literals`

A custom tool's input is no JSON: its call is `raw_begin input raw_end`.
Invariant: `first + begin` and `raw_begin` both begin with `trigger`, with which a call begins in free text.
Not responsible for: the grammar of an answer (see composition.py), reading one (see parts.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from gpu_engine.api.ports import Tokenizer

NAME = "\0"
"""Stands for the name of the function, or of the parameter, in the texts of a format."""
CALL_ID = "functions."
"""The beginning of a call's id in a format whose calls have numbers."""


@dataclass(frozen=True, slots=True)
class ArgumentMarkers:
    """The texts around an argument, in a format that writes arguments one by one (see parameters.py)."""

    begin: str
    """Holds the parameter's name."""
    end: str
    json_begin: str = ""
    """The text before a value that is no string. "": as `begin`."""

    def begin_of(self, parameter: str, *, text: bool) -> str:
        """Return the text before a value. `text`: it is a string."""
        return (self.begin if text or not self.json_begin else self.json_begin).replace(NAME, parameter)


@dataclass(frozen=True, slots=True)
class Literals:
    """The notation of the arguments in a format whose calls look like a call in a language (see literals.py)."""

    assign: str
    """Between a parameter's name and its value."""
    separator: str
    quote: str
    """Around a string. A quotation mark: strings, lists and objects are JSON's, words are Python's."""
    sorts: bool = False
    """The arguments come in the order of their names, as the chat template shows them."""

    @property
    def is_python(self) -> bool:
        """Whether values are written in Python's way."""
        return self.quote == '"'


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
    native: bool = True
    """The chat template shows functions, calls and results itself. False: they become text of the conversation."""
    argument: ArgumentMarkers | None = None
    """The texts around each argument. None: the arguments are a JSON object, or `literals`."""
    literals: Literals | None = None
    """The notation of the arguments, in place of a JSON object."""
    starts_answer: bool = False
    """An answer is calls or content from its start, and content does not begin as calls do."""
    number_end: str = ""
    """The text after a call's number, which follows `begin`. "": calls have no number."""

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
"""Llama 3.1, 3.2 and 3.3, and Llama 4."""

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

_DSML = "\uff5cDSML\uff5c"

DEEPSEEK_V32 = ToolFormat(
    "deepseek-v3.2",
    trigger=f"<{_DSML}function_calls>",
    first=f"<{_DSML}function_calls>\n",
    begin=f'<{_DSML}invoke name="{NAME}">\n',
    end=f"</{_DSML}invoke>\n",
    raw_begin=f'<{_DSML}invoke name="{NAME}">\n',
    raw_end=f"\n</{_DSML}invoke>\n",
    separator="",
    last=f"</{_DSML}function_calls>",
    argument=ArgumentMarkers(
        f'<{_DSML}parameter name="{NAME}" string="true">',
        f"</{_DSML}parameter>\n",
        f'<{_DSML}parameter name="{NAME}" string="false">',
    ),
)
"""DeepSeek V3.2."""

QWEN3_CODER = ToolFormat(
    "qwen3-coder",
    trigger="<tool_call>",
    begin=f"<tool_call>\n<function={NAME}>\n",
    end="</function>\n</tool_call>",
    raw_begin=f"<tool_call>\n<function={NAME}>\n",
    raw_end="\n</function>\n</tool_call>",
    argument=ArgumentMarkers(f"<parameter={NAME}>\n", "\n</parameter>\n"),
)
"""Qwen 3 Coder, Qwen 3.5 and 3.6."""

SEED_OSS = ToolFormat(
    "seed-oss",
    trigger="<seed:tool_call>",
    begin=f"<seed:tool_call>\n<function={NAME}>\n",
    end="</function>\n</seed:tool_call>",
    raw_begin=f"<seed:tool_call>\n<function={NAME}>\n",
    raw_end="\n</function>\n</seed:tool_call>",
    argument=ArgumentMarkers(f"<parameter={NAME}>", "</parameter>\n"),
)
"""Seed-OSS."""

GLM = ToolFormat(
    "glm",
    trigger="<tool_call>",
    begin=f"<tool_call>{NAME}\n",
    end="</tool_call>",
    raw_begin=f"<tool_call>{NAME}\n",
    raw_end="\n</tool_call>",
    argument=ArgumentMarkers(f"<arg_key>{NAME}</arg_key>\n<arg_value>", "</arg_value>\n"),
)
"""GLM 4.5 and 4.6."""

GLM_47 = ToolFormat(
    "glm-4.7",
    trigger="<tool_call>",
    begin=f"<tool_call>{NAME}",
    end="</tool_call>",
    raw_begin=f"<tool_call>{NAME}\n",
    raw_end="\n</tool_call>",
    separator="",
    argument=ArgumentMarkers(f"<arg_key>{NAME}</arg_key><arg_value>", "</arg_value>"),
)
"""GLM 4.7 and GLM 5."""

MINIMAX_M2 = ToolFormat(
    "minimax-m2",
    trigger="<minimax:tool_call>",
    first="<minimax:tool_call>\n",
    begin=f'<invoke name="{NAME}">\n',
    end="</invoke>\n",
    raw_begin=f'<invoke name="{NAME}">\n',
    raw_end="\n</invoke>\n",
    separator="",
    last="</minimax:tool_call>",
    argument=ArgumentMarkers(f'<parameter name="{NAME}">', "</parameter>\n"),
)
"""MiniMax M2 to M2.7."""

KIMI_K2 = ToolFormat(
    "kimi-k2",
    trigger="<|tool_calls_section_begin|>",
    first="<|tool_calls_section_begin|>",
    begin=f"<|tool_call_begin|>{CALL_ID}{NAME}:",
    end="<|tool_call_end|>",
    raw_begin=f"<|tool_call_begin|>{CALL_ID}{NAME}:",
    raw_end="<|tool_call_end|>",
    separator="",
    last="<|tool_calls_section_end|>",
    number_end="<|tool_call_argument_begin|>",
)
"""Kimi K2. The id of a call is the text before its arguments, as the chat template shows it again."""

GRANITE = ToolFormat(
    "granite",
    trigger="<|tool_call|>",
    first="<|tool_call|>[",
    begin=f'{{"name": "{NAME}", "arguments": ',
    end="}",
    raw_begin=f'{{"name": "{NAME}"}}\n',
    raw_end="\n{/}",
    separator=", ",
    last="]",
)
"""Granite 3. Granite 4 writes calls as Hermes does."""

PHI_4 = ToolFormat(
    "phi-4",
    trigger="<|tool_call|>",
    begin=f'<|tool_call|>{{"name": "{NAME}", "arguments": ',
    end="}<|/tool_call|>",
    raw_begin=f'<|tool_call|>{{"name": "{NAME}"}}\n',
    raw_end="\n<|/tool_call|>",
    separator="",
)
"""Phi 4 mini."""

_PYTHON = Literals("=", ", ", '"')

PYTHONIC = ToolFormat(
    "pythonic",
    trigger="[",
    first="[",
    begin=f"{NAME}(",
    end=")",
    raw_begin=f"{NAME}(input='''",
    raw_end="''')",
    separator=", ",
    last="]",
    literals=_PYTHON,
    starts_answer=True,
)
"""Llama 4 and Llama 3.2 with a template that asks for calls in the way of Python."""

LFM2 = ToolFormat(
    "lfm2",
    trigger="<|tool_call_start|>",
    first="<|tool_call_start|>[",
    begin=f"{NAME}(",
    end=")",
    raw_begin=f"{NAME}(input='''",
    raw_end="''')",
    separator=", ",
    last="]<|tool_call_end|>",
    literals=_PYTHON,
)
"""LFM 2 and 2.5."""

GEMMA_4 = ToolFormat(
    "gemma-4",
    trigger="<|tool_call>",
    begin=f"<|tool_call>call:{NAME}{{",
    end="}<tool_call|>",
    raw_begin=f'<|tool_call>call:{NAME}{{input:<|"|>',
    raw_end='<|"|>}<tool_call|>',
    separator="",
    literals=Literals(":", ",", '<|"|>', sorts=True),
)
"""Gemma 4."""

FUNCTION_GEMMA = ToolFormat(
    "function-gemma",
    trigger="<start_function_call>",
    begin=f"<start_function_call>call:{NAME}{{",
    end="}<end_function_call>",
    raw_begin=f"<start_function_call>call:{NAME}{{input:<escape>",
    raw_end="<escape>}<end_function_call>",
    separator="",
    literals=Literals(":", ",", "<escape>", sorts=True),
)
"""FunctionGemma."""

FORMATS = (
    *(HERMES, JSON, LLAMA3, MISTRAL, MISTRAL_ARGS, DEEPSEEK, DEEPSEEK_V31, HARMONY),
    *(DEEPSEEK_V32, QWEN3_CODER, SEED_OSS, GLM, GLM_47, MINIMAX_M2, KIMI_K2, GRANITE, PHI_4),
    *(PYTHONIC, LFM2, GEMMA_4, FUNCTION_GEMMA),
)
"""All formats."""

_MARKERS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
_GEMMA_MARKERS = Markers("<|channel>thought\n", "<channel|>")
_HARMONY_MARKERS = Markers("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")


def tool_format(chat_template: Any) -> ToolFormat | None:
    """Return the format in which a model with this chat template calls functions: the one that a comment at its
    start names (`with_format`), else the one whose markers it has. None: it has no template.
    """
    text = template_text(chat_template)
    if not text:
        return None
    if (named := _NAMED.match(text)) is not None and (form := _BY_NAME.get(named[1])) is not None:
        return form if "tools" in text[named.end() :] else replace(form, native=False)
    if "<|channel|>" in text and "<|message|>" in text:
        return HARMONY
    for mark, form in _BY_MARK:
        if mark in text:
            return form
    if "<tool_call>" in text:
        return _in_tool_call(text)
    if _CALLS_BEGIN in text:
        return DEEPSEEK if "```json" in text else DEEPSEEK_V31
    if "[TOOL_CALLS]" in text:
        return _mistral(text)
    if "<|start_header_id|>" in text or "<|header_start|>" in text:
        if "[func_name1(" in text:
            return PYTHONIC
        if '"parameters": ' in text:
            return LLAMA3
    return JSON


def with_format(chat_template: Any, name: str) -> Any:
    """Return a chat template that names the format of its calls, whatever its text says otherwise."""
    if isinstance(chat_template, Mapping):
        return {key: with_format(one, name) for key, one in chat_template.items()}
    return f"{{#- tool_format: {name} -#}}\n{chat_template}" if chat_template else chat_template


_NAMED = re.compile(r"\{#-? tool_format: ([\w.-]+) -?#\}")
_BY_NAME = {form.name: form for form in FORMATS}
_BY_MARK = (
    (_DSML, DEEPSEEK_V32),
    ("<minimax:tool_call>", MINIMAX_M2),
    ("<seed:tool_call>", SEED_OSS),
    ("<|tool_calls_section_begin|>", KIMI_K2),
    ("<|/tool_call|>", PHI_4),
    ("<|tool_call|>", GRANITE),
    ("<|tool_call_start|>", LFM2),
    ("<|tool_list_start|>", LFM2),
    ("<|tool_call>", GEMMA_4),
    ("<start_function_call>", FUNCTION_GEMMA),
)
"""The texts by which a template's format is recognised, and what they mean."""


def _in_tool_call(text: str) -> ToolFormat:
    """Return the format of a template whose calls stand between <tool_call> and </tool_call>."""
    if "<function=" in text:
        return QWEN3_CODER
    if "<arg_key>" not in text:
        return HERMES
    return GLM if "</arg_key>\n<arg_value>" in text or "</arg_key>\\n<arg_value>" in text else GLM_47


def _mistral(text: str) -> ToolFormat:
    if "[ARGS]" in text:
        return MISTRAL_ARGS
    return replace(MISTRAL, first="[TOOL_CALLS] [") if "[TOOL_CALLS] [" in text else MISTRAL


def reasoning_markers(chat_template: Any) -> Markers | None:
    """Return the markers of the reasoning phase that the chat template knows; None: it knows none."""
    text = template_text(chat_template)
    if "<|channel|>" in text and "<|message|>" in text:
        return _HARMONY_MARKERS
    if "<|channel>" in text and "<channel|>" in text:
        return _GEMMA_MARKERS
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
        texts += [form.first, form.last, form.content_begin, form.number_end]
        if form.argument is not None:
            texts += [form.argument.begin, form.argument.end, form.argument.json_begin]
        if form.literals is not None:
            texts.append(form.literals.quote)
    special = special_tokens(tokenizer.backend_tokenizer)
    return tuple(sorted(number for content, number in special.items() if content and any(content in t for t in texts)))


def template_text(chat_template: Any) -> str:
    """Return the source of a chat template; of several, the one for tools, else the default one; "" for none."""
    if isinstance(chat_template, Mapping):
        return str(chat_template.get("tool_use") or chat_template.get("default") or "")
    return str(chat_template or "")
