"""The llguidance backend: the library computes masks on the fly, so an artifact is grammar text.

Invariant: nothing here loads torch or transformers. The matcher handles stop tokens itself and does not pass them to
the library, which knows only one stop token and counts it as a step in some states only. So accept and rollback are
exact.
Not responsible for: translating a grammar into the library's notation (see notation.py), many rows in one call (see
chains.py).
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from grammar_service.backends.backend import MatcherFailed, Rows
from grammar_service.backends.json_schema import unenforced
from grammar_service.backends.json_schema.unenforced import Unenforced
from grammar_service.backends.llguidance.chains import LlguidanceFiller
from grammar_service.backends.llguidance.loosening import MAX_ROUNDS, Loosening
from grammar_service.backends.llguidance.native_tokens import native_tokenizer
from grammar_service.backends.llguidance.notation import (
    Rounds,
    check_types,
    has_schemas,
    misspelled,
    notation,
    parts,
    readable,
    unforced,
)
from grammar_service.errors import GrammarServiceError, InvalidField, InvalidGrammar, LimitExceeded, NotEnforced
from grammar_service.grammar.text_grammar import count_alternatives
from grammar_service.grammar.value import Grammar, Kind
from grammar_service.grammar.vocabulary import Vocabulary
from shared_mem.chains import SpecialWords

MAX_ROW_ITEMS = 20_000
"""The most alternatives that may be open at one place. The library's own limit of 2,000 is too low for a schema of 600
properties. The first row of 10,000 alternatives takes 40 ms and of 20,000 about 200 ms; later rows take less than 10
ms."""

_OVERLAP = "are not disjoint"
"""The library intersects no two patterns of names that have a name in common."""

_LIMIT_WORDS = ("too big", "too large", "too complex", "fuel", "limit")
"""Words by which an error of the library is recognised as one of its limits."""


class LlguidanceBackend:
    """llguidance with one vocabulary. All grammars share the library's tokenizer."""

    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        try:
            named = _without_special_names(vocabulary)
            if vocabulary.as_text:
                self._tokenizer = native_tokenizer(vocabulary, named)
            else:
                self._tokenizer = LLTokenizer(named, n_vocab=vocabulary.size, eos_token=list(vocabulary.stop_ids))
        except (ValueError, UnicodeDecodeError) as error:
            raise InvalidField("tokenizer_json", f"llguidance cannot read it: {error}") from None
        self._limits = LLParserLimits(max_items_in_row=MAX_ROW_ITEMS, verbose_errors=False)
        self._never = _SpecialBits(vocabulary, stops_too=True)
        self._never_but_stops = _SpecialBits(vocabulary, stops_too=False)
        special = self._never.special_words(self._never_but_stops)
        self._filler = LlguidanceFiller(vocabulary, special, self._tokenizer.eos_token)
        self._refused: tuple[Grammar, str, list[Unenforced]] | None = None
        """The last grammar with parts that are not enforced, in the library's notation, and these parts."""
        self._made: tuple[str, LLMatcher] | None = None
        """The last notation that the library took, and its matcher: a process that compiles a grammar loads it next."""

    def compile(self, grammar: Grammar, *, allow_unenforced: bool = False) -> bytes:
        """Return the grammar in the library's own notation, checked against its limits."""
        if grammar.kind in (Kind.EBNF, Kind.LARK) and (count := count_alternatives(grammar.text)) > MAX_ROW_ITEMS:
            raise LimitExceeded(f"llguidance: {count} alternatives; at most {MAX_ROW_ITEMS} may be open in one place")
        # A request that has its answers verified asks for a grammar that was refused a moment ago.
        plain = replace(grammar, reading=replace(grammar.reading, verify=False))
        refused = self._refused
        text, found = (
            refused[1:] if refused is not None and refused[0] == plain else self._built(plain, allow_unenforced)
        )
        try:
            warnings = unenforced.settle(self.name, found, allow_unenforced)
        except NotEnforced:
            self._refused = plain, text, found
            raise
        return unenforced.pack(warnings + misspelled(grammar), text.encode())

    def _built(self, grammar: Grammar, allow_unenforced: bool) -> tuple[str, list[Unenforced]]:
        """Return the grammar in the library's notation, and all parts of it that the library does not enforce.

        The lenient notation differs from the strict one in what the library says of such parts, not in what it takes.
        """
        self._made = None  # so that the memory of a compilation does not depend on earlier grammars
        with_names, loosening, messages, rounds = True, Loosening(), list[str](), Rounds()
        for _ in range(MAX_ROUNDS):
            text, found = notation(grammar, lenient=True, with_names=with_names, loosening=loosening, rounds=rounds)
            failed, messages = self._messages(text)
            if not failed:
                return text, found + parts(messages, grammar)
            if with_names and grammar.reading.max_string_length and _OVERLAP in messages[0]:
                with_names = False
            elif (further := loosening.further(messages[0])) is not None:
                loosening = further
            else:
                break
        raise self._refusal(grammar, readable("; ".join(messages), grammar.kind), allow_unenforced)

    def _refusal(self, grammar: Grammar, message: str, allow_unenforced: bool) -> GrammarServiceError:
        """Return the error of a grammar that the library does not take. Raises the one of parts that are named."""
        check_types(grammar)
        if has_schemas(grammar):
            # The strict notation may fail for another reason, a part that the library does not enforce.
            _, named = self._messages(notation(grammar, lenient=False)[0])
            found = parts([readable("; ".join(named), grammar.kind)], grammar)
            unenforced.settle(self.name, [part for part in found if part.keyword], allow_unenforced)
        if any(word in message for word in _LIMIT_WORDS):
            return LimitExceeded(f"llguidance: {message}")
        return InvalidGrammar(f"llguidance: {message}")

    def load(self, grammar: Grammar, artifact: bytes) -> LlguidanceCompiled:
        """Return the compiled form. Takes as long as the compilation (milliseconds) and releases the GIL.

        In a process that has just compiled the grammar it takes microseconds.
        """
        warnings, text = unenforced.unpack(artifact)
        made, self._made = self._made, None
        source = text.decode()
        pristine = made[1] if made is not None and made[0] == source else self._pristine(source)
        special = (self._never, self._never_but_stops)
        return LlguidanceCompiled(
            pristine,
            len(text),
            self._vocabulary,
            special,
            self._filler,
            warnings,
            unforced=partial(self._pristine, unforced(source)),
        )

    def _pristine(self, source: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise InvalidGrammar(f"llguidance: {matcher.get_error()}")
        return matcher

    def _messages(self, text: str) -> tuple[bool, list[str]]:
        """Return whether the library refuses `text`, and its messages."""
        # A matcher says all that a validation says, and builds the lexer, whose limits a validation does not see.
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if matcher.is_error():
            return True, [matcher.get_error()]
        self._made = text, matcher
        return False, [message for message in matcher.get_grammar_warnings() if message]


def _without_special_names(vocabulary: Vocabulary) -> str:
    """Return tokenizer.json with names of the special tokens that occur in no text.

    Where only one text can follow, the library allows only the canonical tokens of that text. If the text contained the
    name of a special token, its canonical token would be the special token, which no mask allows: a dead end. The same
    holds for markers, which the library takes for special tokens unless they are text.
    """
    document = json.loads(vocabulary.tokenizer_json)
    names = {text: f"\0{token}\0" for token, text in vocabulary.special.items()}
    if not vocabulary.as_text:
        markers = frozenset(vocabulary.markers)
        names |= {t["content"]: f"\0{t['id']}\0" for t in document.get("added_tokens", ()) if t["id"] in markers}
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
    """The words of a row that contain bits of special tokens or of padding, and the bits of them that may remain."""

    def __init__(self, vocabulary: Vocabulary, *, stops_too: bool) -> None:
        allowed = np.zeros(vocabulary.num_words * 32, dtype=bool)
        allowed[: vocabulary.size] = True
        allowed[list(vocabulary.special)] = False
        allowed[list(vocabulary.stop_ids)] = not stops_too
        keep = np.packbits(allowed, bitorder="little").view(np.int32)
        self.where = np.flatnonzero(keep != -1)
        self.keep = keep[self.where]

    def special_words(self, but_stops: _SpecialBits) -> SpecialWords:
        """Return the words for `LlguidanceFiller`. `but_stops` is the same set with stop tokens allowed."""
        keep = self.keep.view(np.uint32)
        also = np.full_like(keep, 0xFFFFFFFF)
        also[np.searchsorted(self.where, but_stops.where)] = but_stops.keep.view(np.uint32)
        return SpecialWords(self.where.astype(np.int32), keep, also & ~keep)


class LlguidanceCompiled:
    """A matcher in the initial state, from which all matchers are copied."""

    def __init__(
        self,
        pristine: LLMatcher,
        text_bytes: int,
        vocabulary: Vocabulary,
        special: tuple[_SpecialBits, _SpecialBits],
        filler: LlguidanceFiller,
        warnings: tuple[str, ...],
        unforced: Callable[[], LLMatcher],
    ) -> None:
        self._pristine = pristine
        self._unforced = unforced
        self._freely: LlguidanceCompiled | None = None
        self._lock = threading.Lock()
        self._vocabulary = vocabulary
        self._special = special
        self._filler = filler
        self.warnings = warnings
        self.memory_bytes = (64 << 10) + 40 * text_bytes
        """An estimate: the lexer's tables grow with use, to about 40 bytes for each character of a large schema."""

    def matcher(self) -> LlguidanceMatcher:
        """Return a copy of the initial state. Takes microseconds."""
        return LlguidanceMatcher(self._pristine.deep_copy(), self._vocabulary, *self._special, self._filler)

    def spelled_freely(self) -> LlguidanceCompiled:
        """See `Spelled`. `memory_bytes` does not count what the first call adds, as much again."""
        with self._lock:
            if self._freely is None:
                twin = copy.copy(self)
                twin._pristine = self._unforced()
                self._freely = twin._freely = twin
            return self._freely


_NEVER_MASKED = 1 << 60


class LlguidanceMatcher:
    """The state of one answer: this object knows whether it has ended, the library holds the rest."""

    def __init__(
        self,
        inner: LLMatcher,
        vocabulary: Vocabulary,
        never: _SpecialBits,
        never_but_stops: _SpecialBits,
        filler: LlguidanceFiller,
    ) -> None:
        self.inner = inner
        """The library's matcher, which the chain filler uses too."""
        self.filler = filler
        self._vocabulary = vocabulary
        self._stops = frozenset(vocabulary.stop_ids)
        self._special = vocabulary.special
        self._vocab_size = vocabulary.size
        self._row_bytes = vocabulary.num_words * 4
        self._never = never
        self._never_but_stops = never_but_stops
        self.terminated = False
        self._since_mask = _NEVER_MASKED
        """Tokens accepted since the last state whose mask was computed, or fewer: the chain filler has calls of its own
        for accepting."""

    def accept(self, token: int) -> bool:
        """Advance over `token`; see `Matcher.accept`."""
        if self.terminated:
            return False
        if token in self._stops:
            self.terminated = self.inner.is_accepting()
            return self.terminated
        # A token out of range would put the library's matcher into its error state.
        if not 0 <= token < self._vocab_size or token in self._special:
            return False
        if self.inner.try_consume_tokens([token]) == 1:
            self._since_mask += 1
            return True
        self._check()
        return False

    def rollback(self, count: int) -> None:
        """Take back `count` tokens; see `Matcher.rollback`.

        A mask leaves rows in the library's parser, and a rollback to a state before it does not remove them:
        tokens that are accepted then may lead to a wrong state. A mask of the present state drops these rows.
        """
        if count and self.terminated:
            self.terminated = False
            count -= 1
        if not count:
            return
        if not self.inner.rollback(count):
            raise MatcherFailed(self.inner.get_error())
        if count > self._since_mask:
            unused = np.empty(self._row_bytes // 4, dtype=np.int32)
            self.inner.unsafe_compute_mask_ptr(unused.ctypes.data, self._row_bytes)
            self._since_mask = 0
        else:
            self._since_mask -= count

    def masked(self) -> None:
        """Note that the chain filler has computed the mask of the present state, and of none after it after that."""
        self._since_mask = 0

    def copy(self) -> LlguidanceMatcher:
        """Return a copy. Takes microseconds."""
        twin = LlguidanceMatcher(
            self.inner.deep_copy(), self._vocabulary, self._never, self._never_but_stops, self.filler
        )
        twin.terminated, twin._since_mask = self.terminated, self._since_mask
        return twin

    def fill(self, rows: Rows, index: int) -> None:
        """Write the row in place; see `Matcher.fill`."""
        self.inner.unsafe_compute_mask_ptr(rows.address(index), self._row_bytes)
        self._since_mask = 0
        self._check()
        special = self._never_but_stops if self.inner.is_accepting() else self._never
        words = rows.words[index]
        words[special.where] &= special.keep

    def jump_forward_tokens(self, limit: int) -> tuple[int, ...]:
        """Return the library's own tokens; see `Matcher.jump_forward_tokens`. Its masks allow no others there."""
        found = self.inner.compute_ff_tokens()[:limit]
        self._check()
        return tuple(found)

    def num_jump_forward_bytes(self) -> int:
        """Return the length of the text that the library must tokenize for the next row."""
        return len(self.inner.compute_ff_bytes())

    def _check(self) -> None:
        # In the error state the library's mask allows only the stop token, which would look like a finished answer.
        if self.inner.is_error():
            raise MatcherFailed(self.inner.get_error())

    def __repr__(self) -> str:
        return f"<LlguidanceMatcher terminated={self.terminated} stop_reason={self.inner.stop_reason()}>"
