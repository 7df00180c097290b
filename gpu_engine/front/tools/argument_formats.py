"""The format of a call whose arguments are written one by one, as a part of a structural tag.

Invariant: the arguments come in the order of the schema's properties, each at most once, and the required ones are
there. Each value is one that parameters.py reads back.
Not responsible for: what surrounds a call (see composition.py).
"""

from __future__ import annotations

from typing import Any

from gpu_engine.api.conversation import Tool
from gpu_engine.front.tools.formats import ArgumentMarkers, ToolFormat
from gpu_engine.front.tools.parameters import Form, Parameter, parameters_of

Node = dict[str, Any]


def listed_call(tool: Tool, form: ToolFormat, field: str, *, always_strict: bool) -> Node:
    """Return the tag of a call of `tool`. Raises InvalidRequest for a schema that the format cannot hold.

    `field` is the place of the schema in the request. `always_strict`: required arguments are also required of a
    function that is not strict.
    """
    assert form.argument is not None
    elements = []
    strict = tool.strict or always_strict
    for parameter in parameters_of(tool, field, form.argument.end, strict=strict):
        node = _argument(parameter, form.argument, f"{field}/properties/{parameter.name}")
        elements.append(node if parameter.required and strict else {"type": "optional", "content": node})
    begin = form.begin_of(tool.name, raw=False)
    if not elements:
        return {"type": "tag", "begin": begin, "content": {"type": "const_string", "value": form.end}, "end": ""}
    return {"type": "tag", "begin": begin, "content": {"type": "sequence", "elements": elements}, "end": form.end}


def _argument(parameter: Parameter, markers: ArgumentMarkers, place: str) -> Node:
    def tag(content: Node, *, text: bool) -> Node:
        begin = markers.begin_of(parameter.name, text=text)
        return {"type": "tag", "begin": begin, "content": content, "end": markers.end}

    match parameter.form:
        case Form.TEXT:
            return tag(_text_of(parameter, place), text=True)
        case Form.JSON:
            return tag({"type": "json_schema", "json_schema": parameter.schema, "at": place}, text=False)
        case Form.VALUES:
            pairs = list(zip(parameter.values, parameter.texts(), strict=True))
            says = bool(markers.json_begin)
            strings = [text for value, text in pairs if isinstance(value, str) or not says]
            others = [text for value, text in pairs if not isinstance(value, str) and says]
            tags = [tag(_one_of(texts), text=texts is strings) for texts in (strings, others) if texts]
            if parameter.schema is not None:
                tags.append(tag(_text_of(parameter, place), text=True))
            return _either(tags)
        case Form.EITHER:
            tags = [tag(_text_of(parameter, place), text=True)]
            if markers.json_begin:
                schema = {"type": sorted(parameter.plain)}
                tags.append(tag({"type": "json_schema", "json_schema": schema, "at": place}, text=False))
            return _either(tags)


def _text_of(parameter: Parameter, place: str) -> Node:
    return {"type": "json_schema", "json_schema": parameter.schema, "style": "text", "at": place}


def _one_of(texts: list[str]) -> Node:
    node = _either([{"type": "const_string", "value": text} for text in dict.fromkeys(texts) if text])
    return {"type": "optional", "content": node} if "" in texts else node


def _either(nodes: list[Node]) -> Node:
    return nodes[0] if len(nodes) == 1 else {"type": "or", "elements": nodes}
