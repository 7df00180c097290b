"""Writes every reference inside a document as a JSON pointer from its root, and takes out the names.

    $ref through $id, $anchor or a URL of the document     a pointer
    $dynamicRef, $recursiveRef with one possible target    `$ref`
    $id, id (draft 4), $anchor, $dynamicAnchor             gone

The libraries know some of these names, and read a pointer below an `$id` from there. With pointers from the root all
of them read one document alike.
`$schema` names the dialect of a document. The drafts are known, in each spelling of their URLs. The specification
leaves open what becomes of another dialect, unless its metaschema is in the document and requires a vocabulary that is
not known: then the schema must be refused. Any other one is read as draft 2020-12, which is a warning.
Invariant: a reference means the place that the specification says, or stays without a target and is refused later: one
into another document, and a dynamic one that has several targets. No document is ever fetched. A document without
names stays as it is.
Not responsible for: what a reference leads to (see walk.py).
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urldefrag, urljoin

from grammar_service.backends.json_schema.draft_3 import is_draft_3
from grammar_service.backends.json_schema.unenforced import Unenforced
from grammar_service.backends.json_schema.walk import Schema, child_schemas, definitions, names_of, resolve
from grammar_service.errors import InvalidGrammar
from grammar_service.grammar.limits import array_index

_SAFE = "~!$&'()*+,;=:@-._"
_SAFE_NAME = re.compile(r"[A-Za-z0-9!$&'()*+,;=:@._-]*")
"""Names that need no escape in a pointer."""
_OLD = ("draft-03", "draft-04")
"""Drafts whose schemas are named by `id`."""
_LONE = (*_OLD, "draft-06", "draft-07")
"""In these drafts a schema with a `$ref` has no other keyword: a name next to it counts only at the root."""
_PLAIN = re.compile(r'[^"<>\\^`{|}]*')
"""References without characters that a library rejects in a URI."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_ABSOLUTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_DRAFT = re.compile(r"https?://json-schema\.org/(?:draft-0([3-7])|draft/(2019-09|2020-12))/(?:hyper-)?schema/?#?/?")
_VOCABULARY = re.compile(r"https://json-schema\.org/draft/20(?:19-09|20-12)/vocab/")
_LATEST = ("http://json-schema.org/schema", "https://json-schema.org/schema")


def take_out_dialects(root: Any, path: str) -> list[Unenforced]:
    """Write the dialects of the schema at `path` as the libraries know them, in place, and take out the others.

    Returns a warning for each one that is not known. `write_pointers` has run before. Raises InvalidGrammar for one
    that requires a vocabulary that is not known, and for draft 3 inside another dialect.
    """
    others: dict[str, Unenforced] = {}
    root_is_3 = is_draft_3(root)
    waiting: list[tuple[_Place | None, Any]] = [(None, root)]
    seen: set[int] = set()
    for where, node in waiting:
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        waiting += _below(node, where)
        dialect = node.get("$schema")
        if not isinstance(dialect, str):
            continue
        draft = _DRAFT.fullmatch(dialect)
        if draft is not None and draft[1] in ("4", "6", "7"):
            node["$schema"] = f"http://json-schema.org/draft-0{draft[1]}/schema#"
        elif draft is not None and draft[2]:
            node["$schema"] = f"https://json-schema.org/draft/{draft[2]}/schema"
        else:
            if draft is not None and node is not root and not root_is_3:
                raise InvalidGrammar(f"JSON Schema: {path}{_pointer(where)}/$schema: draft 3 inside another dialect")
            del node["$schema"]
            if draft is None and _joined("", dialect)[0] not in _LATEST:
                why = f"{dialect[:200]!r} is not a dialect that is known; the schema is read as draft 2020-12"
                others.setdefault(dialect, Unenforced(path + _pointer(where), "$schema", why, is_annotation=True))
    return list(others.values())


def write_pointers(root: Any) -> None:
    """Rewrite the references of `root`, the root of a document, in place. Raises InvalidGrammar for one that is no
    URI."""
    if isinstance(root, dict):
        _Document(root).write()


