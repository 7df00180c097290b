"""Requests made from plain numbers, answers that collect their events, and engines for the tests of the engine.

Invariant: a wait ends when its condition holds, or it fails the test; nothing sleeps for a fixed time.
Not responsible for: fixtures (see conftest.py) and models (see tiny.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.errors import LockstepError
from gpu_engine.api.request import FinishReason, GrammarKind, GrammarSpec, Logprobs, Request, Telemetry, TokenEvent
from gpu_engine.api.stats import Iteration
from gpu_engine.api.transfer_config import TransferConfig
from gpu_engine.core.draft_budget import EveryDraft
from gpu_engine.core.engine import Engine
from gpu_engine.core.executor import Executor
from gpu_engine.core.runner import LaunchedStep
from gpu_engine.model.loader import LoadedModel
from tests.gpu_engine.made_requests import changed, made

PATIENCE_S = 300.0
"""Seconds after which a wait fails its test."""
UNHURRIED_MS = 30_000.0
"""A timeout of rows that no answer exceeds, though a thread may stop for seconds on a busy machine."""

_numbers = itertools.count()


@dataclass(eq=False)
class Answer:
    """The sink of one request, with every event that the engine sent to it."""

    request: Request = field(init=False)
    telemetry: Telemetry = field(init=False)
    """The sequence's, once it is submitted."""
    events: list[TokenEvent] = field(default_factory=list)
    on_event: Callable[[Answer], None] | None = None
    """Called on the engine thread after each event."""
    _over: threading.Event = field(default_factory=threading.Event)

    def change(self, **values: Any) -> None:
        """Change fields of the request, which is not submitted yet."""
        self.request = changed(self.request, **values)

    def submit(self, engine: Engine, *, awaits_pages: bool = False) -> None:
        self.telemetry = engine.submit(self.request, awaits_pages=awaits_pages)

    def __call__(self, event: TokenEvent) -> None:
        self.events.append(event)
        if event.finish is not None or event.error is not None:
            self._over.set()
        if self.on_event is not None:
            self.on_event(self)

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events for token in event.token_ids]

    @property
    def logprobs(self) -> list[Logprobs]:
        return [entry for event in self.events for entry in event.logprobs]

    @property
    def finish(self) -> FinishReason | None:
        return self.events[-1].finish if self.events else None

    @property
    def error(self) -> LockstepError | None:
        return self.events[-1].error if self.events else None

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def wait(self) -> Answer:
        assert self._over.wait(PATIENCE_S), f"no end of {self.request} after {len(self.tokens)} tokens"
        ends = [event for event in self.events if event.finish is not None or event.error is not None]
        assert ends == self.events[-1:]
        return self


def ask(
    prompt: list[int],
    *,
    max_tokens: int = 40,
    seed: int = 1,
    grammar: str | None = None,
    drafts: int = 15,
    on_event: Callable[[Answer], None] | None = None,
    name: str | None = None,
    **values: object,
) -> Answer:
    """Return the answer of a request that is not yet submitted; `values` are any fields of it, the temperature is 0."""
    answer = Answer(on_event=on_event)
    answer.request = made(
        prompt,
        answer,
        request_id=name or f"r{next(_numbers)}",
        max_tokens=max_tokens,
        seed=seed,
        grammar=None if grammar is None else GrammarSpec(GrammarKind.LARK, grammar),
        num_draft_tokens=drafts,
        **{"temperature": 0.0, **values},
    )
    return answer


def tokens(count: int, seed: int, *, repeat: int = 0) -> list[int]:
    """Return random ids of byte tokens; the last `repeat` of them repeat the first ones, so that a drafter proposes."""
    ids = random.Random(seed).choices(range(256), k=count - repeat)
    return ids + ids[:repeat]


_TRANSFER = {field.name for field in dataclasses.fields(TransferConfig)}


def config(**fields: object) -> EngineConfig:
    """Return a small engine's configuration: 4 slots, chunks of 16, K = F = 7. Fields of TransferConfig are its own."""
    own = {name: fields.pop(name) for name in [*fields] if name in _TRANSFER}
    if own:
        fields["transfer"] = TransferConfig(**own)  # type: ignore[arg-type]
    base: dict[str, object] = {"device": "cpu", "dtype": "float32", "num_threads": 1}
    base |= {"max_batch_size": 4, "max_model_len": 256, "max_batched_tokens": 16, "jump_forward_tokens": 1}
    return EngineConfig(**{**base, **fields})  # type: ignore[arg-type]


