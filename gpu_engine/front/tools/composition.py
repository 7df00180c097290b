"""One grammar of an answer: reasoning, tool calls and the request's own grammar, as a structural tag.

    choice      without a grammar                       with one
    auto        free text, in which a trigger begins    only calls, or only the grammar's content
                a call
    required    only calls, at least one                only calls, at least one
    named       calls of one function, at least one     calls of one function, at least one
    none        no grammar                              the grammar itself

In each case a reasoning phase may come first.
Invariant: wherever a call may begin, its whole text is constrained, from the trigger to its end.
Not responsible for: compiling it (the grammar process), reading an answer (see parts.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpu_engine.api.conversation import Chat, InputKind, Prompt, Tokens, Tool, ToolChoice, Tools, Turn
from gpu_engine.api.errors import InvalidRequest
from gpu_engine.api.ports import Tokenizer
from gpu_engine.api.request import GrammarKind, GrammarSpec, ValidatedRequest
from gpu_engine.front.tools.argument_formats import listed_call
from gpu_engine.front.tools.chat import render
from gpu_engine.front.tools.fields import MAX_MARKER_BYTES, read_json
from gpu_engine.front.tools.formats import Markers, ToolFormat, opened_tokens, reasoning_markers, tool_format
from gpu_engine.front.tools.literals import literal_call
from gpu_engine.front.tools.parameters import moved
from gpu_engine.front.tools.parts import AnswerLayout

Node = dict[str, Any]

_NUMBER: Node = {"type": "regex", "pattern": "[0-9]{1,4}"}
"""The number of a call."""

_ROOT_CHOICES = frozenset({"$ref", "anyOf", "oneOf", "allOf", "enum", "const"})
"""Keywords next to which a backend may not enforce `type`."""


@dataclass(frozen=True, slots=True)
class ReasoningPhase:
    """The phase before an answer."""

    markers: Markers
    is_open: bool
    """The prompt ends with the marker that begins the phase."""
    max_tokens: int | None


def planned(valid: ValidatedRequest, tokenizer: Tokenizer) -> tuple[ValidatedRequest, AnswerLayout | None]:
    """Return a request with the grammar of its whole answer, and the layout of the answer; None: it has one part.

    Raises InvalidRequest.
    """
    own = valid.params.grammar
    tools = valid.prompt.tools if isinstance(valid.prompt, Chat) else None
    if tools is None and valid.reasoning is None:
        return valid, None
    form = tool_format(tokenizer.chat_template)
    if tools is not None and form is None:
        raise InvalidRequest("tools", "this model has no chat template")
    phase = reasoning_phase(valid, tokenizer)
    opened = opened_tokens(tokenizer, form, phase.markers if phase else None)
    try:
        grammar = composed(tools, form, own, phase, opened)
    except RecursionError:
        raise InvalidRequest("tools", "a schema of a function is nested too deeply") from None
    if grammar is not None and valid.params.sampling.ignore_eos:
        raise InvalidRequest("sampling.ignore_eos", "is not allowed together with reasoning.max_tokens")
    free = tools is not None and tools.choice is ToolChoice.AUTO and not _has_content(own)
    layout = AnswerLayout(
        tools,
        form,
        triggered=free and form is not None and not form.content_begin and not form.starts_answer,
        markers=phase.markers if phase else None,
        thinks_first=phase is not None and phase.is_open,
        special_text=bool(opened),
    )
    return replace(valid, params=replace(valid.params, grammar=grammar)), layout


def reasoning_phase(valid: ValidatedRequest, tokenizer: Tokenizer) -> ReasoningPhase | None:
    """Return the phase with which an answer may begin; None: it has none. Raises InvalidRequest."""
    wanted, prompt = valid.reasoning, valid.prompt
    if wanted is None:
        return None
    if wanted.effort and not isinstance(prompt, Chat):
        raise InvalidRequest("reasoning.effort", "needs messages, because the chat template reads it")
    continues = isinstance(prompt, Chat) and prompt.continue_final_message
    if continues and wanted.enabled:
        raise InvalidRequest("reasoning.enabled", "is not possible with messages.continue_final_message")
    markers = Markers(wanted.begin, wanted.end) if wanted.begin else reasoning_markers(tokenizer.chat_template)
    if markers is None and wanted.enabled:
        raise InvalidRequest("reasoning.enabled", "the chat template has no reasoning; give reasoning.begin and .end")
    if markers is None or wanted.enabled is False or continues:
        return None
    return ReasoningPhase(markers, _end_of(prompt, tokenizer).endswith(markers.begin), wanted.max_tokens)


def _end_of(prompt: Prompt, tokenizer: Tokenizer) -> str:
    """Return the end of a prompt's text, without trailing white space."""
    match prompt:
        case str(text):
            end = text[-2 * MAX_MARKER_BYTES :]
        case Tokens(ids):
            tail = [list(ids[-MAX_MARKER_BYTES:])]
            (end,) = tokenizer.backend_tokenizer.decode_batch(tail, skip_special_tokens=False)
        case _:
            # The end depends on the template's arguments, and not on a conversation, which may be long.
            end = render(replace(prompt, turns=(Turn("user", "x"),), tools=None), tokenizer)
    return str(end).rstrip()


