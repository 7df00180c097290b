"""Grammars of every kind, as values: what an answer must match, and how its text becomes a value.

The invariant: only the server checks a Grammar; this module knows the forms, not the dialects.

Not responsible for: JSON Schemas of types (see schemas.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from lockstep_client.schemas import schema_of
from lockstep_client.wire import engine_pb2 as pb

Whitespace = Literal["spaced", "compact", "bounded", "any"]
Backend = Literal["xgrammar", "llguidance", "auto"]
Unenforced = Literal["refuse", "warn", "verify"]

_WHITESPACE = {
    "spaced": pb.WHITESPACE_SPACED,
    "compact": pb.WHITESPACE_COMPACT,
    "bounded": pb.WHITESPACE_BOUNDED,
    "any": pb.WHITESPACE_ANY,
}
_UNENFORCED = {"refuse": pb.UNENFORCED_REFUSE, "warn": pb.UNENFORCED_WARN, "verify": pb.UNENFORCED_VERIFY}
_BACKENDS = {"xgrammar": pb.BACKEND_XGRAMMAR, "llguidance": pb.BACKEND_LLGUIDANCE, "auto": pb.BACKEND_AUTO}
_NUMBERS = (
    "max_string_length", "max_array_items", "max_number_digits", "max_whitespace", "max_backtracks", "hold_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True, repr=False)
class Grammar:
    """What an answer must match. Made by one of the class methods; `with_options` sets the rest."""

    kind: str
    source: str | tuple[str, ...]
    parse: Callable[[str], Any] | None = None
    """Returns the value of a complete answer; None: an answer of this grammar is text, and has no other value."""
    whitespace: Whitespace | None = None
    backend: Backend | None = None
    allow_unenforced: bool = False
    unenforced: Unenforced | None = None
    max_string_length: int | None = None
    max_array_items: int | None = None
    max_number_digits: int | None = None
    max_whitespace: int | None = None
    max_backtracks: int | None = None
    hold_tokens: int | None = None
    closed_objects: bool | None = None

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls("json_object", "", json.loads)

    @classmethod
    def schema(cls, source: object) -> Grammar:
        """JSON of a schema: a type, a pydantic model, a mapping that is a JSON Schema, or its text (see schemas.py).

        The objects of a type or a model have no members that it does not list, unless it says so.
        """
        schema = schema_of(source)
        return cls("json_schema", schema.text, schema.parse, closed_objects=True if schema.closed else None)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that a regular expression matches as a whole."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, *choices: str) -> Grammar:
        """One of these texts."""
        return cls("choice", choices)

    @classmethod
    def ebnf(cls, source: str) -> Grammar:
        """Text of a grammar in the GBNF dialect, from its rule `root`."""
        return cls("ebnf", source)

    @classmethod
    def lark(cls, source: str) -> Grammar:
        """Text of a Lark grammar, from its rule `start`."""
        return cls("lark", source)

    @classmethod
    def structural_tag(cls, source: str | Mapping[str, Any]) -> Grammar:
        """Free text with guided regions, from the text or the value of a structural tag."""
        return cls("structural_tag", source if isinstance(source, str) else json.dumps(source))

    def with_options(
        self,
        *,
        whitespace: Whitespace | None = None,
        backend: Backend | None = None,
        allow_unenforced: bool = False,
        unenforced: Unenforced | None = None,
        max_string_length: int | None = None,
        max_array_items: int | None = None,
        max_number_digits: int | None = None,
        max_whitespace: int | None = None,
        max_backtracks: int | None = None,
        hold_tokens: int | None = None,
        closed_objects: bool | None = None,
    ) -> Grammar:
        """Return the grammar with options; what is not given stays at the server's default.

        Args:
            whitespace: white space between JSON tokens: one space after each comma and colon, none, at most 8
                characters in a row, or any.
            backend: the grammar library; "auto" is the first one that enforces the whole grammar.
            allow_unenforced: accept a grammar with parts that no library enforces; they become warnings of the answer.
            unenforced: what happens to such parts: "refuse" the request, "warn" as `allow_unenforced` does, or "verify"
                them on the answer, which ends with GRAMMAR_INVALID where it cannot become valid.
            max_string_length: most characters of a string in JSON, and of a name that no schema lists; 0: no bound.
            max_array_items: most items of an array in JSON; 0: no bound.
            max_number_digits: most digits of a number in JSON before its point, and after it; 0: no bound.
            max_whitespace: most white space characters in a row in JSON; 0: no bound but that of `whitespace`.
            max_backtracks: how often a verified answer without a legal token may go back over tokens that are held.
            hold_tokens: the last tokens of a verified answer that are held back; 0: it never goes back.
            closed_objects: whether objects with `properties` that say nothing about other members have none. Not given:
                True for a type or a model.

        Raises ValueError for a word that is none of these.

        """
        words = (
            ("whitespace", whitespace, _WHITESPACE),
            ("backend", backend, _BACKENDS),
            ("unenforced", unenforced, _UNENFORCED),
        )
        for name, value, known in words:
            if value is not None and value not in known:
                raise ValueError(f"{name}: {value!r} is none of {', '.join(known)}")
        return replace(
            self,
            whitespace=whitespace,
            backend=backend,
            allow_unenforced=allow_unenforced,
            unenforced=unenforced,
            max_string_length=max_string_length,
            max_array_items=max_array_items,
            max_number_digits=max_number_digits,
            max_whitespace=max_whitespace,
            max_backtracks=max_backtracks,
            hold_tokens=hold_tokens,
            closed_objects=self.closed_objects if closed_objects is None else closed_objects,
        )

    def message(self) -> pb.Grammar:
        """Return the message for the server."""
        message = pb.Grammar(allow_unenforced=self.allow_unenforced, closed_objects=self.closed_objects)
        if self.whitespace is not None:
            message.whitespace = _WHITESPACE[self.whitespace]
        if self.backend is not None:
            message.backend = _BACKENDS[self.backend]
        if self.unenforced is not None:
            message.unenforced = _UNENFORCED[self.unenforced]
        for name in _NUMBERS:
            if (value := getattr(self, name)) is not None:
                setattr(message, name, value)
        if isinstance(self.source, tuple):
            message.choice.choices.extend(self.source)
        elif self.kind == "json_object":
            message.json_object = True
        else:
            setattr(message, self.kind, self.source)
        return message

    def __repr__(self) -> str:
        return f"<Grammar {self.kind}>"


@dataclass(frozen=True, slots=True, repr=False)
class CompiledGrammar:
    """A grammar that the server has compiled; `grammar=` takes it in place of its source.

    Attributes:
        grammar_id: names the grammar in later requests; a digest, so that it is the same for an equal grammar.
        backend: the library that compiled it.
        cache_hit: it had been compiled before.
        compile_ms: time of the compilation itself, in milliseconds.
        memory_bytes: memory that it holds, an estimate.
        min_tokens: no answer is shorter, its end-of-sequence token included. 0: not known.
        known_answer_tokens: with at least this `max_tokens` an answer can be led to its end. 0: not known.
        warnings: with `allow_unenforced`, one for each part that is not enforced.

    """

    grammar_id: str
    backend: str
    cache_hit: bool
    compile_ms: float
    memory_bytes: int
    min_tokens: int
    known_answer_tokens: int
    warnings: tuple[str, ...]
    parse: Callable[[str], Any] | None = None
    """As `Grammar.parse` of its source."""

    def message(self) -> pb.Grammar:
        """Return the message for the server."""
        return pb.Grammar(grammar_id=self.grammar_id)

    def __repr__(self) -> str:
        return f"<CompiledGrammar {self.grammar_id} {self.backend}>"


def grammar_of(schema: object, grammar: Grammar | CompiledGrammar | None) -> Grammar | CompiledGrammar | None:
    """Return the grammar of a call's two arguments. Raises ValueError where both are given."""
    if schema is None:
        return grammar
    if grammar is not None:
        raise ValueError("schema, grammar: exclude each other")
    return Grammar.schema(schema)
