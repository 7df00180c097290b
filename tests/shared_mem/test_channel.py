"""The two ends in one process: posts arrive, rows without an answer are DEFER, and sleeping threads are woken."""

from __future__ import annotations

import ctypes
import functools
import resource
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shared_mem.batch import BatchArrays
from shared_mem.channel import EngineEnd, GrammarEnd, Record
from shared_mem.errors import InvalidField, RingOverrun
from shared_mem.layout import Layout, RowKind, Stage, Word
from shared_mem.native import load32
from shared_mem.segment import Segment

Ends = tuple[EngineEnd, GrammarEnd]
Background = Callable[[Callable[[], object]], threading.Thread]
LONG_S = 30.0
"""A time limit in seconds that only a failing test reaches."""


def post_one(engine: EngineEnd, slot: int = 0, slot_gen: int = 1) -> int:
    return engine.post([slot], [slot_gen], [0], [0], [0], np.zeros((1, 6), dtype=np.int32))


def await_into(engine: EngineEnd, seq: int, missing: list[int]) -> None:
    missing.append(engine.await_rows(seq, [0], [1], timeout_s=LONG_S).num_missing)


def wait_for_word(segment: Segment, word: Word) -> None:
    """Return when the other thread has announced that it is about to sleep."""
    deadline = time.monotonic() + LONG_S
    while not load32(segment.address + segment.layout.word_offset(word)):
        assert time.monotonic() < deadline
        time.sleep(0.0005)


@pytest.fixture
def background() -> Iterator[Background]:
    threads: list[threading.Thread] = []

    def start(body: Callable[[], object]) -> threading.Thread:
        threads.append(threading.Thread(target=body))
        threads[-1].start()
        return threads[-1]

    yield start
    for thread in threads:
        thread.join()


def test_records_arrive_as_posted(ends: Ends) -> None:
    engine, grammar = ends
    tokens = [[11, 12, 13, 14, 15, 0], [0, 0, 0, 0, 0, 0], [21, 22, 0, 0, 0, 0]]
    seq = engine.post(
        [2, -1, 0], [5, 0, 6], [100, 0, 0], [3, 0, 1], [2, 0, 1], tokens, Stage.DRAFT + 4, [0b100, 0, 0b1]
    )
    assert seq == 1
    assert grammar.wait(0, LONG_S) == seq
    assert grammar.records(seq) == [
        Record(2, 5, 100, (11, 12, 13), (14, 15), 5, 0b100),
        Record(0, 6, 0, (21,), (22,), 5, 0b1),
    ]
    top = 2**31 - 1
    seq = engine.post([3], [top], [top], [3], [2], [[top, 0, top, 0, top]], 255)
    assert grammar.records(seq) == [Record(3, top, top, (top, 0, top), (0, top), 255, 0xFFFFFFFF)]


def test_answers_arrive_as_published(ends: Ends) -> None:
    engine, grammar = ends
    seq = engine.post([2, -1, 1], [5, 0, 6], [0, 0, 0], [0, 0, 0], [2, 0, 0], np.zeros((3, 6), dtype=np.int32))
    grammar.mask_rows(seq)[2] = 7
    assert grammar.publish(seq, 2, 5, [RowKind.APPLY, RowKind.FORCED, RowKind.ALL], [-1, 42, -1])
    assert grammar.publish(seq, 1, 6, [RowKind.DEAD_END])
    result = engine.await_rows(seq, [2, -1, 1], [5, 0, 6])
    assert result.kinds.tolist() == [
        [RowKind.APPLY, RowKind.FORCED, RowKind.ALL],
        [RowKind.ALL] * 3,
        [RowKind.DEAD_END, RowKind.DEFER, RowKind.DEFER],
    ]
    assert result.forced.tolist() == [[-1, 42, -1], [-1, -1, -1], [-1, -1, -1]]
    assert (result.num_missing, result.waited_ns) == (0, 0)
    following = post_one(engine)
    grammar.mask_rows(following)[2] = 8
    assert (engine.mask_rows(seq)[2] == 7).all(), "consecutive sequences use different buffers"
    assert (engine.mask_rows(following)[2] == 8).all()


def test_a_kind_that_there_is_not_is_an_error_of_its_row(ends: Ends) -> None:
    """The engine has numbers of its own after RowKind."""
    engine, grammar = ends
    seq = post_one(engine)
    grammar.publish(seq, 0, 1, [len(RowKind), 255, RowKind.APPLY])
    answer = engine.await_rows(seq, [0], [1])
    assert answer.kinds[0].tolist() == [RowKind.ERROR, RowKind.ERROR, RowKind.APPLY]