def composed(
    tools: Tools | None,
    form: ToolFormat | None,
    grammar: GrammarSpec | None,
    phase: ReasoningPhase | None = None,
    opened: Sequence[int] = (),
) -> GrammarSpec | None:
    """Return the grammar of an answer; None: it is free text.

    `opened` are the special tokens with which the answer is spelled. `grammar` is the request's own: its white space,
    its backend and whether parts may stay unenforced hold for all.
    """
    own = grammar if _has_content(grammar) else None
    node = _answer(tools, form, own) if tools and form and tools.callable else None
    if node is None and phase is None:
        return own
    if node is None and own is None and (phase is None or phase.max_tokens is None):
        return None
    document: Node = {"type": "structural_tag", "format": node or _content(form, own)}
    if opened:
        document["open_tokens"] = list(opened)
    if phase is not None:
        document["reasoning"] = {
            "begin": phase.markers.begin,
            "end": phase.markers.end,
            "open": phase.is_open,
            "max_tokens": phase.max_tokens,
        }
    source = json.dumps(document, ensure_ascii=False)
    if grammar is None:
        return GrammarSpec(GrammarKind.COMPOSED, source)
    return replace(grammar, kind=GrammarKind.COMPOSED, source=source)


def _answer(tools: Tools, form: ToolFormat, grammar: GrammarSpec | None) -> Node:
    """Return the format of an answer that may have calls."""
    calls = [(_schema_field(i), tool) for i, tool in tools.callable]
    if tools.choice is not ToolChoice.AUTO:
        return _calls(calls, tools, form, always_strict=True)
    if grammar is None and not form.content_begin and not form.starts_answer:
        return _free(calls, tools, form)
    as_schema = grammar is not None and _is_json(grammar)
    return {"type": "or", "elements": [_calls(calls, tools, form, as_schema=as_schema), _content(form, grammar)]}


def _content(form: ToolFormat | None, grammar: GrammarSpec | None) -> Node:
    """Return the format of an answer without calls."""
    node = content(grammar) if grammar else {"type": "any_text"}
    if grammar is None and form is not None and form.starts_answer:
        # White space before a call is not a part of the content when the answer is read.
        return {"type": "regex", "pattern": rf"[ \t\n\r]*([^ \t\n\r{re.escape(form.trigger)}][\s\S]*)?"}
    if form is None or not form.content_begin:
        return node
    return {"type": "sequence", "elements": [_text(form.content_begin), node]}


def content(grammar: GrammarSpec) -> Node:
    """Return a grammar as a format of a structural tag."""
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case GrammarKind.JSON_SCHEMA:
            return {"type": "json_schema", "json_schema": read_json(grammar.source, "grammar"), "at": "grammar"}
        case GrammarKind.REGEX:
            return {"type": "regex", "pattern": grammar.source}
        case GrammarKind.EBNF:
            return {"type": "grammar", "grammar": grammar.source}
        case GrammarKind.LARK:
            return {"type": "lark", "grammar": grammar.source}
        case GrammarKind.CHOICE:
            return {"type": "or", "elements": [_text(choice) for choice in json.loads(grammar.source)]}
        case _:
            return _format(read_json(grammar.source, "grammar.structural_tag"))


