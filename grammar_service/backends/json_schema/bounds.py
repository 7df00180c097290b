"""Bounds of a request or a server against endless values, written into a JSON Schema.

    max_string_length     `maxLength` of strings, and the length of names that no schema lists
    max_array_items       `maxItems`
    max_number_digits     digits before the point, and as many after it; without an exponent

The smaller one of a bound and the schema's own wins. A schema whose own minimum is above a bound is refused by name.
The values of `enum` and `const` and the names that a schema lists are finite; no bound changes them.

A node is a conjunction of its own keywords, `$ref`, `allOf` and `anyOf`, and it is enough to bound one of them. So
bounds go where a type is named, else into the target, the branches, or the node itself.
Invariant: a written bound only takes values away, since it is added where a value must satisfy the schema: everything
that the bounded schema accepts, the schema accepts. `rewrite` has run before, so no complement is left below which a
smaller schema would accept more; a complement that no library reads is not walked into.
Not responsible for: white space (see the backends). The number of an object's members has no bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from grammar_service.backends.json_schema.negation import NoComplement, other_strings
from grammar_service.backends.json_schema.unenforced import Unenforced
from grammar_service.backends.json_schema.walk import Schema, resolve, subschemas
from grammar_service.errors import InvalidGrammar
from grammar_service.grammar.value import Bounds

MAX_FRACTION_DIGITS = 9
"""A library reads the step of a number's values with at most so many digits."""

_NEGATIVE = ("not", "if", "contains", "propertyNames")
_ANY_NAME = "bounded"


def refuse_minima(schema: Any, path: str, bounds: Bounds) -> None:
    """Raise InvalidGrammar for a minimum in the schema at `path` that is above a bound."""
    if not _has_any(bounds):
        return
    for where, node in _positive(schema, path):
        if "enum" in node or "const" in node:
            continue
        for keyword, name in (("minLength", "max_string_length"), ("minItems", "max_array_items")):
            least, limit = node.get(keyword), getattr(bounds, name)
            if limit and isinstance(least, int | float) and least > limit:
                raise InvalidGrammar(f"{name}: {where}/{keyword} is {least}, above the limit of {limit}")
        if not bounds.max_number_digits:
            continue
        largest = 10**bounds.max_number_digits
        for keyword, sign in (("minimum", 1), ("exclusiveMinimum", 1), ("maximum", -1), ("exclusiveMaximum", -1)):
            value = node.get(keyword)
            if isinstance(value, int | float) and not isinstance(value, bool) and sign * value >= largest:
                raise InvalidGrammar(
                    f"max_number_digits: {where}/{keyword} is {value}, and numbers have at most "
                    f"{bounds.max_number_digits} digits"
                )


def _has_any(bounds: Bounds) -> bool:
    return bool(bounds.max_string_length or bounds.max_array_items or bounds.max_number_digits)


def _positive(schema: Any, path: str) -> Iterator[tuple[str, Schema]]:
    """Yield the subschemas that a value must satisfy, or that branches of it must."""
    for where, node in subschemas(schema, path):
        parts = where.removeprefix(path).split("/")
        if not any(part in _NEGATIVE for part in parts):
            yield where, node


def write_bounds(root: Any, bounds: Bounds, *, with_names: bool = True) -> list[Unenforced]:
    """Write the bounds into `root`, the root of a document, in place. What it accepts then obeys them.

    `with_names`: also of names that no schema lists; a library may not intersect the patterns that say it. Returns what
    the caller should know: that names have no bound.
    """
    if not isinstance(root, dict) or not _has_any(bounds):
        return []
    writer = _Writer(root, bounds, with_names)
    writer.write()
    why = "max_string_length: the names of some objects have no bound"
    return [Unenforced("", "", why, is_annotation=True)] if writer.free_names else []


