"""What a matcher library must do for the sidecar, and how one is chosen by name.

Invariant: importing this package imports no library; `load_backend` imports exactly one. The llguidance backend never
loads torch. Every implementation passes the same conformance suite.

A grammar goes through three forms: `Grammar` (text) -> artifact (bytes, made by `compile` in a killable process) ->
`Compiled` (made by `load` in the sidecar, shared, immutable) -> `Matcher` (one per slot, moves). What the library would
not enforce is an error of `compile`, or, when the caller allows it, travels in the artifact as warnings.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from grammar_service.errors import NotSupported
from grammar_service.grammar.value import Grammar
from grammar_service.grammar.vocabulary import Vocabulary
from shared_mem.chains import SpecialWords

NAMES = ("llguidance", "xgrammar")
"""Backends that exist; which are installed, `installed` says."""


class MatcherFailed(Exception):
    """The library hit one of its limits or a defect; this matcher is of no use any more."""


class Rows:
    """Mask rows of one step: a 2-D view of memory that the caller owns, and that must outlive this object.

    `words` is int32 [N, S], S >= W, C-contiguous and writable. Row i begins at `address(i)`. A backend may keep its own
    handles over the same memory in `handle` (tensors for xgrammar), so that nothing is built per row.
    """

    __slots__ = ("_base", "_stride", "handle", "words")

    def __init__(self, words: NDArray[np.int32]) -> None:
        if words.dtype != np.int32 or words.ndim != 2 or not words.flags.c_contiguous or not words.flags.writeable:
            raise ValueError("words: must be int32 [N, S], C-contiguous and writable")
        self.words = words
        self._base = words.ctypes.data
        self._stride = words.strides[0]
        self.handle: Any = None

    def address(self, index: int) -> int:
        """Return the address of row `index`."""
        return self._base + index * self._stride

    def __repr__(self) -> str:
        return f"<Rows {self.words.shape[0]} x {self.words.shape[1]} words>"


class Matcher(Protocol):
    """The state of one answer. One thread at a time."""

    @property
    def terminated(self) -> bool:
        """A stop token was accepted: no token may follow, and `fill` must not be called."""
        ...

    def accept(self, token: int) -> bool:
        """Move over `token`. False when it is illegal: the state is as before. Raises MatcherFailed."""
        ...

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens, stop tokens included. Raises MatcherFailed."""
        ...

    def copy(self) -> Matcher:
        """Return a matcher in the same state that moves by itself: a failure of one is none of the other."""
        ...

    def fill(self, rows: Rows, index: int) -> None:
        """Write the mask of the next token into row `index`: W words, bits beyond the vocabulary are 0.

        A stop token is legal exactly when the answer is complete; no other special token ever is. Raises MatcherFailed.
        """
        ...

    def forced(self, limit: int) -> tuple[int, ...]:
        """Return at most `limit` tokens of the text that alone may follow; stays where it is. Raises MatcherFailed.

        The text is forced, its spelling in tokens is likely: tokens whose end what follows might change are left out.
        Not after the answer's end.
        """
        ...

    def certain_bytes(self) -> int:
        """Return how many bytes can only go one way from here, if the row costs in proportion to them; else 0.

        May take as long as two rows, and holds the GIL: for processes that compile.
        """
        ...


class Chain(NamedTuple):
    """Rows of one matcher that are wanted together."""

    matcher: Any
    """One of the filler's own library, where the first row is wanted."""
    row: int
    """Where that is written; the others follow it."""
    drafts: list[int]
    """What lies between the rows; plain tokens."""


class Filled(NamedTuple):
    """Per chain."""

    stands: list[int]
    """How many of its drafts the matcher now stands behind; -1: it is of no use any more."""
    accepting: list[bool]
    """The answer is complete at the first row. A library that leaves stop tokens to nobody else may say False."""


class ChainFiller(Protocol):
    """Rows of many matchers in one call, on threads of its own and without the GIL. One for all matchers of a backend.

    Rows come as the library writes them: what `special` says is still to be done with them.
    """

    special: SpecialWords
    along: bool
    """Chains of drafts pay, too: else only rows without a draft behind them are asked for."""

    def plain(self, tokens: Sequence[int]) -> bool:
        """Say whether no token is special, a stop token, or out of range."""
        ...

    def accept(self, matcher: Any, tokens: Sequence[int]) -> int:
        """Move over plain tokens up to the first illegal one; return how many. Raises MatcherFailed."""
        ...

    def fill(self, chains: Sequence[Chain], rows: NDArray[np.int32], threads: int) -> Filled:
        """Write rows of int32 [N, W] up to the first draft that is illegal; rows behind that stay as they were.

        Several threads may call it with different matchers. Raises nothing that a matcher raises.
        """
        ...


def filler_of(matcher: Matcher) -> ChainFiller | None:
    """Return what fills rows of this matcher together with others', if its backend has such a thing."""
    found: ChainFiller | None = getattr(matcher, "filler", None)
    return found


class Compiled(Protocol):
    """A grammar ready for use. Immutable: any number of matchers, from any thread."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What of the grammar is not enforced, one line each. Empty unless `allow_unenforced` was set."""
        ...

    @property
    def memory_bytes(self) -> int:
        """What it holds, an estimate."""
        ...

    def matcher(self) -> Matcher:
        """Return a matcher at the start of an answer."""
        ...


class Backend(Protocol):
    """A library with a vocabulary."""

    @property
    def name(self) -> str:
        """One of NAMES."""
        ...

    def compile(self, grammar: Grammar, *, allow_unenforced: bool = False) -> bytes:
        """Compile and return the artifact. May run long, may need much memory: call it in a process that can be killed.

        A part that would not be enforced is NotEnforced; with `allow_unenforced` it is left out, and `load` returns it
        among the warnings. Raises InvalidGrammar (wrong), NotEnforced, LimitExceeded, NotSupported.
        """
        ...

    def load(self, grammar: Grammar, artifact: bytes) -> Compiled:
        """Return the compiled form of what `compile` made of `grammar`, in another process with the same vocabulary."""
        ...


def installed(name: str) -> bool:
    """Return whether the library of a backend is there. Imports nothing."""
    needed = ("xgrammar", "torch") if name == "xgrammar" else (name,)
    return all(importlib.util.find_spec(module) is not None for module in needed)


def installed_version(name: str) -> str:
    """Return the version of an installed library."""
    return version(name)


def import_library(name: str) -> None:
    """Import what a backend needs, without a vocabulary. Does nothing for one that is not installed."""
    if installed(name):
        importlib.import_module(f"grammar_service.backends.{name}")


def load_backend(name: str, vocabulary: Vocabulary) -> Backend:
    """Import the library `name` and give it the vocabulary.

    Raises NotSupported (not one of NAMES, or not installed), InvalidField (it cannot read the tokenizer).
    """
    if name not in NAMES:
        raise NotSupported(f"backend {name!r} is unknown; there are {', '.join(NAMES)}")
    if not installed(name):
        raise NotSupported(f"backend {name} is not installed in this sidecar")
    if name == "llguidance":
        from grammar_service.backends.llguidance.backend import LlguidanceBackend

        return LlguidanceBackend(vocabulary)
    from grammar_service.backends.xgrammar.backend import XgrammarBackend

    return XgrammarBackend(vocabulary)