def _format(tag: Any) -> Node:
    """Return the format of a structural tag, which may be in the older notation."""
    form = tag.get("format") if isinstance(tag, dict) else None
    if isinstance(form, dict):
        return form
    structures = tag.get("structures") if isinstance(tag, dict) else None
    if not isinstance(structures, list) or not all(isinstance(one, dict) for one in structures):
        raise InvalidRequest("grammar.structural_tag", "needs an object `format`")
    tags = [
        {
            "type": "tag",
            "begin": one.get("begin"),
            "content": {"type": "json_schema", "json_schema": one.get("schema")},
            "end": one.get("end", ""),
        }
        for one in structures
    ]
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


def _schema_field(index: int) -> str:
    return f"tools.tools[{index}].parameters"


def _has_content(grammar: GrammarSpec | None) -> bool:
    return grammar is not None and grammar.kind is not GrammarKind.NONE


def _is_json(grammar: GrammarSpec) -> bool:
    return grammar.kind in (GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA)


def _free(calls: list[tuple[str, Tool]], tools: Tools, form: ToolFormat) -> Node:
    if form.first:
        tags = [{"type": "tag", "begin": form.first, "content": _separated(calls, tools, form), "end": form.last}]
    else:
        tags = [_tag(field, tool, form) for field, tool in calls]
    once = bool(form.first) or not (tools.parallel and form.parallel)
    return {"type": "triggered_tags", "triggers": [form.trigger], "tags": tags, "stop_after_first": once}


def _calls(
    calls: list[tuple[str, Tool]],
    tools: Tools,
    form: ToolFormat,
    *,
    always_strict: bool = False,
    as_schema: bool = False,
) -> Node:
    node = _separated(
        calls,
        tools,
        form,
        always_strict=always_strict,
        as_schema=as_schema and form.begin.startswith("{") and not form.first,
    )
    around = [_text(form.first), node, _text(form.last)] if form.first or form.last else [node]
    elements = [one for one in around if one.get("value") != ""]
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}


def _separated(
    calls: list[tuple[str, Tool]],
    tools: Tools,
    form: ToolFormat,
    *,
    always_strict: bool = False,
    as_schema: bool = False,
) -> Node:
    tags = [_tag(field, tool, form, always_strict=always_strict, as_schema=as_schema) for field, tool in calls]
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": form.separator,
        "at_least_one": True,
        "stop_after_first": not (tools.parallel and form.parallel),
    }


def _tag(field: str, tool: Tool, form: ToolFormat, *, always_strict: bool = False, as_schema: bool = False) -> Node:
    begin, end = form.begin_of(tool.name, raw=tool.raw), form.end_of(raw=tool.raw)
    if form.number_end:
        without = replace(form, begin=form.number_end, raw_begin=form.number_end, number_end="")
        inner = _tag(field, tool, without, always_strict=always_strict)
        return {"type": "tag", "begin": begin, "content": {"type": "sequence", "elements": [_NUMBER, inner]}, "end": ""}
    if tool.raw:
        return {"type": "tag", "begin": begin, "content": _raw_input(tool), "end": end}
    if form.literals is not None:
        return literal_call(tool, form, field, always_strict=always_strict)
    if form.argument is not None:
        return listed_call(tool, form, field, always_strict=always_strict)
    schema = _arguments(tool) if tool.strict or always_strict else {"type": "object"}
    if as_schema:
        # A call and content that are both JSON begin alike: as one kind of text, neither hides the other.
        begin, end, schema = "", "", _whole_call(begin, tool.name, schema)
    return {
        "type": "tag",
        "begin": begin,
        "content": {"type": "json_schema", "json_schema": schema, "at": field},
        "end": end,
    }


def _arguments(tool: Tool) -> Any:
    schema = json.loads(tool.source) if tool.source else {}
    return schema if _ROOT_CHOICES & schema.keys() else {"type": "object", **schema}


def _raw_input(tool: Tool) -> Node:
    match tool.input:
        case InputKind.LARK:
            return {"type": "lark", "grammar": tool.source}
        case InputKind.REGEX:
            return {"type": "regex", "pattern": tool.source}
        case _:
            return {"type": "any_text"}


def _whole_call(begin: str, name: str, schema: Any) -> Any:
    """Return the schema of a whole call in a format whose calls are JSON objects of a name and arguments."""
    key = "parameters" if '"parameters"' in begin else "arguments"
    return {
        "type": "object",
        "properties": {"name": {"const": name}, key: moved(schema, f"#/properties/{key}")},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _text(value: str) -> Node:
    return {"type": "const_string", "value": value}
