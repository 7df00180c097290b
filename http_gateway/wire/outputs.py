"""Fields that say what an answer must look like: OpenAI's `response_format`, and vLLM's `structured_outputs`.

Not responsible for: the grammar that is made from them (see answers/grammar.py).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from http_gateway.wire.fields import Fields

Schema = dict[str, Any] | bool
"""A JSON Schema."""


class NamedSchema(Fields):
    """A JSON Schema with a name."""

    name: str = "answer"
    description: str | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    strict: bool | None = None
    """Objects that list their properties have no others. Every answer is held to its schema in any case."""


class TextFormat(Fields):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(Fields):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Fields):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class StructuralTagFormat(Fields):
    """Free text with constrained regions; the whole object is handed to the grammar library."""

    model_config = ConfigDict(extra="allow")

    type: Literal["structural_tag"]
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat, Field(discriminator="type")
]

Whitespace = Literal["spaced", "compact", "bounded", "any"]
GrammarBackend = Literal["auto", "xgrammar", "llguidance", "guidance"]
Unenforced = Literal["refuse", "warn", "verify"]
"""`guidance` is vLLM's name of llguidance."""


class StructuredOutputs(Fields):
    """vLLM's field, with the engine's own options. At most one of the grammars."""

    json_: Schema | str | None = Field(default=None, alias="json")
    """A JSON Schema, as an object or as its text."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """GBNF where it has `::=`, else Lark."""
    lark: str | None = None
    ebnf: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    grammar_id: str | None = None
    """An id that the engine's Compile returned."""
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    whitespace: Whitespace | None = None
    backend: GrammarBackend | None = None
    allow_unenforced: bool | None = None
    """Accept a schema with parts that cannot be enforced."""
    unenforced: Unenforced | None = None
    """What happens to such parts."""
    max_string_length: int | None = Field(default=None, ge=0, le=1 << 16)
    max_array_items: int | None = Field(default=None, ge=0, le=1 << 16)
    max_number_digits: int | None = Field(default=None, ge=0, le=15)
    max_whitespace: int | None = Field(default=None, ge=0, le=1 << 10)
    """Bounds of the values of JSON; the engine's fields of the same names."""
    max_backtracks: int | None = Field(default=None, ge=0, le=64)
    hold_tokens: int | None = Field(default=None, ge=0, le=1024)
    """How a verified answer goes back; the engine's fields of the same names."""
    disable_fallback: bool | None = None
    """Without effect: nothing falls back to another library unless `backend` is auto."""
    closed_objects: bool | None = None
    """Whether objects that list their properties have no others; the engine's field of the same name."""
    disable_additional_properties: bool | None = None
    """vLLM's name: true is `closed_objects` true."""
