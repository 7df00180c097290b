"""The llguidance backend: masks are computed on the fly, so compiling is cheap and an artifact is grammar text.

Invariant: nothing here loads torch or transformers. The matcher keeps stop tokens to itself (the library counts a stop
token as a step in one state and not in another, and knows one at a time), so accept and rollback are exact.
"""

from __future__ import annotations

import json

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from grammar_service.backends.backend import MatcherFailed, Rows
from grammar_service.backends.json_schema import unenforced
from grammar_service.backends.llguidance.chains import LlguidanceFiller
from grammar_service.backends.llguidance.notation import has_schemas, misspelled, notation, parts, readable
from grammar_service.errors import InvalidField, InvalidGrammar, LimitExceeded
from grammar_service.grammar.text_grammar import alternatives
from grammar_service.grammar.value import Grammar, Kind
from grammar_service.grammar.vocabulary import Vocabulary
from shared_mem.chains import SpecialWords

MAX_ROW_ITEMS = 20_000
"""Alternatives that may be open at one place; the library's own 2,000 is less than a schema of 600 properties needs.
The first row of 10,000 takes 40 ms and of 20,000 some 200, later ones under 10."""

_LIMIT_WORDS = ("too big", "too large", "too complex", "fuel", "limit")
"""The library names its own limits in words only."""


class LlguidanceBackend:
    """llguidance with one vocabulary. The tokenizer inside is shared by all grammars."""

    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        try:
            self._tokenizer = LLTokenizer(
                _without_special_names(vocabulary), n_vocab=vocabulary.size, eos_token=list(vocabulary.stop_ids)
            )
        except (ValueError, UnicodeDecodeError) as error:
            raise InvalidField("tokenizer_json", f"llguidance cannot read it: {error}") from None
        self._limits = LLParserLimits(max_items_in_row=MAX_ROW_ITEMS, verbose_errors=False)
        self._never = _SpecialBits(vocabulary, stops_too=True)
        self._never_but_stops = _SpecialBits(vocabulary, stops_too=False)
        self._filler = LlguidanceFiller(vocabulary, self._never.special_words(self._never_but_stops))

    def compile(self, grammar: Grammar, *, allow_unenforced: bool = False) -> bytes:
        """Return the grammar in the library's own notation, checked against its limits."""
        if grammar.kind in (Kind.EBNF, Kind.LARK) and (count := alternatives(grammar.text)) > MAX_ROW_ITEMS:
            raise LimitExceeded(f"llguidance: {count} alternatives; at most {MAX_ROW_ITEMS} may be open in one place")
        text, found = notation(grammar, lenient=False)
        failed, messages = self._messages(text)
        if failed:
            refused = readable("; ".join(messages), grammar.kind)
            messages = []
            if has_schemas(grammar):
                text, found = notation(grammar, lenient=True)
                failed, messages = self._messages(text)
            if failed or not messages:
                # The lenient notation may fail on something else; what the strict one named stays the reason.
                named = [part for part in parts([refused], grammar) if part.keyword]
                unenforced.settle(self.name, named, allow_unenforced)
                if any(word in refused for word in _LIMIT_WORDS):
                    raise LimitExceeded(f"llguidance: {refused}")
                raise InvalidGrammar(f"llguidance: {refused}")
        found += parts(messages, grammar)
        warnings = unenforced.settle(self.name, found, allow_unenforced) + misspelled(grammar)
        return unenforced.pack(warnings, text.encode())

    def load(self, grammar: Grammar, artifact: bytes) -> LlguidanceCompiled:
        """Return the compiled form. Costs what the compilation cost (milliseconds), without the GIL."""
        warnings, text = unenforced.unpack(artifact)
        pristine = LLMatcher(self._tokenizer, text.decode(), log_level=0, limits=self._limits)
        if pristine.is_error():
            raise InvalidGrammar(f"llguidance: {pristine.get_error()}")
        special = (self._never, self._never_but_stops)
        return LlguidanceCompiled(pristine, len(text), self._vocabulary, special, self._filler, warnings)

    def _messages(self, text: str) -> tuple[bool, list[str]]:
        """Return whether the library refuses `text`, and what it says about it."""
        failed, messages = LLMatcher.validate_grammar_with_warnings(text, self._tokenizer, limits=self._limits)
        if not failed:
            # Validation stops short of building the lexer; the matcher's own limits show only here.
            matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
            if matcher.is_error():
                return True, [matcher.get_error()]
        return failed, [message for message in messages if message]


def _without_special_names(vocabulary: Vocabulary) -> str:
    """Return tokenizer.json with names of the special tokens that no text holds.

    A text that can go one way only is spelled by the library in its canonical tokens. Where it holds the name of a
    special token that would be the special token, which no mask allows, and the answer would be at a dead end.
    """
    document = json.loads(vocabulary.tokenizer_json)
    names = {text: f"\0{token}\0" for token, text in vocabulary.special.items()}
    for added in document.get("added_tokens", ()):
        added["content"] = names.get(added["content"], added["content"])
    model = document["model"]
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(text, text): token for text, token in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[names.get(entry[0], entry[0]), *entry[1:]] for entry in vocab]
    unknown = model.get("unk_token")
    if isinstance(unknown, str):
        model["unk_token"] = names.get(unknown, unknown)
    return json.dumps(document)