class _Document:
    """The schemas of one document by their place, and what names them."""

    def __init__(self, root: Schema) -> None:
        dialect = root.get("$schema")
        dialect = dialect if isinstance(dialect, str) else ""
        is_old = any(draft in dialect for draft in _OLD)
        # A document with a custom dialect that `id`, a URL, names follows one of the old drafts.
        is_other = bool(dialect) and _DRAFT.fullmatch(dialect) is None
        is_old = is_old or (is_other and "$id" not in root and "://" in str(root.get("id")))
        self._root, self._id = root, "id" if is_old else "$id"
        self._is_lone = any(draft in dialect for draft in _LONE)
        self._places: dict[int, tuple[_Place | None, str]] = {}
        """By identity of a schema: its place, and the URI of its resource."""
        self._nodes: list[Schema] = []
        self._resources: dict[str, Schema] = {}
        self._anchors: dict[tuple[str, str], Schema] = {}
        self._dynamic: dict[str, list[Schema]] = {}
        """By name: the schemas with this `$dynamicAnchor`."""
        self._is_recursive = False
        self._visit(root, None, "")
        self._refuse_vocabularies(dialect)

    def _refuse_vocabularies(self, dialect: str) -> None:
        metaschema = self._resources.get(_joined("", dialect)[0]) if dialect else None
        vocabularies = (metaschema or {}).get("$vocabulary")
        for name, is_required in vocabularies.items() if isinstance(vocabularies, dict) else ():
            if is_required is True and not _VOCABULARY.match(name):
                raise InvalidGrammar(f"JSON Schema: /$schema: the dialect requires the vocabulary {name[:200]!r}")

    def write(self) -> None:
        """Rewrite every reference whose target is found; the list of schemas grows by targets at unknown places."""
        is_named = len(self._resources) > 1 or bool(self._anchors)
        for node in self._nodes:
            self._write_dynamic(node)
            reference = node.get("$ref")
            if not isinstance(reference, str):
                continue
            self._write_reference(node, reference)
            is_named = is_named or self._is_recursive
        if is_named or isinstance(self._root.get(self._id), str):
            for node in self._nodes:
                for name in (self._id, "$anchor", "$dynamicAnchor", "$recursiveAnchor"):
                    if isinstance(node.get(name), str | bool):
                        del node[name]

    def _write_reference(self, node: Schema, reference: str) -> None:
        uri = self._places[id(node)][1]
        direct = resolve(self._root, reference)
        is_plain = reference.startswith("#/") and reference.isprintable() and _PLAIN.fullmatch(reference) is not None
        if is_plain and direct and id(direct[1]) in self._places and self._resources.get(uri) is self._root:
            return  # it is a pointer from the root, to a place that is known
        target = self._target(node, reference)
        if target is None:
            # Without the names around it a library might find another target for what is relative to them.
            url, fragment = _joined(uri, reference)
            node["$ref"] = (f"{url}#{fragment}" if fragment else url) or reference
            return
        found = target.value
        if isinstance(found, dict) and id(found) not in self._places:
            self._visit(found, target.place, target.base)
        if direct is None or direct[1] is not found or not is_plain:
            node["$ref"] = f"#{_pointer(target.place)}"

    def _visit(self, node: Schema, at: _Place | None, base: str) -> None:
        """Note the schemas at and below `node`, whose resource has the URI `base`."""
        waiting = [(node, at, base)]
        for schema, place, uri in waiting:
            if id(schema) in self._places:
                continue
            # The document's own URL is its base, also where the name has no effect as a keyword.
            is_name = schema is self._root or not (self._is_lone and "$ref" in schema)
            own = schema.get(self._id) if is_name else None
            if isinstance(own, str) and own.startswith("#"):
                self._anchors.setdefault((uri, own[1:]), schema)
            elif isinstance(own, str):
                uri = _joined(uri, own)[0]
            if schema is self._root or (isinstance(own, str) and not own.startswith("#")):
                self._resources.setdefault(uri, schema)
            self._places[id(schema)] = place, uri
            self._nodes.append(schema)
            for key in ("$anchor", "$dynamicAnchor"):
                if isinstance(name := schema.get(key), str):
                    self._anchors.setdefault((uri, name), schema)
                    if key == "$dynamicAnchor":
                        self._dynamic.setdefault(name, []).append(schema)
            self._is_recursive = self._is_recursive or schema.get("$recursiveAnchor") is True
            waiting += [(child, below, uri) for below, child in _below(schema, place)]

    def _target(self, node: Schema, reference: str) -> _Target | None:
        """Return what a reference at `node` leads to; None: nothing in this document."""
        uri, fragment = _joined(self._places[id(node)][1], reference)
        if reference.startswith("#"):
            uri = self._places[id(node)][1]
        resource = self._resources.get(uri)
        if resource is None:
            return None
        start = _Target(*self._places[id(resource)], resource)
        if not fragment:
            return start
        if fragment.startswith("/"):
            return self._walk(start, fragment)
        found = self._anchors.get((uri, unquote(fragment)))
        return None if found is None else _Target(*self._places[id(found)], found)

    def _walk(self, start: _Target, fragment: str) -> _Target | None:
        """Return what a pointer from `start` leads to.

        Its base is the base of the last schema on the way, since a place that only a reference makes a schema belongs
        to the resource around it, and not to the one with the reference."""
        value, base = start.value, start.base
        keys: list[str | int] = []
        for part in fragment[1:].split("/"):
            for name in names_of(part):
                if isinstance(value, dict) and name in value:
                    value = value[name]
                    break
                if isinstance(value, list) and (index := array_index(name, len(value))) is not None:
                    value = value[index]
                    break
            else:
                return None
            keys.append(name)
            base = self._places.get(id(value), (None, base))[1]
        return _Target(_Place(start.place, tuple(keys)), base, value)

    def _write_dynamic(self, node: Schema) -> None:
        """Make `$ref` of a dynamic reference that has one possible target."""
        for key in ("$dynamicRef", "$recursiveRef"):
            reference = node.get(key)
            if not isinstance(reference, str) or "$ref" in node or (target := self._target(node, reference)) is None:
                continue
            found, name = target.value, reference.rpartition("#")[2]
            if key == "$recursiveRef":
                is_single = not self._is_recursive or len(self._resources) == 1
            else:
                others = self._dynamic.get(name, [])
                is_single = len(others) <= 1 or not any(found is other for other in others)
            if is_single:
                del node[key]
                node["$ref"] = f"#{_pointer(target.place)}"


