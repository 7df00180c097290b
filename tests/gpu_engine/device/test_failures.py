"""A captured step when the grammar process, the device or the host fails: the step ends, and no row goes unmasked."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest

from gpu_engine.step.launches import VERIFY
from shared_mem.errors import InvalidField
from shared_mem.layout import RowKind
from tests.gpu_engine.device.bench_of_toys import (
    MODES,
    ROWS,
    SLOTS,
    Lane,
    open_slot,
    pattern_peer,
    sidecar_of,
    tokens_of,
    toys,
)
from tests.gpu_engine.device.recorded_stream import PATIENCE_S, DeviceFailed
from tests.gpu_engine.device.toy_step import expected
from tests.gpu_engine.toy_sidecar import Automaton

SHORT_MS = 20.0
"""A deadline in milliseconds that a test waits for."""


@pytest.mark.parametrize("mode", [pytest.param(MODES[0], marks=pytest.mark.slow), MODES[1]])
@pytest.mark.parametrize("replays", [300, pytest.param(1_500, marks=pytest.mark.slow)], ids=["short", "long"])
def test_no_row_of_thousands_of_replays_is_stale_or_lost(mode: str, replays: int, tmp_path: Path) -> None:
    with toys(mode) as t, pattern_peer(t, tmp_path):
        step = t.count_patterns()
        t.graphs.capture(t.channel)
        lanes = [Lane(slot, 1, True) for slot in (3, 0, 2)]
        in_flight = t.start(lanes)
        seqs = []
        for _ in range(replays):
            following = t.start(lanes)
            seqs.append(t.graphs.read(in_flight).seq)
            in_flight = following
        t.graphs.read(in_flight)
        assert seqs == list(range(1, replays + 1)), "every replay posts with a sequence number of its own"
        assert (step.wrong, step.missing) == (0, 0)


@pytest.mark.parametrize("mode", MODES)
def test_rows_are_deferred_within_the_deadline_after_the_peer_is_killed(mode: str, tmp_path: Path) -> None:
    with toys(mode, row_timeout_ms=SHORT_MS) as t, pattern_peer(t, tmp_path) as peer:
        step = t.count_patterns()
        t.graphs.capture(t.channel)
        lanes = [Lane(0, 1, True), Lane(1, 1, True)]
        for count in range(40):
            launched = t.start(lanes)
            if count == 20:
                peer.send_signal(signal.SIGKILL)
                peer.wait(PATIENCE_S)
            t.graphs.read(launched)
        assert step.wrong == 0
        lost = step.missing // (2 * ROWS)
        assert lost >= 19, "after the kill every row is deferred, and every replay ends"
        assert t.step.lane.kinds_BR[:2].eq(int(RowKind.DEFER)).all()


@pytest.mark.parametrize("mode", MODES)
def test_late_rows_are_deferred_and_used_when_they_arrive(mode: str) -> None:
    gate = threading.Event()
    with toys(mode, row_timeout_ms=SHORT_MS) as t:
        t.graphs.capture(t.channel)
        with sidecar_of(t, before=lambda record: gate.wait(PATIENCE_S) and None) as sidecar:
            open_slot(t, sidecar, 1)
            outputs = t.launch([1])
            assert tokens_of(outputs) == {1: []}, "never unmasked"
            assert outputs.waited_ns + t.sync.waited_ns >= SHORT_MS * 1e6
            assert outputs.blocked[0] == RowKind.DEFER
            assert t.sync.late(outputs.seq, 1, 1) is None
            gate.set()
            deadline_s = time.monotonic() + PATIENCE_S
            while (num_rows := t.sync.late(outputs.seq, 1, 1)) is None:
                assert time.monotonic() < deadline_s
                time.sleep(0.001)
            assert num_rows == 1
            emitted: list[int] = []
            for _ in range(12):
                outputs = t.launch([1])
                emitted += tokens_of(outputs)[1]
            assert emitted == expected(Automaton(1500).legal, 1, len(emitted))
            verifies = [record for record in sidecar.records if record.stage == 0 and record.commit_pos == 0]
            assert len([r for r in verifies if not r.drafts]) == 1, "the late row was not requested again"


@pytest.mark.parametrize("mode", MODES)
def test_abort_word_ends_a_wait_at_once(mode: str) -> None:
    with toys(mode) as t:  # the deadlines are longer than the wait that this test allows
        t.graphs.capture(t.channel)
        t.assign_slot(0)
        begun = threading.Event()
        posted = t.channel.last_seq
        launched = t.start([Lane(0, 1, True)])
        while t.channel.last_seq == posted:
            begun.wait(0.001)
        begin_s = time.monotonic()
        t.channel.set_abort()
        outputs = t.graphs.read(launched)
        assert time.monotonic() - begin_s < 15, "the deadline is 20 s"
        assert outputs.blocked[0] == RowKind.DEFER
        assert t.launch([0]).blocked[0] == RowKind.DEFER, "the next step drains too"
        t.channel.clear_abort()
        with sidecar_of(t) as sidecar:
            open_slot(t, sidecar, 0)
            assert tokens_of(t.launch([0]))[0] == expected(Automaton(1500).legal, 0, 1)


@pytest.mark.parametrize("mode", MODES)
def test_after_a_device_error_no_host_function_runs_and_every_wait_ends(mode: str) -> None:
    with toys(mode) as t:
        t.graphs.capture(t.channel)
        with sidecar_of(t) as sidecar:
            open_slot(t, sidecar, 0)
            t.launch([0])
            posted = t.channel.last_seq
            ran, launched_all = [0], threading.Event()

            def break_early(node: object) -> None:
                ran[0] += 1
                if ran[0] == 5:
                    # A device that is broken refuses the rest of a launch.
                    assert launched_all.wait(20)
                    raise RuntimeError("an illegal memory access was encountered")

            t.stream.before = break_early
            launched = t.start([Lane(0, 1, True)])
            launched_all.set()
            with pytest.raises(DeviceFailed, match="illegal memory access"):
                t.graphs.read(launched)
            assert t.channel.last_seq == posted, "its post was skipped"
            with pytest.raises(DeviceFailed):
                t.start([Lane(0, 1, True)])


@pytest.mark.parametrize("mode", [MODES[0], pytest.param(MODES[1], marks=pytest.mark.slow)])
def test_a_slow_node_delays_and_changes_nothing(mode: str) -> None:
    with toys(mode) as t:
        t.graphs.capture(t.channel)
        count = [0]

        def slow(node: object) -> None:
            count[0] += 1
            if count[0] % 40 == 0:
                time.sleep(0.01)

        with sidecar_of(t) as sidecar:
            open_slot(t, sidecar, 2)
            t.stream.before = slow
            emitted: list[int] = []
            for _ in range(10):
                emitted += tokens_of(t.launch([2]))[2]
            assert emitted == expected(Automaton(1500).legal, 2, len(emitted))


@pytest.mark.parametrize("mode", [MODES[0], pytest.param(MODES[1], marks=pytest.mark.slow)])
def test_late_drafts_are_unmasked_and_verification_still_masks(mode: str) -> None:
    """With a grammar process that is too slow for drafts, the tokens are the same and take more steps."""
    with toys(mode, draft_timeout_ms=0.001) as t:
        t.graphs.capture(t.channel)
        with sidecar_of(t, before=lambda record: time.sleep(0.002 * (record.stage > 0))) as sidecar:
            open_slot(t, sidecar, 0)
            emitted: list[int] = []
            for _ in range(30):
                emitted += tokens_of(t.launch([0]))[0]
            assert len(emitted) >= 30
            assert emitted == expected(Automaton(1500).legal, 0, len(emitted))


def test_an_answer_to_an_earlier_slot_generation_is_ignored() -> None:
    with toys("host_callback", row_timeout_ms=SHORT_MS) as t:
        t.graphs.capture(t.channel)
        with sidecar_of(t) as sidecar:
            sidecar.gen_shift = -1
            open_slot(t, sidecar, 0)
            assert t.launch([0]).blocked[0] == RowKind.DEFER


def test_a_stopped_slot_posts_no_record() -> None:
    with toys("host_callback") as t:
        t.graphs.capture(t.channel)
        t.assign_slot(0)
        t.stream.kernel(t.step.slot.done_S[:1].fill_, True)
        outputs = t.launch([0])
        assert (outputs.seq, t.channel.last_seq) == (0, 0)


@pytest.mark.parametrize("mode", ["host_callback", "device_flag"])
def test_a_refused_record_raises_and_names_its_lane(mode: str) -> None:
    with toys(mode, row_timeout_ms=SHORT_MS) as t:
        t.graphs.capture(t.channel)
        t.assign_slot(0)
        t.stream.kernel(t.step.slot.length_S[:1].fill_, 500)  # more tokens that are not yet posted than a record holds
        assert t.launch([0]).seq == 0
        with pytest.raises(InvalidField, match="lane 0 was refused"):
            t.sync.check(1)


def test_forget_drops_every_row_of_the_slot() -> None:
    with toys("host_callback") as t:
        t.sync.store.cached_SR.fill_(True)
        t.sync.forget(2)
        t.stream.synchronize()
        assert t.sync.store.cached_SR.all(1).tolist() == [slot != 2 for slot in range(SLOTS + 1)]
        assert VERIFY < 0
