"""Graphs of whole steps over the recorded stream, with the native flags and a toy grammar process."""

from __future__ import annotations

import pytest
import torch

from gpu_engine.step.buffers import StepBatch
from gpu_engine.step.device.graphs import StepRows, lane_buckets
from tests.gpu_engine.device.bench_of_toys import (
    MODES,
    ROWS,
    SLOTS,
    Lane,
    OpaqueLaunches,
    open_slot,
    sidecar_of,
    tokens_of,
    toys,
)
from tests.gpu_engine.device.fake_flags import FakeFlags
from tests.gpu_engine.device.toy_step import expected
from tests.gpu_engine.toy_sidecar import Automaton

KERNEL, COPY, HOST = "kernel", "copy", "host"
PAIR = {
    # pack, in, post, await, out, fetch, cache_rows
    "host_callback": [KERNEL, COPY, HOST, HOST, COPY, KERNEL, KERNEL],
    # pack, post, wait, cache_rows
    "device_flag": [KERNEL] * 4,
}


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_has_the_nodes_of_its_mechanism(mode: str) -> None:
    with toys(mode) as t:
        t.graphs.capture(t.channel)
        guided = t.graphs.captured[2, ROWS, True].kinds
        unguided = t.graphs.captured[2, ROWS, False].kinds
    # load, post and wait, accept, advance, K times (post and wait, draw), propose, pack.
    pair = PAIR[mode]
    assert guided == [KERNEL, *pair, KERNEL, KERNEL, *(ROWS - 1) * [*pair, KERNEL], KERNEL, KERNEL]
    assert set(unguided) == {KERNEL}, "an unguided step has no post and no wait"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_guided_tokens_follow_the_grammar_and_drafts_are_accepted(mode: str, eager: bool) -> None:
    with toys(mode, eager=eager) as t:
        t.graphs.capture(t.channel)
        with sidecar_of(t) as sidecar:
            for slot in range(3):
                open_slot(t, sidecar, slot)
            emitted: dict[int, list[int]] = {slot: [] for slot in range(3)}
            # Masked drafts are drawn by the verifier's rule, so all steps but the first accept every draft.
            steps = 60 // ROWS + 1
            for _ in range(steps):
                outputs = t.launch([2, 0, 1])
                assert outputs.slots_B.tolist() == [2, 0, 1, -1], "three lanes are padded to four"
                for slot, tokens in tokens_of(outputs).items():
                    emitted[slot] += tokens
            for slot, tokens in emitted.items():
                assert tokens == expected(Automaton(1500).legal, slot, 1 + (steps - 1) * ROWS)
            stats = t.graphs.stats
            assert (stats.eager_steps > 0, stats.replays > 0) == (eager, not eager)
            assert stats.padded_lanes == steps
            requested = [record.need_rows for record in sidecar.records if record.stage == 0]
            assert set(requested[3:]) == {1 << ROWS - 1}, "rows of the draft steps are cached for the next verify step"


@pytest.mark.parametrize("mode", MODES)
def test_lanes_may_change_slots_buckets_and_generations(mode: str) -> None:
    with toys(mode) as t:
        t.graphs.capture(t.channel)
        with sidecar_of(t) as sidecar:
            gens = dict.fromkeys(range(SLOTS), 1)
            emitted: dict[int, list[int]] = {slot: [] for slot in range(SLOTS)}
            for slot in range(SLOTS):
                open_slot(t, sidecar, slot)
            for lanes in ([0], [1, 0], [3, 1, 0, 2], [2], [2, 3, 0], [0, 1, 2, 3]):
                launched = t.start([Lane(slot, gens[slot], True) for slot in lanes])
                for slot, tokens in tokens_of(t.graphs.read(launched)).items():
                    emitted[slot] += tokens
            for slot in (0, 3):
                gens[slot] = 2
                emitted[slot] = []
                open_slot(t, sidecar, slot, gen=2)
            for _ in range(6):
                launched = t.start([Lane(slot, gens[slot], True) for slot in (0, 3)])
                for slot, tokens in tokens_of(t.graphs.read(launched)).items():
                    emitted[slot] += tokens
            for slot, tokens in emitted.items():
                assert tokens == expected(Automaton(1500).legal, slot, len(tokens))


