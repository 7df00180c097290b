"""Translates structural tags to Lark, because llguidance has no structural tags.


    const_string, json_schema, regex, grammar, lark      a literal, `%json`, a nested grammar
    sequence, or, optional, plus, star, repeat            operators
    tag, tags_with_separator                              sequences
    any_text                                              free text up to the literal after it, or to the end
    triggered_tags                                        free text in which a trigger begins one of its tags

Free text ends at the first occurrence of the literal after it, because a lazy lexeme ends at its first match.
Invariant: a format or an option without an equivalent in Lark is refused by name.
Not responsible for: the notation of schemas and regular expressions (see notation.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grammar_service.backends.json_schema.strings.text import is_text
from grammar_service.errors import InvalidGrammar, NotSupported
from grammar_service.grammar.structural_tag import schema_place
from grammar_service.grammar.text_grammar import embedded_schemas, lark_literal, refuse_token_references, with_schemas

Node = dict[str, Any]

_SUPPORTED = (
    "any_text, const_string, grammar, json_schema, lark, optional, or, plus, regex, repeat, sequence, star, tag, "
    "tags_with_separator and triggered_tags"
)


@dataclass(frozen=True, slots=True)
class Parts:
    """Functions that translate the schemas, expressions and grammars inside formats."""

    schema: Callable[[Any, str], str]
    """(JSON Schema, its place) -> the text after `%json`."""
    regex: Callable[[str], str]
    """Regular expression -> Lark grammar with a rule `start`."""
    gbnf: Callable[[str], str]
    """GBNF grammar -> Lark grammar with a rule `start`."""
    text: Callable[[Any, str], list[str]]
    """(Schema of a string without quotation marks, its place) -> expressions of Lark that it must all match."""


def lark_of_tag(document: Node, parts: Parts) -> str:
    """Return the language of a structural tag in Lark.

    `document` is in the newer notation. Raises InvalidGrammar with the place, and NotSupported.
    """
    writer = _Writer(parts)
    start = writer.expression(document["format"], "/format", last=True)
    return "\n".join([f"start: {start or lark_literal('')}", *writer.rules, r"TEXT: /(.|\n)*/"]) + "\n"


class _Writer:
    """Collects the rules of one tag. Each rule has a number, so no names collide, and equal rules are one: functions
    have many parameters of the same schema, and the library takes as long for a second equal rule as for the first."""

    def __init__(self, parts: Parts) -> None:
        self.rules: list[str] = []
        self._parts = parts
        self._names: dict[str, str] = {}
        """By attributes and body."""

    def expression(self, node: Any, path: str, *, last: bool) -> str:
        """Return a Lark expression for `node`, "" for the empty text. `last`: nothing follows it in the answer."""
        if not isinstance(node, dict):
            raise InvalidGrammar(f"structural tag: {path}: must be an object")
        match node.get("type"):
            case "const_string":
                return _literal(_string(node, "value", path))
            case "json_schema":
                return self._schema(node, path)
            case "regex":
                return self._nested(self._parts.regex(_string(node, "pattern", path)))
            case "grammar":
                return self._nested(self._parts.gbnf(_string(node, "grammar", path)))
            case "lark":
                return self._nested(self._lark(_string(node, "grammar", path), path))
            case "any_text":
                if not last:
                    raise NotSupported(f"structural tag: {path}: this backend needs a fixed text after any_text")
                _refuse(node, path, "excludes", "max_tokens", "max_chars")
                return "TEXT"
            case "sequence":
                return self._sequence(_nodes(node, path), f"{path}/elements", last=last)
            case "tag":
                return self._tag(node, path, last=last)
            case "tags_with_separator":
                return self._separated(node, path)
            case "triggered_tags":
                return self._triggered(node, path, last=last)
            case other:
                return self._operator(other, node, path, last=last)

    def _operator(self, name: Any, node: Node, path: str, *, last: bool) -> str:
        if name == "or":
            found = [
                self.expression(one, f"{path}/elements/{i}", last=last) for i, one in enumerate(_nodes(node, path))
            ]
            return "(" + " | ".join(one or lark_literal("") for one in found) + ")"
        if name not in ("optional", "plus", "star", "repeat"):
            raise NotSupported(f"structural tag: {path}/type: this backend supports {_SUPPORTED}, not {name!r}")
        inner = self.expression(node.get("content"), f"{path}/content", last=last and name == "optional")
        if not inner:
            return ""
        if name != "repeat":
            return f"({inner}){ {'optional': '?', 'plus': '+', 'star': '*'}[name] }"
        least, most = node.get("min"), node.get("max")
        if type(least) is not int or type(most) is not int or least < 0 or (most != -1 and most < least):
            raise InvalidGrammar(
                f"structural tag: {path}: min and max must be whole numbers, 0 <= min <= max, or max -1"
            )
        return f"({inner}){{{least},{most if most >= 0 else ''}}}"

    def _sequence(self, nodes: list[Any], path: str, *, last: bool) -> str:
        out: list[str] = []
        at = 0
        while at < len(nodes):
            node, behind = nodes[at], nodes[at + 1] if at + 1 < len(nodes) else None
            is_free = isinstance(node, dict) and node.get("type") == "any_text"
            if is_free and isinstance(behind, dict) and behind.get("type") == "const_string":
                out.append(self._until(node, [_string(behind, "value", f"{path}/{at + 1}")], f"{path}/{at}"))
                at += 2
                continue
            out.append(self.expression(node, f"{path}/{at}", last=last and behind is None))
            at += 1
        return " ".join(one for one in out if one)

    def _tag(self, node: Any, path: str, *, last: bool, trigger: str = "") -> str:
        """Return the expression of a tag, without the beginning that is the trigger."""
        if not isinstance(node, dict):
            raise InvalidGrammar(f"structural tag: {path}: must be an object")
        begin, ends = _string(node, "begin", path, empty=not trigger), _ends(node, path)
        content = node.get("content")
        if any(ends) and isinstance(content, dict) and (content.get("type") == "any_text" or is_text(content)):
            until = self._text_until if is_text(content) else self._until
            inner = until(content, ends, f"{path}/content")
            return " ".join(one for one in (_literal(begin[len(trigger) :]), inner) if one)
        inner = self.expression(content, f"{path}/content", last=last and not any(ends))
        end = _literal(ends[0]) if len(ends) == 1 else "(" + " | ".join(map(lark_literal, ends)) + ")"
        return " ".join(one for one in (_literal(begin[len(trigger) :]), inner, end) if one)

    def _separated(self, node: Node, path: str) -> str:
        tags = " | ".join(self._tags(node, path))
        separator = _literal(_string(node, "separator", path, empty=True))
        more = "" if node.get("stop_after_first") else f" ({separator} ({tags}))*"
        every = f"({tags}){more}"
        return every if node.get("at_least_one") else f"({every})?"

    def _tags(self, node: Node, path: str) -> list[str]:
        tags = node.get("tags")
        if not isinstance(tags, list) or not tags:
            raise InvalidGrammar(f"structural tag: {path}/tags: must be a non-empty array")
        return [self._tag(tag, f"{path}/tags/{i}", last=False) or lark_literal("") for i, tag in enumerate(tags)]

    def _triggered(self, node: Node, path: str, *, last: bool) -> str:
        if not last:
            raise NotSupported(f"structural tag: {path}: this backend needs triggered_tags at the end of the answer")
        _refuse(node, path, "at_least_one", "excludes")
        triggers, tags = _strings(node, "triggers", path), node.get("tags")
        if not isinstance(tags, list) or not tags:
            raise InvalidGrammar(f"structural tag: {path}/tags: must be a non-empty array")
        behind: dict[str, list[str]] = {}
        for i, tag in enumerate(tags):
            place = f"{path}/tags/{i}"
            begin = _string(tag if isinstance(tag, dict) else {}, "begin", place)
            trigger = next((t for t in triggers if begin.startswith(t)), None)
            if trigger is None:
                raise InvalidGrammar(f"structural tag: {place}/begin: {begin!r} starts with none of the triggers")
            behind.setdefault(trigger, []).append(self._tag(tag, place, last=False, trigger=trigger))
        regions = [
            f"{self._until({}, [trigger], path)} ({' | '.join(one or lark_literal('') for one in found)})"
            for trigger, found in behind.items()
        ]
        # Where one call is the last, nothing follows it.
        return f"(TEXT | {' | '.join(regions)})" if node.get("stop_after_first") else f"({' | '.join(regions)})* TEXT"

    def _until(self, node: Any, ends: list[str], path: str) -> str:
        """Return free text up to the first occurrence of one of `ends`, and that end."""
        _refuse(node, path, "max_tokens", "max_chars")
        if node.get("excludes") not in (None, [], ends):
            raise NotSupported(f"structural tag: {path}/excludes: this backend does not support it")
        if not all(ends):
            raise NotSupported(f"structural tag: {path}: this backend needs a fixed text after any_text")
        found = " | ".join(map(lark_literal, ends))
        return self._rule(f"TEXT ({found})" if len(ends) > 1 else f"TEXT {found}", "[lazy]")

    def _text_until(self, node: Node, ends: list[str], path: str) -> str:
        """Return a string without quotation marks, up to the first occurrence of one of `ends`, and that end."""
        found = self._parts.text(node.get("json_schema"), schema_place(node, path))
        if not found:
            return self._until({}, ends, path)
        last = " | ".join(map(lark_literal, ends))
        # Without the second part, an expression could run over an end that comes too early for it.
        name = self._rule(f"(({' & '.join(found)}) ({last})) & ~(/(.|\\n)*/ ({last}) /(.|\\n)+/)", kind="TEXT")
        return self._rule(name, "[lazy]")

    def _schema(self, node: Node, path: str) -> str:
        if node.get("style", "json") != "json":
            raise NotSupported(f"structural tag: {path}/style: this backend supports only 'json', and 'text' in a tag")
        _refuse(node, path, "any_order", "excludes", "max_whitespace_cnt")
        schema = node.get("json_schema")
        if schema is not True and not isinstance(schema, dict):
            raise InvalidGrammar(f"structural tag: {path}/json_schema: must be an object or true")
        return self._rule("%json " + self._parts.schema(schema, schema_place(node, path)))

    def _lark(self, lark: str, path: str) -> str:
        refuse_token_references(lark)
        places = {place: f"{path}{place}" for place, _, _ in embedded_schemas(lark)}
        return with_schemas(lark, lambda schema, place: self._parts.schema(schema, places[place]))

    def _nested(self, lark: str) -> str:
        return self._rule("%lark {\n" + lark + "\n}")

    def _rule(self, body: str, attributes: str = "", *, kind: str = "part") -> str:
        """Return the name of the rule, or of the terminal, which has a name of capitals."""
        key = f"{attributes}: {body}"
        if (name := self._names.get(key)) is None:
            name = self._names[key] = f"{kind}_{len(self._names)}"
            self.rules.append(name + key)
        return name


def _literal(text: str) -> str:
    return lark_literal(text) if text else ""


def _nodes(node: Node, path: str) -> list[Any]:
    elements = node.get("elements")
    if not isinstance(elements, list) or not elements:
        raise InvalidGrammar(f"structural tag: {path}/elements: must be a non-empty array")
    return elements


def _string(node: Node, name: str, path: str, *, empty: bool = False) -> str:
    value = node.get(name)
    if not isinstance(value, str) or not (value or empty):
        raise InvalidGrammar(f"structural tag: {path}/{name}: must be a non-empty string")
    return value


def _strings(node: Node, name: str, path: str) -> list[str]:
    value = node.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
        raise InvalidGrammar(f"structural tag: {path}/{name}: must be a non-empty array of non-empty strings")
    return value


def _ends(node: Node, path: str) -> list[str]:
    end = node.get("end")
    if isinstance(end, str):
        return [end]
    if isinstance(end, list) and end and all(isinstance(one, str) for one in end):
        return end
    raise InvalidGrammar(f"structural tag: {path}/end: must be a string or a non-empty array of strings")


def _refuse(node: Any, path: str, *options: str) -> None:
    for option in options:
        if node.get(option):
            raise NotSupported(f"structural tag: {path}/{option}: this backend does not support it")