def with_drafts(num_drafts: int, **fields: object) -> EngineConfig:
    """Return `config` with K drafts a step, of the n-gram drafter unless `draft_model` names a folder."""
    folder = str(fields.get("draft_model", ""))
    heads = (name for name in ("eagle3", "dflash") if folder.endswith(name))
    by_folder = next(heads, "model" if folder else "ngram")
    drafter = by_folder if num_drafts else "none"
    return config(**{"drafter": drafter, "num_draft_tokens": num_drafts, **fields})


def executor_of(engine: Engine) -> Executor:
    """Return what runs the steps of an engine, whose parts a test watches or replaces.

    It belongs to the engine's thread; so a test changes it before the first request.
    """
    return engine.executor


def launched_steps(engine: Engine) -> list[LaunchedStep]:
    """Return a list that gets every step from now on, as it is launched. Before the first request."""
    runner, steps = executor_of(engine).runner, list[LaunchedStep]()
    launch = runner.launch

    def noted(*args: Any) -> LaunchedStep:
        steps.append(launch(*args))
        return steps[-1]

    runner.launch = noted  # type: ignore[method-assign]
    return steps


def until_false(condition: Callable[[], bool]) -> None:
    """Wait until another thread makes `condition()` false."""
    deadline_s = time.monotonic() + PATIENCE_S
    while condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.0005)


@contextmanager
def held(engine: Engine) -> Iterator[None]:
    """Hold the engine's thread between two iterations: what is submitted meanwhile is admitted at once."""
    reached, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        assert go_on.wait(PATIENCE_S)

    engine._inbox.put(hold)
    until_false(lambda: not reached.is_set() and engine._thread.is_alive())
    try:
        yield
    finally:
        go_on.set()


class Hold:
    """Holds the engine's thread at the end of the first iteration in which `when()` is true. Make it before the
    requests.

    So a test acts on sequences that still run, however late its own thread comes.
    """

    def __init__(self, engine: Engine, when: Callable[[], bool]) -> None:
        self._reached, self._go_on = threading.Event(), threading.Event()
        add = engine.iterations.add

        def add_and_hold(iteration: Iteration) -> None:
            add(iteration)
            if not self._reached.is_set() and when():
                self._reached.set()
                assert self._go_on.wait(PATIENCE_S)

        engine.iterations.add = add_and_hold  # type: ignore[method-assign]

    @contextmanager
    def reached(self) -> Iterator[None]:
        """Wait until the thread is held, and hold it until the block ends; messages of the block come next."""
        assert self._reached.wait(PATIENCE_S)
        try:
            yield
        finally:
            self._go_on.set()


def settle(engine: Engine) -> None:
    """Wait until the engine's thread has processed each message sent before, and each step it has launched.

    An answer ends before its matcher is closed, and before its iteration is recorded. Not for an engine with sequences.
    """
    while engine._thread.is_alive():
        inflight: list[int] = []
        engine._inbox.put(lambda inflight=inflight: inflight.append(engine.num_inflight_steps))
        until_false(lambda inflight=inflight: not inflight and engine._thread.is_alive())  # type: ignore[misc]
        if not any(inflight):
            return


@contextmanager
def running(engine: Engine) -> Iterator[Engine]:
    """Start the engine; at the end no request may be running or waiting, and no page may be used.

    Its steps verify every draft, unless the test gives the runner another budget before the first request.
    """
    executor_of(engine).runner.budget = EveryDraft(most_rows=engine.config.step_rows)
    engine.start()
    try:
        yield engine
        settle(engine)
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
        engine.check_integrity()
    finally:
        engine.close(PATIENCE_S)
        assert not engine._thread.is_alive()


@contextmanager
def unguided_engine(model: LoadedModel, settings: EngineConfig) -> Iterator[Engine]:
    """Run an engine without a grammar process."""
    with running(Engine(settings, replace(model, max_model_len=settings.max_model_len))) as engine:
        yield engine


def answer_all(engine: Engine, answers: list[Answer]) -> list[list[int]]:
    """Submit all requests at once and return their tokens."""
    with held(engine):
        for answer in answers:
            answer.submit(engine)
    return [answer.wait().tokens for answer in answers]


def answer_each(engine: Engine, answers: list[Answer]) -> list[list[int]]:
    """Submit each request after the one before it has ended, and return their tokens."""
    return [answer_all(engine, [answer])[0] for answer in answers]


def answer_staggered(engine: Engine, answers: list[Answer], *, gap: int = 5) -> list[list[int]]:
    """Submit each request when the one before it has `gap` tokens or has ended, and return their tokens."""
    remaining = iter(answers)

    def submit_next_if_due(answer: Answer) -> None:
        if answer.over or len(answer.tokens) >= gap:
            answer.on_event = None
            submit_next()

    def submit_next() -> None:
        following = next(remaining, None)
        if following is not None:
            following.on_event = submit_next_if_due
            following.submit(engine)

    submit_next()
    return [answer.wait().tokens for answer in answers]