def test_a_batch_without_grammars_is_not_posted_or_awaited(ends: Ends) -> None:
    engine, grammar = ends
    before = post_one(engine)
    for slots in ([], [-1, -1]):
        nothing = [0] * len(slots)
        tokens = np.zeros((len(slots), 6), dtype=np.int32)
        assert engine.post(slots, nothing, nothing, nothing, nothing, tokens) == 0
        assert grammar.wait(0, LONG_S) == before
        result = engine.await_rows(0, slots, nothing, timeout_s=LONG_S)
        assert result.kinds.shape == (len(slots), 3)
        assert (result.kinds == RowKind.ALL).all()
        assert (result.num_missing, result.waited_ns) == (0, 0)
    result = engine.await_rows(0, [0], [1], timeout_s=LONG_S)
    assert (result.kinds == RowKind.DEFER).all(), "a wait without a post returns at once"
    assert result.waited_ns == 0


def test_only_a_slot_without_an_answer_is_deferred(ends: Ends) -> None:
    engine, grammar = ends
    seq = engine.post([0, 1], [1, 1], [0, 0], [0, 0], [0, 0], np.zeros((2, 6), dtype=np.int32))
    grammar.publish(seq, 1, 1, [RowKind.ALL] * 3)
    result = engine.await_rows(seq, [0, 1], [1, 1], timeout_s=0.005)
    assert result.kinds.tolist() == [[RowKind.DEFER] * 3, [RowKind.ALL] * 3]
    assert result.num_missing == 1
    assert result.waited_ns >= 5_000_000
    assert engine.stats()["missing_lanes"] == 1


@pytest.mark.parametrize("spin_ns", [0, 10**9])
def test_waits_end_at_their_timeout_and_deadline(ends: Ends, spin_ns: int) -> None:
    engine, grammar = ends
    assert grammar.wait(0, 0.003, spin_ns=spin_ns) == 0
    engine.spin_ns = spin_ns
    seq = post_one(engine)
    result = engine.await_rows(seq, [0], [1], timeout_s=LONG_S, deadline_ns=time.monotonic_ns() + 3_000_000)
    assert (result.kinds == RowKind.DEFER).all()
    assert engine.await_rows(seq, [0], [1], timeout_s=LONG_S, deadline_ns=1).num_missing == 1


def test_only_the_answer_to_its_own_post_and_generation_counts(ends: Ends) -> None:
    engine, grammar = ends

    def awaited(seq: int, gen: int, timeout_s: float) -> tuple[int, bool]:
        result = engine.await_rows(seq, [0], [gen], timeout_s=timeout_s)
        return result.num_missing, bool((result.kinds == RowKind.DEFER).all())

    first = post_one(engine)
    assert awaited(first, 1, 0) == (1, True)
    grammar.publish(first, 0, 1, [RowKind.ALL] * 3)
    assert awaited(first, 1, 0) == (0, False), "a deferred answer can still be taken later"
    second = post_one(engine)
    assert awaited(second, 1, 0) == (1, True), "an old answer"
    grammar.publish(second, 0, 1, [RowKind.ALL] * 3)
    assert awaited(first, 1, LONG_S) == (1, True), "a newer answer"
    third = post_one(engine, slot_gen=2)
    grammar.publish(third, 0, 1, [RowKind.ALL] * 3)
    assert awaited(third, 2, LONG_S) == (1, True), "an answer to an earlier generation of the slot"


def test_publish_never_replaces_a_newer_answer(ends: Ends) -> None:
    engine, grammar = ends
    first, second = post_one(engine), post_one(engine)
    assert grammar.publish(second, 0, 1, [RowKind.APPLY] * 3)
    assert not grammar.publish(first, 0, 1, [RowKind.ALL] * 3)
    assert not grammar.publish(second, 0, 1, [RowKind.ALL] * 3)
    assert (engine.await_rows(second, [0], [1]).kinds == RowKind.APPLY).all()
    assert grammar.stats()["stale_answers"] == 2


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("slots", {"slots": [4]}),
        ("n_commit", {"n_commit": [4]}),
        ("n_commit", {"n_commit": [-1]}),
        ("n_draft", {"n_draft": [3]}),
        ("n_draft", {"n_draft": [-1]}),
        ("commit_pos", {"commit_pos": [-1]}),
        ("tokens", {"tokens": [[0] * 7]}),
        ("tokens", {"tokens": [0]}),
        ("slot_gens", {"slot_gens": [1, 2]}),
        ("slots", {"slots": [0] * 5}),
    ],
)
def test_the_error_of_an_invalid_post_names_the_field_and_nothing_is_posted(
    ends: Ends, field: str, changed: dict[str, list[int]]
) -> None:
    engine, grammar = ends
    good: dict[str, Any] = {
        "slots": [0],
        "slot_gens": [1],
        "commit_pos": [0],
        "n_commit": [0],
        "n_draft": [0],
        "tokens": [[0] * 6],
    }
    with pytest.raises(InvalidField) as caught:
        engine.post(**{**good, **changed})
    assert caught.value.field == field
    assert grammar.wait(0, 0) == 0


