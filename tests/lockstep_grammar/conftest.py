"""A grammar process over the vocabulary of bytes, for the tests of the client and the adapters."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from lockstep_grammar import Grammars, Limits
from tests.fakes import EOS, byte_tokenizer

VOCAB = 258


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    limits = Limits(compile_timeout_s=60.0, compile_memory_mb=256, max_grammar_bytes=4096)
    tokenizer = byte_tokenizer().to_str().encode()
    with Grammars(tokenizer, VOCAB, [EOS], max_matchers=4, max_drafts=3, limits=limits, row_timeout_s=60.0) as made:
        yield made


@contextmanager
def stopped(grammars: Grammars, row_timeout_s: float = 1.0) -> Iterator[None]:
    """Stop the grammar process for the block, in which a row may take `row_timeout_s`."""
    pid, patience_s = grammars.process.pid, grammars.row_timeout_s
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        pass
    grammars.row_timeout_s = row_timeout_s
    try:
        yield
    finally:
        grammars.row_timeout_s = patience_s
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
def stop() -> Callable[..., AbstractContextManager[None]]:
    return stopped