class _Writer:
    """Walks over the nodes that values must satisfy, each one once."""

    def __init__(self, root: Schema, bounds: Bounds, with_names: bool) -> None:
        self._root, self._bounds, self._with_names = root, bounds, with_names
        self.free_names = False
        """Names of some objects have no bound."""
        self._seen: set[int] = set()
        self._waiting: list[Schema] = []
        self._any: Schema | None = None
        """A definition of all bounded values, where one is needed."""

    def write(self) -> None:
        self._seen.add(id(self._root))
        self._waiting.append(self._root)
        while self._waiting:
            self._write(self._waiting.pop())

    def _bounded(self, child: Any) -> Any:
        """Return a child in which bounds are, or will be."""
        if child is True or child == {}:
            return self._anything()
        if isinstance(child, dict) and id(child) not in self._seen:
            self._seen.add(id(child))
            self._waiting.append(child)
        return child

    def _anything(self) -> Schema:
        """Return a reference to all bounded values."""
        if self._any is None:
            definitions = self._root.setdefault("$defs", {})
            name = _ANY_NAME
            while name in definitions:
                name += "_"
            self._any = {"$ref": f"#/$defs/{name}"}
            values: Schema = definitions.setdefault(name, {})
            self._seen.add(id(values))
            self._own(values, None)
        return self._any

    def _write(self, node: Schema) -> None:
        if "enum" in node or "const" in node:
            return
        if self._follow(node):
            return
        types = node.get("type")
        listed = [types] if isinstance(types, str) else types
        if isinstance(listed, list):
            self._own(node, frozenset(each for each in listed if isinstance(each, str)))
            return
        for keyword in ("anyOf", "oneOf"):
            branches = node.get(keyword)
            if isinstance(branches, list) and branches:
                node[keyword] = [self._bounded(branch) for branch in branches]
                return
        clauses = node.get("allOf")
        for clause in clauses if isinstance(clauses, list) else ():
            if isinstance(clause, dict) and not _TELLING.isdisjoint(clause):
                self._bounded(clause)
                return
        self._own(node, None)

    def _follow(self, node: Schema) -> bool:
        """Bound the target of the node's reference; return whether there is one."""
        reference = node.get("$ref")
        place = resolve(self._root, reference) if isinstance(reference, str) else None
        if place is None or not isinstance(place[1], dict):
            return False
        self._bounded(place[1]) if place[1] else self._own(place[1], None)
        return True

    def _own(self, node: Schema, types: frozenset[str] | None) -> None:
        """Write the bounds of `types`, or of every type if None, into the node's own keywords."""
        bounds = self._bounds

        def has(*names: str) -> bool:
            return types is None or not types.isdisjoint(names)

        if has("string") and bounds.max_string_length:
            node["maxLength"] = _smaller(node.get("maxLength"), bounds.max_string_length)
        if has("array"):
            self._array(node)
        if has("number", "integer") and bounds.max_number_digits:
            write_digits(node, bounds.max_number_digits, whole=types is not None and "number" not in types)
        if has("object"):
            self._object(node)

    def _array(self, node: Schema) -> None:
        if self._bounds.max_array_items:
            node["maxItems"] = _smaller(node.get("maxItems"), self._bounds.max_array_items)
        first = node.get("prefixItems")
        if isinstance(first, list):
            node["prefixItems"] = [self._bounded(child) for child in first]
        items = node.get("items", True)
        if isinstance(items, list):
            node["items"] = [self._bounded(child) for child in items]
            node["additionalItems"] = self._bounded(node.get("additionalItems", True))
        elif items is not False:
            node["items"] = self._bounded(items)

    def _object(self, node: Schema) -> None:
        members = node.get("properties")
        if isinstance(members, dict):
            node["properties"] = members = {name: self._bounded(child) for name, child in members.items()}
        patterns = node.get("patternProperties")
        if isinstance(patterns, dict):
            node["patternProperties"] = {name: self._bounded(child) for name, child in patterns.items()}
        others = node.get("additionalProperties", True)
        if others is False:
            return
        node["additionalProperties"] = child = self._bounded(others)
        longest = self._bounds.max_string_length
        counted = "minProperties" in node or "maxProperties" in node
        if not longest or not self._with_names or patterns or counted:
            self.free_names = self.free_names or bool(longest)
            return
        required = node.get("required")
        fixed = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        listed = members if isinstance(members, dict) else {}
        added = {name: child for name in fixed if len(name) > longest and name not in listed}
        if added:
            node["properties"] = {**listed, **added}
        try:
            names = other_strings([*listed, *added], longest)
        except NoComplement:
            self.free_names = True
            return
        node["patternProperties"] = {names: child}
        node["additionalProperties"] = False


_TELLING = frozenset({"type", "$ref", "enum", "const", "anyOf", "oneOf"})
"""Keywords of a clause of `allOf` that say which values there are."""


def _smaller(own: Any, limit: int) -> Any:
    return own if isinstance(own, int | float) and not isinstance(own, bool) and own < limit else limit


def write_digits(node: Schema, digits: int, *, whole: bool) -> None:
    """Write `max_number_digits` into a node of numbers, which are integers where `whole` is set.

    The step 10^-d of the values takes away digits after the point and exponents. Integers have neither.
    """
    largest = 10**digits
    for plain, strict, sign in (("minimum", "exclusiveMinimum", -1), ("maximum", "exclusiveMaximum", 1)):
        own = [node[key] for key in (plain, strict) if type(node.get(key)) in (int, float)]
        if not own or min(sign * value for value in own) >= largest:
            node.pop(strict, None)
            node.pop(plain, None)
            node[plain if whole else strict] = sign * (largest - 1 if whole else largest)
    if whole:
        return
    step = Fraction(1, 10 ** min(digits, MAX_FRACTION_DIGITS))
    own_step: Any = node.get("multipleOf")
    if type(own_step) in (int, float) and own_step > 0:
        step = _common_multiple(Fraction(str(own_step)), step)
    node["multipleOf"] = int(step) if step.denominator == 1 else float(step)


def _common_multiple(one: Fraction, other: Fraction) -> Fraction:
    """Return the smallest positive number that is a whole multiple of both."""
    return Fraction(math.lcm(one.numerator, other.numerator), math.gcd(one.denominator, other.denominator))