@pytest.mark.parametrize("mode", MODES)
def test_guided_and_unguided_lanes_share_a_step(mode: str) -> None:
    with toys(mode) as t:
        t.graphs.capture(t.channel)
        with sidecar_of(t) as sidecar:
            open_slot(t, sidecar, 1)
            t.assign_slot(2)
            emitted: dict[int, list[int]] = {1: [], 2: []}
            for _ in range(8):
                launched = t.start([Lane(2, 1, False), Lane(1, 1, True)])
                for slot, tokens in tokens_of(t.graphs.read(launched)).items():
                    emitted[slot] += tokens
            assert emitted[1] == expected(Automaton(1500).legal, 1, len(emitted[1]))
            assert emitted[2] == expected(lambda _: frozenset(range(256)), 2, len(emitted[2]))
            assert {record.slot for record in sidecar.records} == {1}


def test_launch_does_not_wait_and_outputs_are_read_one_step_later() -> None:
    with toys("host_callback") as t:
        t.graphs.capture(t.channel)
        with sidecar_of(t) as sidecar:
            open_slot(t, sidecar, 0)
            emitted: list[int] = []
            in_flight = t.start([Lane(0, 1, True)])
            for _ in range(20):
                following = t.start([Lane(0, 1, True)])
                emitted += tokens_of(t.graphs.read(in_flight))[0]
                in_flight = following
            emitted += tokens_of(t.graphs.read(in_flight))[0]
            assert emitted == expected(Automaton(1500).legal, 0, len(emitted))


@pytest.mark.parametrize("mode", MODES)
def test_a_launch_is_one_copy_in_a_replay_and_one_copy_out(mode: str) -> None:
    with toys(mode) as t:
        t.graphs.capture()
        t.stream.eager.clear()
        for lanes in ([0], [2, 0, 1]):
            t.graphs.read(t.start([Lane(slot, 1, False) for slot in lanes]))
        assert t.stream.eager == [COPY, COPY] * 2


def test_unread_outputs_are_not_overwritten() -> None:
    with toys("host_callback") as t:
        t.graphs.capture()
        lanes = [Lane(0, 1, False)]
        unread = [t.start(lanes) for _ in range(3)]
        with pytest.raises(RuntimeError, match="not read"):
            t.start(lanes)
        assert [t.graphs.read(launched).seq for launched in unread] == [0, 0, 0]


def test_a_step_that_fits_no_graph_is_rejected() -> None:
    with toys("host_callback", buckets=(1, 2)) as t:
        t.graphs.capture()
        lanes = [Lane(slot, 1, False) for slot in range(3)]
        with pytest.raises(ValueError, match="3 lanes does not fit: there are 1 to 2"):
            t.start(lanes)
        with pytest.raises(ValueError, match="does not fit"):
            t.start([])


def test_capture_sets_the_permissive_word_and_changes_no_slot() -> None:
    with toys("device_flag") as t:
        t.assign_slot(0)
        seen = set()
        t.stream.before = lambda node: seen.add(t.channel.permissive)
        t.graphs.capture(t.channel)
        assert seen == {True}
        assert not t.channel.permissive
        assert t.channel.last_seq == 0, "padded lanes post no record"
        assert t.step.slot.length_S.tolist()[:SLOTS] == [3, 0, 0, 0]


@pytest.mark.parametrize(
    ("max_lanes", "sizes"),
    [(1, (1,)), (3, (1, 2, 3)), (16, (1, 2, 4, 8, 12, 16)), (40, (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40))],
)
def test_buckets_of_a_number_of_lanes(max_lanes: int, sizes: tuple[int, ...]) -> None:
    assert lane_buckets(max_lanes) == sizes
    assert lane_buckets(256)[-3:] == (192, 224, 256)