def _joined(base: str, reference: str) -> tuple[str, str]:
    """Return the URI of a reference, and its fragment. Raises InvalidGrammar for one that is no URI."""
    try:
        scheme = _SCHEME.match(base)
        if scheme is None or _ABSOLUTE.match(reference):
            return urldefrag(urljoin(base, reference))
        # Python's own function joins only what begins with a scheme that it knows.
        url, fragment = urldefrag(urljoin(f"http://{base[scheme.end() :]}", reference))
        return base[: scheme.end()] + url.removeprefix("http://"), fragment
    except ValueError as error:
        raise InvalidGrammar(f"JSON Schema: {reference[:80]!r} is no URI: {error}") from None


class _Place(NamedTuple):
    """The place of a value in a document: a pointer, written only when it is needed."""

    above: _Place | None
    """None: the root."""
    keys: tuple[str | int, ...]


class _Target(NamedTuple):
    """What a reference leads to."""

    place: _Place | None
    base: str
    """The URI of its resource, or of the one around it."""
    value: Any


def _pointer(place: _Place | None) -> str:
    parts: list[str] = []
    while place is not None:
        parts += (_escaped(str(key)) for key in reversed(place.keys))
        place = place.above
    return "".join(f"/{part}" for part in reversed(parts))


def _below(node: Schema, place: _Place | None) -> list[tuple[_Place | None, Schema]]:
    return [
        (_Place(place, keys), child)
        for keys, child in (*child_schemas(node), *definitions(node))
        if isinstance(child, dict)
    ]


def _escaped(name: str) -> str:
    return name if _SAFE_NAME.fullmatch(name) else quote(name.replace("~", "~0").replace("/", "~1"), safe=_SAFE)
