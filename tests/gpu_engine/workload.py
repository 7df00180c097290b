"""A workload with every feature of a request, and what may happen to an engine that answers it.

Not responsible for: the answers that are expected (see test_lossless.py, test_hybrids.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

from gpu_engine.api.stats import Stage as SequenceStage
from gpu_engine.core.engine import Engine
from shared_mem.channel import Record
from shared_mem.layout import Stage
from tests.gpu_engine.harness import (
    PATIENCE_S,
    UNHURRIED_MS,
    Answer,
    Hold,
    answer_all,
    answer_staggered,
    ask,
    tokens,
    until_false,
)
from tests.gpu_engine.toy_sidecar import CrashError, ToyGrammar

LENGTH = 128
UNHURRIED = {"row_timeout_ms": UNHURRIED_MS, "draft_timeout_ms": UNHURRIED_MS}
HURRIED = {"row_timeout_ms": 20.0, "draft_timeout_ms": 20.0}
BIASES = tuple((token, 1.5 - token % 4) for token in range(0, 256, 3))


class Case(NamedTuple):
    """A request of the workload."""

    make: Callable[[], Answer]
    processors: tuple[tuple[str, str], ...] = ()
    lora: str = ""
    prompt: str = ""
    """A prompt adapter, which no drafting network takes."""
    tensors: bool = False


WORKLOAD = [
    Case(partial(ask, [*range(196, 203)] * 2, max_tokens=24), processors=(("waves", '{"strength": 0.5}'),)),
    Case(partial(ask, tokens(30, 1, repeat=10), grammar="50", max_tokens=90)),
    Case(partial(ask, tokens(30, 2, repeat=12), max_tokens=24, temperature=0.8, seed=4, logprobs=2, prompt_logprobs=2)),
    Case(partial(ask, tokens(20, 3), grammar="40", max_tokens=90, temperature=1.0, seed=3, logit_bias=BIASES)),
    Case(partial(ask, tokens(20, 4, repeat=8), max_tokens=24, ignore_eos=True, repetition_penalty=1.2), tensors=True),
    Case(partial(ask, tokens(33, 5), grammar="45", max_tokens=30, temperature=0.5, top_p=0.9), lora="l"),
    Case(partial(ask, tokens(9, 6), max_tokens=50, temperature=0.6, seed=5, ignore_eos=True, logit_bias=BIASES)),
    Case(partial(ask, tokens(21, 7), grammar="1", max_tokens=60)),
    Case(partial(ask, tokens(40, 8), grammar="48", max_tokens=80, repetition_penalty=1.3, presence_penalty=0.4)),
    Case(
        partial(ask, tokens(30, 9, repeat=10), grammar="40", max_tokens=80, logprobs=1),
        processors=(("captured", '{"strength": 1.0}'), ("waves", '{"strength": 1.5}'), ("captured", "")),
        tensors=True,
    ),
    Case(
        partial(ask, tokens(24, 10, repeat=8), max_tokens=30, ignore_eos=True, bad_token_ids=(40, 41), min_p=0.05),
        processors=(("batch", '{"strength": 1.5}'),),
        lora="l",
    ),
    Case(partial(ask, tokens(12, 11), max_tokens=40, temperature=1.2, top_k=9, seed=2**64 - 3, min_tokens=12)),
    Case(partial(ask, tokens(20, 12, repeat=8), max_tokens=70, ignore_eos=True, stop_token_ids=(7,)), lora="l"),
    Case(partial(ask, tokens(20, 13), grammar="70", max_tokens=80, frequency_penalty=0.2, bad_words=((70, 71),))),
    Case(partial(ask, tokens(24, 14, repeat=8), max_tokens=30, temperature=0.7), (("captured", ""),), prompt="p"),
    Case(partial(ask, tokens(24, 15, repeat=8), grammar="30", max_tokens=60), lora="l", prompt="p"),
]
"""More requests than there are slots; some end near their limit."""

Event = Callable[[Engine, ToyGrammar, list[Answer]], object]


def together(engine: Engine, grammar: ToyGrammar, answers: list[Answer]) -> None:
    answer_all(engine, answers)
    assert engine.stats().deferred_rows == 0
    assert len(grammar.opened) == sum(answer.request.grammar is not None for answer in answers)


def staggered(engine: Engine, grammar: ToyGrammar, answers: list[Answer]) -> None:
    answer_staggered(engine, answers)


def preempted(engine: Engine, grammar: ToyGrammar, answers: list[Answer]) -> None:
    answer_all(engine, answers)
    assert engine.stats().preemptions > 0


def killed(engine: Engine, grammar: ToyGrammar, answers: list[Answer], *, during_a_step: bool) -> None:
    """Lose the grammar process once, between two steps or while one waits for it, and attach another one."""
    reached, first = threading.Event(), grammar.sidecar

    def die(record: Record) -> None:
        if record.commit_pos + len(record.committed) >= 15:
            first.stopping |= during_a_step
            reached.set()

    first.before = die
    hold = Hold(engine, lambda: reached.is_set() and not during_a_step)
    for answer in answers:
        answer.submit(engine)
    assert reached.wait(PATIENCE_S)
    with nullcontext() if during_a_step else hold.reached():
        grammar.kill_sidecar()
        engine.grammar_lost()
    for answer in answers:
        if answer.request.grammar is None and answer.tokens:
            answer.wait()
    assert not all(answer.over for answer in answers)
    grammar.start_sidecar()
    engine.grammar_restored()
    for answer in answers:
        answer.wait()
    assert first.problems == []


def late(engine: Engine, grammar: ToyGrammar, answers: list[Answer]) -> None:
    """Answer each record only when the engine has given up the wait for it."""

    def when_given_up(record: Record) -> None:
        def waits() -> bool:
            stages = [each.stage for each in engine.sequence_stats() if each.slot == record.slot]
            return record.stage == Stage.VERIFY and bool(stages) and stages[0] is not SequenceStage.PARKED

        until_false(waits)

    grammar.sidecar.before = when_given_up
    answer_all(engine, answers)
    assert engine.stats().deferred_rows > 20


def row_by_row(engine: Engine, grammar: ToyGrammar, answers: list[Answer]) -> None:
    """Give none, one or two rows of every second record in time, and the others later."""
    sidecar = grammar.sidecar
    sidecar.gives = True

    def now_and_then(record: Record) -> int | None:
        place = record.commit_pos + len(record.committed)
        return None if place % 2 or record.stage != Stage.VERIFY else place % 3

    sidecar.withhold = now_and_then
    answer_all(engine, answers)
    assert sidecar.withheld > 10
    # A late answer is no sign of a lost matcher, however many there are.
    assert len(grammar.opened) == sum(answer.request.grammar is not None for answer in answers)


def dying(engine: Engine, grammar: ToyGrammar, answers: list[Answer]) -> None:
    """Have each grammar process crash after some tokens."""

    def die(record: Record) -> None:
        if sum(1 for each in grammar.sidecar.records if each.committed) > 12:
            raise CrashError

    def watch(answer: Answer) -> None:
        grammar.sidecar.before = die

    for answer in answers:
        answer.on_event = watch
    with grammar.supervised(engine):
        answer_all(engine, answers)
    assert len(grammar.buried) > 3


EVENTS: dict[str, tuple[Event, dict[str, Any]]] = {
    "together": (together, UNHURRIED),
    "staggered": (staggered, {**UNHURRIED, "prefix_cache": False}),
    "preempted": (preempted, {**UNHURRIED, "kv_cache_tokens": LENGTH}),
    "killed": (partial(killed, during_a_step=False), HURRIED),
    "killed in a step": (partial(killed, during_a_step=True), HURRIED),
    "dying": (dying, UNHURRIED),
    "late": (late, {"row_timeout_ms": 0.01, "draft_timeout_ms": 0.01}),
    "row by row": (row_by_row, UNHURRIED),
}
"""What happens to the engine, and the settings with which it does."""