def test_rows_of_a_bucket() -> None:
    rows = StepRows(drafter_rows=8, max_rows=16, max_guided_rows=64)
    assert [rows.of(bucket, True) for bucket in (1, 2, 4, 5, 8, 256)] == [16, 16, 16, 8, 8, 8]
    assert {rows.of(bucket, False) for bucket in (1, 4, 8)} == {8}, "an unguided step has no jump-forward tokens"
    rows = StepRows(drafter_rows=8, max_rows=16, max_step_rows=256, max_guided_rows=64)
    assert [rows.of(bucket, True) for bucket in (1, 4, 8, 32, 48, 64, 128, 256)] == [16, 16, 8, 8, 5, 4, 2, 2]
    assert [StepRows(drafter_rows=1, max_rows=1, max_step_rows=256).of(bucket, True) for bucket in (1, 256)] == [1, 1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles here; tests/gpu has the same on the device")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy
def test_triton_kernels_post_and_cache_the_same_rows(mode: str) -> None:
    pytest.importorskip("triton")
    with toys(mode, triton=True, buckets=(2, 4)) as t:
        t.graphs.capture(t.channel)
        with sidecar_of(t) as sidecar:
            emitted: dict[int, list[int]] = {1: [], 2: [], 3: []}
            open_slot(t, sidecar, 1)
            open_slot(t, sidecar, 3)
            t.assign_slot(2)
            lanes = [Lane(3, 1, True), Lane(2, 1, False), Lane(1, 1, True)]
            for count in range(9):
                launched = t.start(lanes if count < 6 else lanes[::2])
                for slot, tokens in tokens_of(t.graphs.read(launched)).items():
                    emitted[slot] += tokens
            for slot in (1, 3):
                assert emitted[slot] == expected(Automaton(1500).legal, slot, 1 + 8 * ROWS)
            assert emitted[2] == expected(lambda _: frozenset(range(256)), 2, len(emitted[2]))
            requested = [record.need_rows for record in sidecar.records if record.stage == 0]
            assert set(requested[2:]) == {1 << ROWS - 1}


@pytest.mark.parametrize(("max_rows", "rows"), [(1, 0b0), (2, 0b1), (ROWS, 0b11), (ROWS + 1, 0b11)])
def test_the_wait_for_a_proposal_reads_one_row_less_than_the_next_step_has(max_rows: int, rows: int) -> None:
    with toys("device_flag", row_timeout_ms=1.0, draft_timeout_ms=1.0) as t:
        flags = t.sync._flags  # type: ignore[union-attr]
        assert isinstance(flags, FakeFlags)
        t.sync.launches = OpaqueLaunches(t.sync.launches)  # type: ignore[assignment]
        batch = StepBatch(t.step.slot, t.step.lane, 4, ROWS, any_guided=True, max_rows=max_rows)
        t.sync.await_rows(batch)
        t.sync.await_jump_forward(batch)
        t.stream.synchronize()
        # An answer to a proposal has no mask row, so one small block a lane reads it.
        assert flags.waits == [((1 << ROWS) - 1, True), (rows, False)]


def test_close_waits_and_destroys_the_graphs() -> None:
    with toys("host_callback") as t:
        t.graphs.capture()
        t.start([Lane(0, 1, False)])
        ran = t.stream.ran
        t.graphs.close()
        assert t.stream.ran > ran
        assert not t.graphs._graphs


def test_capture_allocates_no_post_buffers_after_the_warm_up() -> None:
    with toys("host_callback") as t:
        t.sync.reserve((1, 2, 4))
        buffers = dict(t.sync._posts)
        t.graphs.capture()
        assert t.sync._posts == buffers