def test_the_error_of_an_invalid_publish_names_the_field(ends: Ends) -> None:
    _, grammar = ends
    with pytest.raises(InvalidField, match=r"^slot: 4 is not in \[0, 4\)"):
        grammar.publish(1, 4, 1, [0])
    with pytest.raises(InvalidField, match=r"^kinds: 4 rows, the segment has 3"):
        grammar.publish(1, 0, 1, [0] * 4)
    with pytest.raises(InvalidField, match="1 values for 2 rows"):
        grammar.publish(1, 0, 1, [0] * 2, [5])


def test_a_full_ring_keeps_the_newest_and_reports_the_rest(ends: Ends) -> None:
    engine, grammar = ends
    newest = [post_one(engine) for _ in range(grammar.layout.num_recs + 1)][-1]
    with pytest.raises(RingOverrun, match="sequence 1 "):
        grammar.records(1)
    with pytest.raises(RingOverrun):
        grammar.records(newest + 1)
    assert [len(grammar.records(seq)) for seq in range(2, newest + 1)] == [1] * grammar.layout.num_recs
    assert grammar.stats()["overruns"] == 2


def test_a_record_that_is_being_overwritten_is_not_read(ends: Ends, segment: Segment, layout: Layout) -> None:
    engine, grammar = ends
    seq = post_one(engine)
    for position in (layout.rec_entry_offset(seq), layout.record_offset(seq, 0)):
        saved = segment.memory[position : position + 8].copy()
        segment.memory[position : position + 8] = 0
        with pytest.raises(RingOverrun):
            grammar.records(seq)
        segment.memory[position : position + 8] = saved
    # The counts and slots of a torn entry must not be used as indices outside the arrays.
    head = layout.rec_entry_offset(seq)
    for position, size in ((head + 8, 4), (head + 16, 2), (layout.record_offset(seq, 0) + 16, 4)):
        saved = segment.memory[position : position + size].copy()
        segment.memory[position : position + size] = 0xFF
        with pytest.raises(RingOverrun):
            grammar.records(seq)
        segment.memory[position : position + size] = saved
    assert len(grammar.records(seq)) == 1


def test_a_record_counts_as_unread_once_it_is_overwritten_without_any_answer(ends: Ends, layout: Layout) -> None:
    engine, grammar = ends
    seq = post_one(engine, slot=0)
    late = engine.post([1], [1], [0], [0], [0], np.zeros((1, 6), dtype=np.int32))
    grammar.publish(late, 1, 1, [], late=True)
    for _ in range(layout.num_recs - 2):
        assert not engine.unread(seq, 0, 1)
        newest = post_one(engine, slot=2)
    assert newest - seq == layout.num_recs - 1
    post_one(engine, slot=2)
    assert engine.unread(seq, 0, 1)
    with pytest.raises(RingOverrun):
        grammar.records(seq)
    # The record was read, so the rest of its answer will come.
    post_one(engine, slot=2)
    assert not engine.unread(late, 1, 1)
    # This record was read just before it was overwritten.
    grammar.publish(seq, 0, 1, [RowKind.ALL] * 3)
    assert not engine.unread(seq, 0, 1)


