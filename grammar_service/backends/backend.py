"""The protocols between the sidecar and a matcher library: Backend, Compiled, Matcher and ChainFiller.

A grammar has three forms:

    Grammar (text)  --compile-->  artifact (bytes)  --load-->  Compiled  --matcher-->  Matcher

`compile` runs in a worker process that can be killed. `load` runs in the sidecar; its result is immutable and shared.
A matcher belongs to one slot and moves with the slot's tokens.

Invariant: a part of a grammar that the library would not enforce is an error of `compile`. If the caller allows such
parts, each of them travels inside the artifact as a warning. Every implementation passes the same conformance tests.
Not responsible for: choosing and importing an implementation (see registry.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from grammar_service.grammar.value import Grammar
from shared_mem.chains import SpecialWords


class MatcherFailed(Exception):
    """The library reached one of its limits or a defect. This matcher must not be used again."""


class Rows:
    """The mask rows of one step: a 2-D view of the caller's memory, which must outlive this object.

    `words` is int32 [N, S] with S >= W words, C-contiguous and writable. Row i begins at `address(i)`. A backend may
    use `handle` to cache its own objects over the same memory (xgrammar: tensors), instead of building one per row.
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
    """The state of one answer. Only one thread at a time may use a matcher."""

    @property
    def terminated(self) -> bool:
        """Whether a stop token was accepted. Then no token may follow, and `fill` must not be called."""
        ...

    def accept(self, token: int) -> bool:
        """Advance over `token` and return True. Return False, without a change, if the token is illegal.

        Raises MatcherFailed.
        """
        ...

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens; stop tokens count too. Raises MatcherFailed."""
        ...

    def copy(self) -> Matcher:
        """Return an independent matcher in the same state. A failure of one does not affect the other."""
        ...

    def fill(self, rows: Rows, index: int) -> None:
        """Write the mask of the next token into row `index`: W words, whose bits beyond the vocabulary are 0.

        A stop token is legal exactly when the answer is complete. No other special token is ever legal.
        Raises MatcherFailed.
        """
        ...

    def jump_forward_tokens(self, limit: int) -> tuple[int, ...]:
        """Return at most `limit` tokens of the only text that may follow. The matcher does not move.

        The text is certain, its tokenisation is likely: tokens at the end that later text might change are left out.
        Must not be called after the end of the answer. Raises MatcherFailed.
        """
        ...

    def num_jump_forward_bytes(self) -> int:
        """Return the length of the only text that may follow, if the cost of a row grows with it; else return 0.

        The call may take as long as two rows and holds the GIL, so only processes that compile may make it.
        """
        ...


class Filled(NamedTuple):
    """The result of `ChainFiller.fill`."""

    failed: list[int]
    """Numbers of the chains whose matcher failed and must not be used."""
    accepting: list[int]
    """Numbers of the chains whose answer is complete at the first row. Only chains count whose first row has a stop
    token that `special` would clear."""


class ChainFiller(Protocol):
    """Moves many matchers and fills their rows in few calls. One for each backend.

    A chain is consecutive mask rows of one matcher: the row at its state, and one row after each draft. Rows come as
    the library writes them. The caller must then apply `special` to them.
    """

    special: SpecialWords
    threaded: bool
    """Whether `fill` spreads its chains over threads of the library. If not, several threads should call it at once."""
    plain: NDArray[np.uint8]
    """[V] 1 for each token that is neither special nor a stop token."""

    def may_follow(self, matcher: Any, tokens: Sequence[int]) -> bool:
        """Return whether the matcher would accept all of `tokens`. Only the last may be a stop token.

        The matcher does not move. Raises MatcherFailed.
        """
        ...

    def accept_each(self, matchers: Sequence[Any], tokens: Sequence[list[int]]) -> list[int]:
        """Advance each matcher over its own plain tokens, as `accept` does. Return how many; -1 if the matcher failed.

        Raises nothing of the library's.
        """
        ...

    def fill(
        self, matchers: Sequence[Any], drafts: Sequence[list[int]], rows: NDArray[np.int32], stride: int, threads: int
    ) -> Filled:
        """Write the rows of each chain, up to its first illegal draft; afterwards each matcher is where it was.

        Row 0 of chain i is row i * stride of `rows`, int32 [N, W]. The row after an illegal draft is unchanged or
        empty, later rows do not change. Every draft is a plain token. Most of the work releases the GIL, on `threads`
        threads where the library has them. Several threads may call `fill` at once with different matchers. A failed
        matcher raises nothing; see `Filled`.
        """
        ...


def chain_filler_of(matcher: Matcher) -> ChainFiller | None:
    """Return the chain filler of the matcher's backend, or None for a backend without one."""
    found: ChainFiller | None = getattr(matcher, "filler", None)
    return found


class Compiled(Protocol):
    """A grammar that is ready for use. It is immutable: any thread may make any number of matchers from it."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the caller should know about the grammar, one line each: parts that are not enforced, likely typos."""
        ...

    @property
    def memory_bytes(self) -> int:
        """An estimate of the memory that it holds."""
        ...

    def matcher(self) -> Matcher:
        """Return a matcher at the start of an answer."""
        ...


@runtime_checkable
class Spelled(Protocol):
    """A grammar whose masks allow only the library's own tokens of a text that is the only one to follow."""

    def spelled_freely(self) -> Compiled:
        """Return the grammar with masks that allow every spelling of a text. The first call may compile it again."""
        ...


def spelled_freely(compiled: Compiled) -> Compiled:
    """Return a grammar whose masks allow every spelling of a text in tokens."""
    return compiled.spelled_freely() if isinstance(compiled, Spelled) else compiled


class Backend(Protocol):
    """A matcher library with a vocabulary."""

    @property
    def name(self) -> str:
        """One of `registry.NAMES`."""
        ...

    def compile(self, grammar: Grammar, *, allow_unenforced: bool = False) -> bytes:
        """Compile and return the artifact. May take long and much memory: call it in a process that can be killed.

        A part that would not be enforced raises NotEnforced. With `allow_unenforced` the part is left out instead, and
        `load` returns it among the warnings. Raises InvalidGrammar, NotEnforced, LimitExceeded, NotSupported.
        """
        ...

    def load(self, grammar: Grammar, artifact: bytes) -> Compiled:
        """Return the compiled form of an artifact that `compile` made of `grammar` with the same vocabulary."""
        ...
