"""Structural tags: free text in which a trigger begins a constrained region.

A tag has two notations: `format` of type `triggered_tags`, and the older `structures` with `triggers`. Other types of
format exist only in xgrammar (see its backend). Regions that are named by tokens are refused everywhere.
Invariant: a parsed tag has at least one region, and every region's `begin` starts with a trigger.
Not responsible for: the schemas inside the regions (see backends/).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from grammar_service.errors import InvalidGrammar, NotSupported
from grammar_service.grammar.text_grammar import lark_literal

TOKEN_FORMATS = frozenset({"token", "exclude_token", "any_tokens", "token_triggered_tags", "token_dispatch"})
"""Types of format that name tokens."""


@dataclass(frozen=True, slots=True)
class Region:
    """One constrained region."""

    trigger: str
    begin: str
    schema: Any
    """A JSON Schema: an object or true."""
    end: str
    path: str
    """JSON path of the schema."""


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """Free text with constrained regions. Each region may occur any number of times."""

    regions: tuple[Region, ...]

    @staticmethod
    def parse(text: str) -> StructuralTag:
        """Parse a structural tag of triggered JSON regions, which every backend supports.

        Raises InvalidGrammar with the place, and NotSupported for any other format or option.
        """
        document = modern(json.loads(text))
        form = document["format"]
        if form.get("type") != "triggered_tags":
            raise NotSupported(
                f"structural tag: /format/type: this backend supports only 'triggered_tags', not {form.get('type')!r}"
            )
        for option in ("at_least_one", "stop_after_first", "excludes"):
            if form.get(option):
                raise NotSupported(f"structural tag: /format/{option}: this backend does not support it")
        triggers, tags = _strings(form, "triggers"), form.get("tags")
        if not isinstance(tags, list) or not tags:
            raise InvalidGrammar("structural tag: /format/tags: must be a non-empty array")
        return StructuralTag(tuple(_region(tag, f"/format/tags/{i}", triggers) for i, tag in enumerate(tags)))

    def to_lark(self, schema_text: Callable[[Any, str], str]) -> str:
        """Return the rules in Lark. `schema_text(schema, path)` is the text after `%json`."""
        numbers = range(len(self.regions))
        lines = [f"start: ({' | '.join(f'region_{i}' for i in numbers)})* rest", "rest: TEXT", r"TEXT: /(.|\n)*/"]
        for i, region in enumerate(self.regions):
            head = region.begin[len(region.trigger) :]
            parts = [lark_literal(head) if head else "", "%json " + schema_text(region.schema, region.path)]
            parts.append(lark_literal(region.end) if region.end else "")
            lines.append(f"trigger_{i}[lazy]: TEXT {lark_literal(region.trigger)}")
            lines.append(f"region_{i}: trigger_{i} {' '.join(part for part in parts if part)}")
        return "\n".join(lines) + "\n"


def modern(document: Any) -> dict[str, Any]:
    """Return the document in the newer notation. Raises InvalidGrammar, also for formats that name tokens."""
    if "structures" in document and "format" not in document:
        structures = document["structures"]
        if not isinstance(structures, list) or not all(isinstance(s, dict) for s in structures):
            raise InvalidGrammar("structural tag: /structures: must be an array of objects")
        tags = [
            {
                "type": "tag",
                "begin": s.get("begin"),
                "content": {"type": "json_schema", "json_schema": s.get("schema")},
                "end": s.get("end", ""),
            }
            for s in structures
        ]
        document = {"format": {"type": "triggered_tags", "triggers": document.get("triggers"), "tags": tags}}
    if not isinstance(document.get("format"), dict):
        raise InvalidGrammar("structural tag: /format: must be an object")
    for path, node in formats(document["format"], "/format"):
        if not isinstance(node.get("type", ""), str):
            raise InvalidGrammar(f"structural tag: {path}/type: must be a string")
        if node.get("type") in TOKEN_FORMATS or any(isinstance(node.get(k), dict) for k in ("begin", "end")):
            raise InvalidGrammar(f"structural tag: {path}: names tokens; a grammar may describe text only")
    return {"type": "structural_tag", "format": document["format"]}


def formats(node: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (JSON path, object) for every format object at and below `node`, but not inside schemas."""
    if isinstance(node, list):
        for i, child in enumerate(node):
            yield from formats(child, f"{path}/{i}")
    elif isinstance(node, dict):
        yield path, node
        for name, child in node.items():
            if name != "json_schema":
                yield from formats(child, f"{path}/{name}")


def _region(tag: Any, path: str, triggers: list[str]) -> Region:
    if not isinstance(tag, dict):
        raise InvalidGrammar(f"structural tag: {path}: must be an object")
    begin, end, content = tag.get("begin"), tag.get("end"), tag.get("content")
    if not isinstance(begin, str) or not begin:
        raise InvalidGrammar(f"structural tag: {path}/begin: must be a non-empty string")
    if not isinstance(end, str):
        raise NotSupported(f"structural tag: {path}/end: this backend needs one string")
    if not isinstance(content, dict) or content.get("type") != "json_schema":
        raise NotSupported(f"structural tag: {path}/content/type: this backend supports only 'json_schema'")
    if content.get("style", "json") != "json":
        raise NotSupported(f"structural tag: {path}/content/style: this backend supports only 'json'")
    schema = content.get("json_schema")
    if schema is not True and not isinstance(schema, dict):
        raise InvalidGrammar(f"structural tag: {path}/content/json_schema: must be an object or true")
    trigger = next((t for t in triggers if begin.startswith(t)), None)
    if trigger is None:
        raise InvalidGrammar(f"structural tag: {path}/begin: {begin!r} starts with none of the triggers")
    return Region(trigger, begin, schema, end, f"{path}/content/json_schema")


def _strings(form: dict[str, Any], name: str) -> list[str]:
    value = form.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
        raise InvalidGrammar(f"structural tag: /format/{name}: must be a non-empty array of non-empty strings")
    return value
