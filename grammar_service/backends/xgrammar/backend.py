"""The xgrammar backend: compiling is expensive (up to seconds) and masks are cheap.
The library needs torch for tensors.

An artifact is the library's serialised compilation. In memory it may take 40 times the bytes of the grammar, because
the library writes the automaton of all rules once for each rule; the pool of compile workers bounds its size.
Invariant: what the library warns about, and what it was seen to ignore without a warning (see schema.py), is an error.
Not responsible for: many rows in one call (see chains.py), tokens of a jump-forward text (see spelling.py).
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
import xgrammar

from grammar_service.backends.backend import MatcherFailed, Rows
from grammar_service.backends.json_schema import unenforced
from grammar_service.backends.json_schema.bounds import refuse_minima
from grammar_service.backends.json_schema.draft_3 import write_draft_3
from grammar_service.backends.json_schema.misspelled import misspelled_keywords, refuse_unknown_types
from grammar_service.backends.json_schema.strings.ecma_pattern import portable_regex
from grammar_service.backends.json_schema.strings.text import expressions, is_text
from grammar_service.backends.json_schema.unenforced import Unenforced
from grammar_service.backends.xgrammar.chains import XgrammarFiller
from grammar_service.backends.xgrammar.rules import bounded, corrected
from grammar_service.backends.xgrammar.schema import REGEX_DIALECT, own_bounds, problems, tag_problems
from grammar_service.backends.xgrammar.spelling import Spelling
from grammar_service.errors import GrammarServiceError, InvalidField, InvalidGrammar, LimitExceeded, NotSupported
from grammar_service.grammar.structural_tag import formats, modern, schema_place
from grammar_service.grammar.text_grammar import check_gbnf, gbnf_literal, with_fixed_escapes
from grammar_service.grammar.token_bytes import decoder_types
from grammar_service.grammar.value import Grammar, Kind
from grammar_service.grammar.vocabulary import Vocabulary

_SOURCE_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: ", re.MULTILINE)
_T = TypeVar("_T")


@contextmanager
def captured_stderr() -> Iterator[Callable[[], list[str]]]:
    """Redirect descriptor 2, where the C++ library writes, into memory.

    The yielded function returns the lines after the block has ended. The descriptor belongs to the whole process, so
    only one thread may use this; compile workers, which have one thread, are the only processes that do.
    """
    lines: list[str] = []
    sys.stderr.flush()
    original = os.dup(2)
    sink = os.memfd_create("lockstep-stderr")
    os.dup2(sink, 2)
    try:
        yield lambda: lines
    finally:
        os.dup2(original, 2)
        os.close(original)
        lines.extend(os.pread(sink, os.fstat(sink).st_size, 0).decode(errors="replace").splitlines())
        os.close(sink)


class XgrammarBackend:
    """xgrammar with one vocabulary. One compilation at a time per object, on one thread."""

    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        tokens, vocab_type = _encoded_tokens(vocabulary)
        self._tokenizer = xgrammar.TokenizerInfo(
            tokens, vocab_type, vocab_size=vocabulary.size, stop_token_ids=list(vocabulary.stop_ids)
        )
        # The library refuses these tokens too, but prints a line about each.
        self._never = frozenset(i for i, text in enumerate(tokens) if not text) - set(vocabulary.stop_ids)
        self._spelling = Spelling(vocabulary)
        self._filler = XgrammarFiller(vocabulary, self._never, _full_row(vocabulary))
        self._compiler = xgrammar.GrammarCompiler(self._tokenizer, max_threads=1, cache_enabled=False)

    def compile(self, grammar: Grammar, *, allow_unenforced: bool = False) -> bytes:
        """Compile in this process, with its stderr redirected; see `Backend.compile`."""
        # Parts that are known to be ignored are refused before the expensive work.
        prepared, found, misspelled = _prepared(grammar)
        unenforced.settle(self.name, found, allow_unenforced)
        compiled, ignored = _with_warnings(lambda: self._compile(prepared))
        warnings = unenforced.settle(self.name, [*found, *ignored], allow_unenforced)
        try:
            return unenforced.pack((*warnings, *misspelled), compiled.serialize_json().encode())
        except RuntimeError as error:
            raise _refusal(error) from None

    def load(self, grammar: Grammar, artifact: bytes) -> XgrammarCompiled:
        """Return the compiled form. Holds the GIL only while the text is copied: 4 ms of 0.4 s for 40 MB."""
        self._spelling.ready()
        warnings, data = unenforced.unpack(artifact)
        compiled = xgrammar.CompiledGrammar.deserialize_json(str(data, "utf-8"), self._tokenizer)
        return XgrammarCompiled(compiled, self._vocabulary, self._filler, self._spelling, warnings)

    def _compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        compiler = self._compiler
        match grammar.kind:
            case Kind.JSON_SCHEMA | Kind.JSON_OBJECT:
                rules = xgrammar.Grammar.from_json_schema(
                    grammar.text,
                    any_whitespace=True,
                    max_whitespace_cnt=grammar.most_whitespace,
                    strict_mode=False,
                )
                text = bounded(str(rules), grammar.reading)
                return compiler.compile_grammar(corrected(text, grammar))
            case Kind.REGEX:
                return compiler.compile_regex(grammar.text)
            case Kind.EBNF:
                check_gbnf(grammar.text)
                return compiler.compile_grammar(with_fixed_escapes(grammar.text))
            case Kind.CHOICE:
                choices = json.loads(grammar.text)
                return compiler.compile_grammar("root ::= " + " | ".join(gbnf_literal(choice) for choice in choices))
            case Kind.STRUCTURAL_TAG:
                rules = xgrammar.Grammar.from_structural_tag(grammar.text)
                return compiler.compile_grammar(corrected(str(rules), grammar))
            case Kind.COMPOSED:
                raise NotSupported("a composed grammar is taken apart before a library reads it")
            case Kind.LARK:
                raise NotSupported("Lark grammars need the backend llguidance; this is xgrammar")


def _prepared(grammar: Grammar) -> tuple[Grammar, list[Unenforced], list[str]]:
    """Return the grammar as the library must read it, the parts that it would ignore, and likely misspellings."""
    if grammar.kind in (Kind.JSON_SCHEMA, Kind.JSON_OBJECT):
        schema = json.loads(grammar.text)
        write_draft_3(schema, "")
        refuse_unknown_types(schema, "")
        misspelled = misspelled_keywords(schema, "")
        refuse_minima(schema, "", grammar.reading)
        found = problems(schema, strict_formats=grammar.reading.strict_formats)
        found += own_bounds(schema, grammar.reading)
        return replace(grammar, text=json.dumps(schema, ensure_ascii=False)), found, misspelled
    if grammar.kind is Kind.REGEX:
        return replace(grammar, text=portable_regex(grammar.text, REGEX_DIALECT)), [], []
    if grammar.kind is not Kind.STRUCTURAL_TAG:
        return grammar, [], []
    for name in ("max_string_length", "max_array_items", "max_number_digits"):
        if getattr(grammar.reading, name):
            raise NotSupported(f"{name}: xgrammar bounds only an answer to one JSON Schema, no structural tag")
    document, found, misspelled = modern(json.loads(grammar.text)), [], []
    for path, node in formats(document["format"], "/format"):
        if node.get("type") == "lark":
            raise NotSupported(f"structural tag: {path}: Lark grammars need the backend llguidance; this is xgrammar")
        if node.get("type") == "regex" and isinstance(node.get("pattern"), str):
            node["pattern"] = portable_regex(node["pattern"], REGEX_DIALECT)
        if is_text(node):
            found += _write_text(node, path, strict=grammar.reading.strict_formats)
        if "json_schema" in node:
            place = schema_place(node, path)
            node.pop("at", None)
            write_draft_3(node["json_schema"], place)
            refuse_unknown_types(node["json_schema"], f"{path}/json_schema")
            misspelled += misspelled_keywords(node["json_schema"], place)
            found += problems(node["json_schema"], place, strict_formats=grammar.reading.strict_formats)
            found += tag_problems(node, path)
            if node.get("style", "json") == "json":
                node["max_whitespace_cnt"] = grammar.most_whitespace
        if node.get("type") == "grammar" and isinstance(node.get("grammar"), str):
            check_gbnf(node["grammar"])
            node["grammar"] = with_fixed_escapes(node["grammar"])
    return replace(grammar, text=json.dumps(document, ensure_ascii=False)), found, misspelled


def _write_text(node: dict[str, Any], path: str, *, strict: bool) -> list[Unenforced]:
    """Write a string without quotation marks as free text, in place. Return what is not enforced.

    An expression could run over the text that ends the string, because the library has no intersection.
    """
    place = schema_place(node, path)
    wanted, found = expressions(node["json_schema"], place, strict=strict)
    node.clear()
    node["type"] = "any_text"
    return found + [Unenforced(place, key, "is not enforced in a text without quotation marks") for key, _ in wanted]


def _with_warnings(action: Callable[[], _T]) -> tuple[_T, list[Unenforced]]:
    """Run a compilation. Return its result, and the library's warnings as parts that are not enforced.

    Errors of the library become errors of the grammar process.
    """
    try:
        with captured_stderr() as lines:
            result = action()
    except (RuntimeError, ValueError, TypeError, MemoryError) as error:
        raise _refusal(error) from None
    warnings = [_clean(line).removeprefix("Warning: ") for line in lines() if "Warning" in line]
    return result, [Unenforced("", "", warning) for warning in warnings]


def _refusal(error: Exception) -> GrammarServiceError:
    if isinstance(error, MemoryError) or "bad_alloc" in str(error):
        return LimitExceeded("compile_memory_mb: the compilation needs more memory than it allows")
    return InvalidGrammar(f"xgrammar: {_clean(str(error))}")


def _clean(message: str) -> str:
    return " ".join(_SOURCE_PLACE.sub("", message).split())


def _encoded_tokens(vocabulary: Vocabulary) -> tuple[list[str], xgrammar.VocabType]:
    """Return the token texts by id, as tokenizer.json writes them, and the encoding of their bytes.

    A special token gets the empty text, so the library never allows it as text.
    """
    document = json.loads(vocabulary.tokenizer_json)
    vocab = document["model"].get("vocab")
    if isinstance(vocab, list):
        pairs: Any = ((entry[0], i) for i, entry in enumerate(vocab))
    elif isinstance(vocab, dict):
        pairs = vocab.items()
    else:
        raise InvalidField("tokenizer_json", "xgrammar needs an object or an array `model.vocab`")
    tokens = [""] * vocabulary.size
    for text, token in pairs:
        if token < vocabulary.size:
            tokens[token] = text
    for added in document.get("added_tokens", ()):
        if added["id"] < vocabulary.size:
            tokens[added["id"]] = added["content"]
    for token in vocabulary.special:
        tokens[token] = ""
    kinds = decoder_types(document)
    if "ByteLevel" in kinds:
        return tokens, xgrammar.VocabType.BYTE_LEVEL
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return tokens, xgrammar.VocabType.BYTE_FALLBACK
    return tokens, xgrammar.VocabType.RAW


class XgrammarCompiled:
    """A compiled grammar, which all its matchers share."""

    def __init__(
        self,
        compiled: xgrammar.CompiledGrammar,
        vocabulary: Vocabulary,
        filler: XgrammarFiller,
        spelling: Spelling,
        warnings: tuple[str, ...],
    ) -> None:
        self._compiled = compiled
        self.warnings = warnings
        self._vocabulary = vocabulary
        self._filler, self._spelling = filler, spelling
        self.memory_bytes: int = compiled.memory_size_bytes

    def matcher(self) -> XgrammarMatcher:
        """Return a matcher at the start of an answer."""
        return XgrammarMatcher(xgrammar.GrammarMatcher(self._compiled), self._vocabulary, self._filler, self._spelling)


class XgrammarMatcher:
    """The state of one answer."""

    def __init__(
        self, inner: xgrammar.GrammarMatcher, vocabulary: Vocabulary, filler: XgrammarFiller, spelling: Spelling
    ) -> None:
        self.inner = inner
        """The library's matcher, which the chain filler uses too."""
        self.filler = filler
        self._spelling = spelling
        self._vocabulary = vocabulary
        self._vocab_size = vocabulary.size
        self._never = filler.never
        self._stops = frozenset(vocabulary.stop_ids)
        self.terminated = False
        self._num_words = vocabulary.num_words
        self._all = _full_row(vocabulary)
        self._has_tail = vocabulary.size % 32 != 0

    def accept(self, token: int) -> bool:
        """Advance over `token`; see `Matcher.accept`."""
        if not 0 <= token < self._vocab_size or token in self._never or self.terminated:
            return False
        try:
            accepted = bool(self.inner.accept_token(token))
        except RuntimeError as error:
            raise MatcherFailed(_clean(str(error))) from None
        if token in self._stops:
            self.terminated = bool(self.inner.is_terminated())
        return accepted

    def rollback(self, count: int) -> None:
        """Take back `count` tokens; see `Matcher.rollback`."""
        if count:
            try:
                self.inner.rollback(count)
            except RuntimeError as error:
                raise MatcherFailed(_clean(str(error))) from None
            self.terminated = False

    def copy(self) -> XgrammarMatcher:
        """Return a copy that shares the compiled grammar."""
        twin = XgrammarMatcher(self.inner.fork(), self._vocabulary, self.filler, self._spelling)
        twin.terminated = self.terminated
        return twin

    def fill(self, rows: Rows, index: int) -> None:
        """Write the row in place, through a tensor over the same memory; see `Matcher.fill`."""
        # One tensor for each row, because the library assumes that the rows of a matrix are contiguous.
        rows.handle = tensors = rows.handle or {}
        tensor = tensors.get(index)
        if tensor is None:
            tensor = tensors[index] = torch.from_numpy(rows.words[index : index + 1, : self._num_words])
        try:
            constrained = self.inner.fill_next_token_bitmask(tensor, 0)
        except RuntimeError as error:
            raise MatcherFailed(_clean(str(error))) from None
        if not constrained:
            rows.words[index, : self._num_words] = self._all
        elif self._has_tail:
            rows.words[index, self._num_words - 1] &= self._all[-1]

    def jump_forward_tokens(self, limit: int) -> tuple[int, ...]:
        """Spell the library's jump-forward string; see `Matcher.jump_forward_tokens`."""
        try:
            text = self.inner.find_jump_forward_string()
            return self._spelling.certain(text, self.copy())[:limit] if text else ()
        except UnicodeDecodeError:
            return ()  # the last token ended within a character, and the library decodes the rest of it as a text
        except RuntimeError as error:
            raise MatcherFailed(_clean(str(error))) from None

    def num_jump_forward_bytes(self) -> int:
        """Return 0: the cost of a row does not depend on the text that follows."""
        return 0

    def __repr__(self) -> str:
        return f"<XgrammarMatcher terminated={self.terminated}>"


def _full_row(vocabulary: Vocabulary) -> Any:
    bits = np.zeros(vocabulary.num_words * 32, dtype=bool)
    bits[: vocabulary.size] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


if sys.byteorder != "little":
    raise ImportError("mask rows are little-endian words; this machine is not")