class _SpecialBits:
    """The words of a row that hold bits of special tokens or of padding, and what may stay of them."""

    def __init__(self, vocabulary: Vocabulary, *, stops_too: bool) -> None:
        allowed = np.zeros(vocabulary.num_words * 32, dtype=bool)
        allowed[: vocabulary.size] = True
        allowed[list(vocabulary.special)] = False
        allowed[list(vocabulary.stop_ids)] = not stops_too
        keep = np.packbits(allowed, bitorder="little").view(np.int32)
        self.where = np.flatnonzero(keep != -1)
        self.keep = keep[self.where]

    def special_words(self, but_stops: _SpecialBits) -> SpecialWords:
        """Return the same for `LlguidanceFiller`; `but_stops` differs in stop tokens alone."""
        keep = self.keep.view(np.uint32)
        also = np.full_like(keep, 0xFFFFFFFF)
        also[np.searchsorted(self.where, but_stops.where)] = but_stops.keep.view(np.uint32)
        return SpecialWords(self.where.astype(np.int32), keep, also & ~keep)


class LlguidanceCompiled:
    """A matcher that never moves, to be copied."""

    def __init__(
        self,
        pristine: LLMatcher,
        text_bytes: int,
        vocabulary: Vocabulary,
        special: tuple[_SpecialBits, _SpecialBits],
        filler: LlguidanceFiller,
        warnings: tuple[str, ...],
    ) -> None:
        self._pristine = pristine
        self._vocabulary = vocabulary
        self._special = special
        self._filler = filler
        self.warnings = warnings
        self.memory_bytes = (64 << 10) + 40 * text_bytes
        """Estimate: the lexer's tables grow with use; 40 bytes a character of the text was seen on large schemas."""

    def matcher(self) -> LlguidanceMatcher:
        """Return a copy at the start of an answer; the copy costs microseconds."""
        return LlguidanceMatcher(self._pristine.deep_copy(), self._vocabulary, *self._special, self._filler)


class LlguidanceMatcher:
    """One answer. Stop tokens live here, text tokens in the library."""

    def __init__(
        self,
        inner: LLMatcher,
        vocabulary: Vocabulary,
        never: _SpecialBits,
        never_but_stops: _SpecialBits,
        filler: LlguidanceFiller,
    ) -> None:
        self.inner = inner
        """For `filler`."""
        self.filler = filler
        self._vocabulary = vocabulary
        self._stops = frozenset(vocabulary.stop_ids)
        self._special = vocabulary.special
        self._vocab_size = vocabulary.size
        self._row_bytes = vocabulary.num_words * 4
        self._never = never
        self._never_but_stops = never_but_stops
        self.terminated = False

    def accept(self, token: int) -> bool:
        """Move over `token`; see `Matcher.accept`."""
        if self.terminated:
            return False
        if token in self._stops:
            self.terminated = self.inner.is_accepting()
            return self.terminated
        # Out of range would be an error of the whole matcher.
        if not 0 <= token < self._vocab_size or token in self._special:
            return False
        if self.inner.try_consume_tokens([token]) == 1:
            return True
        self._check()
        return False

    def rollback(self, count: int) -> None:
        """Take back `count` tokens; see `Matcher.rollback`."""
        if count and self.terminated:
            self.terminated = False
            count -= 1
        if count and not self.inner.rollback(count):
            raise MatcherFailed(self.inner.get_error())

    def copy(self) -> LlguidanceMatcher:
        """Return a copy; it costs microseconds."""
        twin = LlguidanceMatcher(
            self.inner.deep_copy(), self._vocabulary, self._never, self._never_but_stops, self.filler
        )
        twin.terminated = self.terminated
        return twin

    def fill(self, rows: Rows, index: int) -> None:
        """Compute the row in place; see `Matcher.fill`."""
        self.inner.unsafe_compute_mask_ptr(rows.address(index), self._row_bytes)
        self._check()
        special = self._never_but_stops if self.inner.is_accepting() else self._never
        words = rows.words[index]
        words[special.where] &= special.keep

    def jump_forward_tokens(self, limit: int) -> tuple[int, ...]:
        """Ask the library; see `Matcher.jump_forward_tokens`. Its masks offer nothing else where it spells a forced text."""
        found = self.inner.compute_ff_tokens()[:limit]
        self._check()
        return tuple(found)

    def num_jump_forward_bytes(self) -> int:
        """Return the length of the text that the library will tokenize for the next row."""
        return len(self.inner.compute_ff_bytes())

    def _check(self) -> None:
        # In the error state the library's mask allows the stop token alone, which would pass for a finished answer.
        if self.inner.is_error():
            raise MatcherFailed(self.inner.get_error())

    def __repr__(self) -> str:
        return f"<LlguidanceMatcher terminated={self.terminated} stop_reason={self.inner.stop_reason()}>"
