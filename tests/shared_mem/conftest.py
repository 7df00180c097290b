"""Segments for the tests of one process, and a peer process for the others. Invariant: nothing outlives its test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared_mem.channel import EngineEnd, GrammarEnd
from shared_mem.layout import Layout
from shared_mem.segment import Segment

PEER = Path(__file__).with_name("peer.py")

StartPeer = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def layout() -> Layout:
    return Layout(num_slots=4, num_rows=3, vocab_size=1000, generation=7)


@pytest.fixture
def segment(layout: Layout) -> Iterator[Segment]:
    with Segment.create(layout) as created:
        yield created


@pytest.fixture
def ends(segment: Segment) -> Iterator[tuple[EngineEnd, GrammarEnd]]:
    """Both roles in this process, over two mappings of one segment, as two processes would have them."""
    with Segment.attach(os.dup(segment.fileno())) as attached:
        yield EngineEnd(segment), GrammarEnd(attached)


@pytest.fixture
def start_peer() -> Iterator[StartPeer]:
    """Return a function that starts `peer.py` with arguments; the test's end kills and reaps the process."""
    running: list[subprocess.Popen[str]] = []

    def start(*arguments: object) -> subprocess.Popen[str]:
        root = str(PEER.parents[2])
        process = subprocess.Popen(
            [sys.executable, str(PEER), *map(str, arguments)],
            cwd=root,
            env={**os.environ, "PYTHONPATH": root},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()
