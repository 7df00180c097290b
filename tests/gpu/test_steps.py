"""Whole steps as CUDA graphs with toy grammar processes: with both mechanisms no row is ever stale."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch

from shared_mem.layout import RowKind
from tests.gpu.toys_on_gpu import BIG_VOCAB, toys_on_gpu
from tests.gpu_engine.device.bench_of_toys import MODES, ROWS, Lane, open_slot, pattern_peer, sidecar_of, tokens_of
from tests.gpu_engine.device.toy_step import expected
from tests.gpu_engine.toy_sidecar import Automaton

NEVER_PARKS_US = 1e6
"""Microseconds that the peer of the device's flags spins: a GPU cannot wake a process that sleeps on a futex."""

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("mode", MODES)]


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_guided_tokens_follow_the_grammar(mode: str, eager: bool) -> None:
    with toys_on_gpu(mode, eager=eager) as t:
        t.graphs.capture(t.channel)
        with sidecar_of(t) as sidecar:
            for slot in range(3):
                open_slot(t, sidecar, slot)
            emitted: dict[int, list[int]] = {slot: [] for slot in range(3)}
            steps = 100
            for _ in range(steps):
                for slot, tokens in tokens_of(t.launch([2, 0, 1])).items():
                    emitted[slot] += tokens
            for slot, tokens in emitted.items():
                assert tokens == expected(Automaton(1500).legal, slot, 1 + (steps - 1) * ROWS)
            assert (t.graphs.stats.eager_steps > 0, t.graphs.stats.replays > 0) == (eager, not eager)


def test_launching_ahead_changes_no_token(mode: str) -> None:
    with toys_on_gpu(mode) as t:
        t.graphs.capture(t.channel)
        with sidecar_of(t) as sidecar:
            open_slot(t, sidecar, 0)
            emitted: list[int] = []
            in_flight = t.start([Lane(0, 1, True)])
            for _ in range(100):
                following = t.start([Lane(0, 1, True)])
                emitted += tokens_of(t.graphs.read(in_flight))[0]
                in_flight = following
            emitted += tokens_of(t.graphs.read(in_flight))[0]
            assert emitted == expected(Automaton(1500).legal, 0, len(emitted))


@pytest.mark.slow
def test_no_row_of_a_hundred_thousand_replays_is_stale_torn_or_lost(mode: str, tmp_path: Path) -> None:
    replays = 100_000
    with toys_on_gpu(mode, vocab=BIG_VOCAB) as t, pattern_peer(t, tmp_path, NEVER_PARKS_US):
        step = t.count_patterns()
        t.graphs.capture(t.channel)
        lanes = [Lane(slot, 1, True) for slot in (3, 0, 2)]
        in_flight = t.start(lanes)
        for count in range(1, replays):
            following = t.start(lanes)
            assert t.graphs.read(in_flight).seq == count
            in_flight = following
        assert t.graphs.read(in_flight).seq == replays
        assert (step.wrong, step.missing) == (0, 0)


def test_replays_end_within_the_deadline_after_the_peer_is_killed(mode: str, tmp_path: Path) -> None:
    deadline_ms = 50.0
    with toys_on_gpu(mode, row_timeout_ms=deadline_ms) as t, pattern_peer(t, tmp_path, NEVER_PARKS_US) as peer:
        step = t.count_patterns()
        t.graphs.capture(t.channel)
        lanes = [Lane(0, 1, True), Lane(1, 1, True)]
        for _ in range(200):
            t.graphs.read(t.start(lanes))
        in_flight = t.start(lanes)
        peer.send_signal(signal.SIGKILL)
        for _ in range(5):
            following = t.start(lanes)
            t.graphs.read(in_flight)
            in_flight = following
        t.graphs.read(in_flight)
        assert step.wrong == 0
        assert t.step.lane.kinds_BR[:2].eq(int(RowKind.DEFER)).all()


def test_abort_word_ends_a_wait_at_once(mode: str) -> None:
    with toys_on_gpu(mode) as t:
        t.graphs.capture(t.channel)
        t.assign_slot(0)
        launched = t.start([Lane(0, 1, True)])
        time.sleep(0.05)
        assert not t.graphs.ready(launched)
        t.channel.set_abort()
        begin_s = time.monotonic()
        assert t.graphs.read(launched).blocked[0] == RowKind.DEFER
        assert time.monotonic() - begin_s < 15, "the deadline is 20 s"
        t.channel.clear_abort()


def test_launches_after_the_capture_allocate_nothing(mode: str) -> None:
    with toys_on_gpu(mode) as t:
        t.graphs.capture(t.channel)
        with sidecar_of(t) as sidecar:
            for slot in range(2):
                open_slot(t, sidecar, slot)
            t.launch([0, 1])
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            for lanes in ([0, 1], [1], [0]):
                t.launch(lanes)
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
