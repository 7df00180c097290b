"""A page of the reference from a `.proto` file: its services, messages and enums with their comments.

Not responsible for: the comments themselves (protos/), nor for the generated code (`make protos`).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

_MESSAGES, _ENUMS, _SERVICES = (
    FileDescriptorProto.MESSAGE_TYPE_FIELD_NUMBER,
    FileDescriptorProto.ENUM_TYPE_FIELD_NUMBER,
    FileDescriptorProto.SERVICE_FIELD_NUMBER,
)
_FIELDS, _NESTED, _NESTED_ENUMS = (
    DescriptorProto.FIELD_FIELD_NUMBER,
    DescriptorProto.NESTED_TYPE_FIELD_NUMBER,
    DescriptorProto.ENUM_TYPE_FIELD_NUMBER,
)
_METHODS = ServiceDescriptorProto.METHOD_FIELD_NUMBER
_VALUES = EnumDescriptorProto.VALUE_FIELD_NUMBER
_SCALARS = FieldDescriptorProto.Type
Place = tuple[int, ...]
"""Where protoc found something: the numbers of fields and the indexes from the file down to it."""


def page(root: Path, proto: str, title: str) -> str:
    """Return the page of the file `proto`, such as `protos/engine/v1/engine.proto`."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "set")
        command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", "--include_source_info", f"-o{out}", proto]
        subprocess.run(command, cwd=root, check=True)
        (described,) = FileDescriptorSet.FromString(out.read_bytes()).file
    return "\n".join([f"# {title}", "", *_File(described).lines()]) + "\n"


class _File:
    def __init__(self, described: FileDescriptorProto) -> None:
        self._described = described
        self._comments = {
            tuple(at.path): (at.leading_comments or at.trailing_comments).strip("\n")
            for at in described.source_code_info.location
        }

    def lines(self) -> Iterator[str]:
        """Yield the page from its first paragraph on."""
        described = self._described
        yield f"Package `{described.package}`, from `{described.name}`."
        for index, service in enumerate(described.service):
            place = (_SERVICES, index)
            yield from ("", f"## {service.name}", "", *self._text(place))
            for number, method in enumerate(service.method):
                asked, answer = _name(method.input_type), _name(method.output_type)
                streams = ("stream ") if method.client_streaming else "", ("stream ") if method.server_streaming else ""
                yield from ("", f"### {method.name}", "")
                yield f"{streams[0]}[{asked}](#{asked.lower()}) to {streams[1]}[{answer}](#{answer.lower()})"
                yield from ("", *self._text((*place, _METHODS, number)))
        yield from ("", "## Messages")
        for index, message in enumerate(described.message_type):
            yield from self._message(message, message.name, (_MESSAGES, index))
        yield from ("", "## Enums")
        for index, enum in enumerate(described.enum_type):
            yield from self._enum(enum, enum.name, (_ENUMS, index))

    def _message(self, message: DescriptorProto, name: str, place: Place) -> Iterator[str]:
        if message.options.map_entry:
            return
        yield from ("", f"### {name}", "", *self._text(place), "")
        if message.field:
            yield from ("| field | type | about |", "|---|---|---|")
        maps = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
        for index, field in enumerate(message.field):
            about = " ".join(self._text((*place, _FIELDS, index)))
            if field.HasField("oneof_index") and not field.proto3_optional:
                about = f"One of `{message.oneof_decl[field.oneof_index].name}`. {about}"
            yield f"| `{field.name}` | {self._type(field, maps)} | {_cell(about)} |"
        for index, nested in enumerate(message.nested_type):
            yield from self._message(nested, f"{name}.{nested.name}", (*place, _NESTED, index))
        for index, enum in enumerate(message.enum_type):
            yield from self._enum(enum, f"{name}.{enum.name}", (*place, _NESTED_ENUMS, index))

    def _enum(self, enum: EnumDescriptorProto, name: str, place: Place) -> Iterator[str]:
        yield from ("", f"### {name}", "", *self._text(place), "", "| value | number | about |", "|---|---|---|")
        for index, value in enumerate(enum.value):
            about = " ".join(self._text((*place, _VALUES, index)))
            yield f"| `{value.name}` | {value.number} | {_cell(about)} |"

    def _type(self, field: FieldDescriptorProto, maps: dict[str, DescriptorProto]) -> str:
        name = _name(field.type_name)
        if name.rpartition(".")[2] in maps:
            key, value = maps[name.rpartition(".")[2]].field
            return f"map of {self._type(key, {})} to {self._type(value, {})}"
        known = field.type_name.startswith(f".{self._described.package}.")
        shown = f"[{name}](#{name.lower().replace('.', '')})" if known else name
        if not field.type_name:
            shown = _SCALARS.Name(field.type).removeprefix("TYPE_").lower()
        repeated = field.label == FieldDescriptorProto.LABEL_REPEATED
        return f"repeated {shown}" if repeated else f"optional {shown}" if field.proto3_optional else shown

    def _text(self, place: Place) -> list[str]:
        return [line.strip() for line in self._comments.get(place, "").splitlines()]


def _name(full: str) -> str:
    """Return a type's name within its package: packages begin with a small letter, types with a capital."""
    return ".".join(part for part in full.split(".") if part[:1].isupper())


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
