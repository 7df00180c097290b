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

COPY = "copy"
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles here; tests/gpu has the same")
FREE = 2
"""The slot without a grammar."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "launches",
    ["graph", pytest.param("eager", marks=[pytest.mark.slow]), pytest.param("Triton's", marks=[interpreted])],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy
def test_tokens_follow_the_grammar_whatever_lanes_share_a_step(mode: str, launches: str) -> None:
    eager, triton = launches == "eager", launches == "Triton's"
    if triton:
        pytest.importorskip("triton")
    with toys(mode, eager=eager, triton=triton) as t:
        t.graphs.capture(t.channel)
        with sidecar_of(t) as sidecar:
            gens, emitted = dict.fromkeys(range(SLOTS), 1), {slot: list[int]() for slot in range(SLOTS)}

            def step(slots: list[int]) -> None:
                outputs = t.graphs.read(t.start([Lane(slot, gens[slot], slot != FREE) for slot in slots]))
                assert outputs.slots == [*slots, *[-1] * (len(slots) == 3)], "three are padded to four"
                for slot, tokens in tokens_of(outputs).items():
                    emitted[slot] += tokens

            def check() -> None:
                for slot, tokens in emitted.items():
                    legal = Automaton(1500).legal if slot != FREE else lambda _: frozenset(range(256))
                    assert tokens == expected(legal, slot, len(tokens))

            for slot in set(range(SLOTS)) - {FREE}:
                open_slot(t, sidecar, slot)
            t.assign_slot(FREE)
            for slots in ([0], [1, 0], [3, 1, 0, 2], [2], [2, 3, 0], [0, 1, 2, 3], [3, 2, 1], [3, 2, 1]):
                step(slots)
            check()
            # Masked drafts are drawn by the verifier's rule, so all steps but a sequence's first accept every draft.
            assert [len(emitted[slot]) for slot in (0, 1, 3)] == [1 + 4 * ROWS, 1 + 4 * ROWS, 1 + 4 * ROWS]
            for slot in (0, 3):
                gens[slot], emitted[slot] = 2, []
                open_slot(t, sidecar, slot, gen=2)
            for _ in range(6):
                step([0, 3])
            check()
            assert len(emitted[0]) == len(emitted[3]) == 1 + 5 * ROWS
            stats = t.graphs.stats
            assert (stats.eager_steps > 0, stats.replays > 0, stats.padded_lanes) == (eager, not eager, 3)
            verified = [record for record in sidecar.records if record.stage == 0]
            assert FREE not in {record.slot for record in verified}
            cached = [record.need_rows for record in verified if record.drafts]
            assert set(cached) == {1 << ROWS - 1}, "rows of the draft steps are cached for the next verify step"


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
def test_a_launch_is_one_copy_in_a_replay_and_one_copy_out_of_a_free_place(mode: str) -> None:
    with toys(mode, buckets=(1, 2)) as t:
        t.graphs.capture()
        t.stream.eager.clear()
        for lanes in ([0], [2, 0]):
            t.graphs.read(t.start([Lane(slot, 1, False) for slot in lanes]))
        assert t.stream.eager == [COPY, COPY] * 2
        lane = Lane(0, 1, False)
        unread = [t.start([lane]) for _ in range(3)]
        with pytest.raises(RuntimeError, match="not read"):
            t.start([lane])
        assert [t.graphs.read(launched).seq for launched in unread] == [0, 0, 0]
        with pytest.raises(ValueError, match="3 lanes does not fit: there are 1 to 2"):
            t.start([lane] * 3)
        with pytest.raises(ValueError, match="does not fit"):
            t.start([])
        t.start([lane])
        ran = t.stream.ran
        t.graphs.close()
        assert t.stream.ran > ran, "it waits for the step"
        assert not t.graphs._graphs


@pytest.mark.parametrize("mode", MODES)
def test_capture_sets_the_permissive_word_and_changes_no_slot(mode: str) -> None:
    with toys(mode) as t:
        t.sync.reserve((1, 2, 4))
        t.assign_slot(0)
        seen, buffers = set(), dict(t.sync._posts)
        t.stream.before = lambda node: seen.add(t.channel.permissive)
        t.graphs.capture(t.channel)
        assert seen == {True}
        assert not t.channel.permissive
        assert t.channel.last_seq == 0, "padded lanes post no record"
        assert t.step.slot.length_S.tolist()[:SLOTS] == [3, 0, 0, 0]
        assert t.sync._posts == buffers, "the warm-up has allocated them"


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
