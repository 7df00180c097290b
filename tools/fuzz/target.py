"""What a target of the fuzzer is: a function over bytes that returns, or shows a defect by raising.

Invariant: `run` swallows the typed errors with which the code under test answers wrong input. Whatever it raises is a
defect: an exception outside the one error tree, an InternalError, or Broken for a property that does not hold. The
same bytes give the same result, whatever was run before.

Not responsible for: hangs, memory and native crashes (see child.py), and where inputs come from (see corpus.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

Mutate = Callable[[bytes, Random], bytes]
"""Returns another input, made from one."""


class Broken(AssertionError):
    """A property of the code under test does not hold for the input."""


def require(condition: object, problem: str) -> None:
    """Raise Broken with the problem unless the condition holds."""
    if not condition:
        raise Broken(problem)


@dataclass(frozen=True, slots=True)
class Target:
    """One entry point of the fuzzer."""

    run: Callable[[bytes], None]
    mutate: Mutate
    """Keeps the structure of most inputs, which bytes changed at random would lose."""
    words: tuple[str, ...] = ()
    """Texts that mean something to the code under test."""
    max_bytes: int = 6000
    """Longest input."""
    timeout_s: int = 20
    """An input that takes longer is a hang."""
    memory_mb: int = 2048
    """More resident memory than this, of the whole process, is a defect."""
    close: Callable[[], None] = lambda: None
    """Frees what the target holds; called once, after its last input."""
