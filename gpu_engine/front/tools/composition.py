"""One grammar of an answer's tool calls and of the request's own grammar, as a structural tag.

    choice      without a grammar                       with one
    auto        free text, in which a trigger begins    calls alone, or the grammar's content alone
                a call
    required    calls alone, at least one               calls alone, at least one
    named       calls of one function, at least one     calls of one function, at least one
    none        no grammar                              the grammar itself

Invariant: wherever a call may begin, its whole text is constrained, from the trigger to its end.
Not responsible for: compiling it (the grammar process), reading an answer (see parts.py).
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from gpu_engine.api.checked import Checked
from gpu_engine.api.conversation import Chat, InputKind, Tool, ToolChoice, Tools
from gpu_engine.api.errors import InvalidRequest
from gpu_engine.api.ports import Tokenizer
from gpu_engine.api.request import GrammarKind, GrammarSpec
from gpu_engine.front.tools.fields import read_json
from gpu_engine.front.tools.formats import ToolFormat, tool_format
from gpu_engine.front.tools.parts import AnswerLayout

Node = dict[str, Any]

_ROOT_CHOICES = frozenset({"$ref", "anyOf", "oneOf", "allOf", "enum", "const"})
"""Keywords beside which a backend may not enforce `type`."""


def planned(checked: Checked, tokenizer: Tokenizer) -> tuple[Checked, AnswerLayout | None]:
    """Return a request with the grammar of its whole answer, and the layout of the answer; None: it has one part.

    Raises InvalidRequest.
    """
    tools = checked.prompt.tools if isinstance(checked.prompt, Chat) else None
    if tools is None:
        return checked, None
    form = tool_format(tokenizer.chat_template)
    if form is None:
        raise InvalidRequest("tools", "this model has no chat template")
    layout = AnswerLayout(tools, form, triggered=tools.choice is ToolChoice.AUTO and not _has_content(checked.grammar))
    return replace(checked, grammar=composed(tools, form, checked.grammar)), layout


def composed(tools: Tools, form: ToolFormat, grammar: GrammarSpec | None) -> GrammarSpec | None:
    """Return the grammar of an answer; None: it is free text.

    `grammar`: the request's own. Its white space, its backend and whether parts may stay unenforced hold for all.
    """
    if tools.choice is ToolChoice.NONE:
        return grammar if _has_content(grammar) else None
    strict = tools.choice is not ToolChoice.AUTO
    calls = [(_schema_field(i), tool) for i, tool in tools.callable]
    if strict:
        node = _calls(calls, tools, form, always_strict=True)
    elif grammar is None or grammar.kind is GrammarKind.NONE:
        node = _free(calls, tools, form)
    else:
        node = {"type": "or", "elements": [_calls(calls, tools, form, as_schema=_is_json(grammar)), content(grammar)]}
    document = {"type": "structural_tag", "format": node}
    source = json.dumps(document, ensure_ascii=False)
    if grammar is None:
        return GrammarSpec(GrammarKind.COMPOSED, source)
    return GrammarSpec(GrammarKind.COMPOSED, source, grammar.whitespace, grammar.backend, grammar.allow_unenforced)


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
    once = bool(form.first) or not tools.parallel
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
        calls, tools, form, always_strict=always_strict, as_schema=as_schema and form.begin.startswith("{")
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
        "stop_after_first": not tools.parallel,
    }


def _tag(field: str, tool: Tool, form: ToolFormat, *, always_strict: bool = False, as_schema: bool = False) -> Node:
    begin, end = form.begin_of(tool.name, raw=tool.raw), form.end_of(raw=tool.raw)
    if tool.raw:
        return {"type": "tag", "begin": begin, "content": _raw_input(tool), "end": end}
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


def moved(schema: Any, to: str) -> Any:
    """Return a schema whose references lead to the same places after it has moved to the pointer `to`."""
    if isinstance(schema, list):
        return [moved(one, to) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: to + value[1:] if key == "$ref" and isinstance(value, str) and value.startswith("#") else moved(value, to)
        for key, value in schema.items()
    }


def _text(value: str) -> Node:
    return {"type": "const_string", "value": value}