@pytest.mark.parametrize("spin_ns", [0, int(LONG_S * 1e9)])
def test_abort_ends_a_running_await_and_later_ones(
    ends: Ends, segment: Segment, background: Background, spin_ns: int
) -> None:
    engine, grammar = ends
    engine.spin_ns = spin_ns
    seq = post_one(engine)
    results: list[int] = []
    thread = background(functools.partial(await_into, engine, seq, results))
    if spin_ns == 0:
        wait_for_word(segment, Word.ENGINE_PARKED)
    engine.set_abort()
    thread.join()
    assert results == [1]
    assert engine.aborted
    assert engine.await_rows(seq, [0], [1], timeout_s=LONG_S).num_missing == 1
    grammar.publish(seq, 0, 1, [RowKind.ALL] * 3)
    assert engine.await_rows(seq, [0], [1], timeout_s=LONG_S).num_missing == 0
    engine.clear_abort()
    assert not engine.aborted


def test_rows_of_a_late_answer_are_added_one_by_one(ends: Ends) -> None:
    engine, grammar = ends
    seq = engine.post([1], [4], [0], [1], [2], [[9, 8, 7]])
    assert grammar.publish(seq, 1, 4, [RowKind.APPLY], [-1], late=True)
    result = engine.await_rows(seq, [1], [4], timeout_s=LONG_S)
    assert (result.num_missing, result.num_late) == (0, 1)
    assert result.kinds[0].tolist() == [RowKind.APPLY, RowKind.DEFER, RowKind.DEFER]
    # Rows that have arrived do not change, and a DEFER row adds nothing.
    assert grammar.add_rows(seq, 1, [RowKind.ERROR, RowKind.FORCED, RowKind.DEFER], [3, 6, 3], late=True)
    result = engine.await_rows(seq, [1], [4], timeout_s=LONG_S)
    assert result.num_late == 1
    assert result.kinds[0].tolist() == [RowKind.APPLY, RowKind.FORCED, RowKind.DEFER]
    assert result.forced[0].tolist() == [-1, 6, -1]
    assert grammar.add_rows(seq, 1, [RowKind.DEFER] * 2 + [RowKind.ALL], [-1] * 3, late=False)
    result = engine.await_rows(seq, [1], [4], timeout_s=LONG_S)
    assert result.num_late == 0
    assert result.kinds[0].tolist() == [RowKind.APPLY, RowKind.FORCED, RowKind.ALL]
    newer = engine.post([1], [4], [1], [0], [0], [[0]])
    assert grammar.publish(newer, 1, 4, [RowKind.ALL])
    assert not grammar.add_rows(seq, 1, [RowKind.ALL] * 3, [-1] * 3, late=True)
    assert engine.await_rows(newer, [1], [4], timeout_s=LONG_S).num_late == 0


def test_another_thread_can_read_how_long_the_worker_is_busy(
    ends: Ends, segment: Segment, background: Background
) -> None:
    engine, grammar = ends
    limit_ns = 2_000_000
    assert not grammar.overdue(limit_ns, 0.01)  # the worker has not begun
    engine.post([0], [1], [0], [0], [0], [[0]])
    assert grammar.wait(0, LONG_S, 0) == 1
    assert grammar.overdue(limit_ns, LONG_S)
    begun = time.monotonic_ns()
    grammar.take_over()
    assert grammar.overdue(limit_ns, LONG_S)
    assert time.monotonic_ns() - begun > limit_ns / 2
    assert grammar.wait(1, 0.0, 0) == 1  # the wait returned, so the worker counts as busy from here on
    waiting = background(lambda: grammar.wait(1, LONG_S, 0))
    wait_for_word(segment, Word.GRAMMAR_PARKED)
    assert not grammar.overdue(limit_ns, 0.02)
    an_hour_ns = 3_600_000_000_000
    assert not grammar.overdue(an_hour_ns, 0.01), "the call returns at its timeout"
    post_one(engine)
    waiting.join()


def test_the_watch_of_an_idle_engine_rarely_wakes(ends: Ends, segment: Segment) -> None:
    """The age of the last post outlives a call, so that calls of 50 ms see 100 ms without one."""
    engine, grammar = ends
    limit_ns = 1_000_000
    seq = engine.post([0], [1], [0], [0], [0], [[0]])
    leader = threading.Thread(target=grammar.wait, args=(seq, LONG_S, 0))
    leader.start()
    wait_for_word(segment, Word.GRAMMAR_PARKED)

    def wakes() -> int:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        assert not grammar.overdue(limit_ns, 0.05)
        return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before

    try:
        for _ in range(2):
            wakes()
        assert max(wakes() for _ in range(5)) <= 7, "one look in 10 ms"
    finally:
        engine.post([0], [1], [0], [0], [0], [[0]])
        leader.join()


