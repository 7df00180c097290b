"""Planes of the step plane, whose workers end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from shared_mem.layout import Layout
from shared_mem.segment import Segment
from tests.grammar_service.fill.plane import PATIENCE_S, Plane
from tests.grammar_service.toy import VOCAB

MakePlane = Callable[..., Plane]


@pytest.fixture
def make_plane() -> Iterator[MakePlane]:
    """Return a function that makes a plane; `start`: with a worker that runs."""
    with ExitStack() as stack:

        def make(*, num_slots: int = 3, num_recs: int = 4, start: bool = True, **options: object) -> Plane:
            layout = Layout(num_slots=num_slots, num_rows=3, vocab_size=VOCAB, num_recs=num_recs)
            plane = Plane(stack.enter_context(Segment.create(layout)), **options)  # type: ignore[arg-type]
            if start:
                plane.worker.start()
            planes.append(plane)
            return plane

        planes: list[Plane] = []
        yield make
        for plane in planes:
            assert plane.worker.stop(PATIENCE_S)


@pytest.fixture
def plane(make_plane: MakePlane) -> Plane:
    return make_plane()