def test_parked_ends_are_woken_by_a_post_and_by_an_answer(ends: Ends, segment: Segment, background: Background) -> None:
    engine, grammar = ends
    engine.spin_ns = 0
    seen, missing = list[int](), list[int]()
    for _ in range(50):
        thread = background(lambda: seen.append(grammar.wait(engine.last_seq, LONG_S, spin_ns=0)))
        wait_for_word(segment, Word.GRAMMAR_PARKED)
        assert engine.grammar_parked
        seq = post_one(engine)
        thread.join()
        assert seen[-1] == seq
        assert not engine.grammar_parked
        thread = background(functools.partial(await_into, engine, seq, missing))
        wait_for_word(segment, Word.ENGINE_PARKED)
        grammar.publish(seq, 0, 1, [RowKind.ALL] * 3)
        thread.join()
        assert missing.pop() == 0


def test_heartbeats_and_flags_reach_the_other_end(ends: Ends) -> None:
    engine, grammar = ends
    assert engine.heartbeat_age_ns() is None
    assert grammar.heartbeat_age_ns() is None
    engine.heartbeat()
    grammar.wait(0, 0)
    age = engine.heartbeat_age_ns()
    assert age is not None
    assert 0 <= age < LONG_S * 1e9
    assert grammar.heartbeat_age_ns() is not None
    grammar.heartbeat()
    younger = engine.heartbeat_age_ns()
    assert younger is not None
    seen = [grammar.permissive]
    for value in (True, False):
        engine.permissive = value
        seen.append(grammar.permissive)
    assert seen == [False, True, False]


def test_host_calls_need_no_python(ends: Ends) -> None:
    engine, grammar = ends
    arrays, post, wait = engine.host_calls(batch=2, timeout_s=0)
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    run_post, run_wait = call(post.function), call(wait.function)
    run_wait(wait.user_data)
    assert (arrays.kinds == RowKind.ALL).all()
    arrays.slots[0], arrays.slot_gens[0], arrays.n_commit[0], arrays.tokens[0, 0] = 3, 9, 1, 77
    run_wait(wait.user_data)
    assert arrays.kinds.tolist() == [[RowKind.DEFER] * 3, [RowKind.ALL] * 3]
    for expected_seq in (1, 2):
        run_post(post.user_data)
        assert grammar.records(expected_seq) == [Record(3, 9, 0, (77,), (), 0)]
        run_wait(wait.user_data)
        assert arrays.kinds[0].tolist() == [RowKind.DEFER] * 3
        grammar.publish(expected_seq, 3, 9, [RowKind.FORCED] * 3, [5] * 3)
        run_wait(wait.user_data)
        assert arrays.kinds[0].tolist() == [RowKind.FORCED] * 3
        assert arrays.forced[0].tolist() == [5] * 3
    # After a failed post no old answer can be taken for its answer.
    arrays.n_draft[0] = 99
    run_post(post.user_data)
    run_wait(wait.user_data)
    assert arrays.kinds[0].tolist() == [RowKind.DEFER] * 3


def test_arrays_may_be_in_memory_of_the_caller(ends: Ends) -> None:
    engine, grammar = ends
    memory = np.zeros(BatchArrays.nbytes(2, 3), dtype=np.uint8)
    arrays = engine.batch_arrays(2, memory)
    arrays.slots[:] = (1, 2)
    arrays.tokens[:] = 8
    arrays.n_commit[:] = 1
    assert [r.committed for r in grammar.records(engine.post_batch(arrays))] == [(8,), (8,)]
    assert np.shares_memory(memory, arrays.kinds)
    with pytest.raises(InvalidField, match=r"^memory:"):
        BatchArrays(2, 3, memory[:-1])
    with pytest.raises(InvalidField, match=r"^batch:"):
        BatchArrays(0, 3)


def test_the_error_of_a_failed_batch_names_its_lane(ends: Ends) -> None:
    engine, _ = ends
    arrays = engine.batch_arrays(2)
    arrays.slots[:] = (1, 4)
    with pytest.raises(InvalidField, match=r"^slots: lane 1: a slot is not in \[0, 4\)"):
        engine.post_batch(arrays)
    for call in (engine.post_batch, lambda arrays, batch: engine.await_batch(arrays, 1, batch)):
        with pytest.raises(InvalidField, match=r"^batch: 3 is not in \[0, 2\]"):
            call(arrays, 3)
    arrays = engine.batch_arrays(5)
    arrays.slots[:] = 1
    with pytest.raises(InvalidField, match="is there twice"):
        engine.post_batch(arrays)
