"""Tries a compiled grammar out in the process that compiled it, before the grammar process loads it.

Invariant: an artifact that passes was loaded and gave its first rows within the library's own limits, on stacks smaller
than those of the grammar process. So loading it there with the same limits also succeeds. The proof covers only the
tokens that it walked over: a later row that hits a limit is an error of one request. Runs in a process that can be
killed, and finds the completion plan while it is there.

Not responsible for: the compilation (see worker.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from grammar_service.backends.backend import Backend, Matcher, MatcherFailed, Rows
from grammar_service.backends.reasoning import ReasoningCompiled
from grammar_service.completion.plan import CompletionPlan
from grammar_service.completion.texts import TokenTexts
from grammar_service.errors import InvalidGrammar, LimitExceeded
from grammar_service.grammar.value import Grammar

WORKER_STACK_BYTES = 256 << 20
"""A library recurses over nested references: 1,024 of them overflowed a stack of 8 MiB. Unused pages cost nothing."""

LOADER_STACK_BYTES = 288 << 20
WALK_STACK_BYTES = 4 << 20
"""Less than the threads that fill rows have: the system's default, usually 8 MiB."""

PROOF_STEPS = 8
PROOF_S = 0.1
"""Bounds of the walk after its first row, which is always filled."""

NO_ANSWER = "it admits no answer: no text begins one"


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of a proof."""

    loaded_s: float
    """Time of the load, in seconds."""
    plan: CompletionPlan


def prove(backend: Backend, grammar: Grammar, artifact: bytes, texts: TokenTexts) -> Proof:
    """Load `artifact`, fill its first rows, and make its completion plan.

    Raises InvalidGrammar when the grammar admits no answer, LimitExceeded when the library hits one of its limits, and
    the errors of `Backend.load`.
    """
    begun = time.perf_counter()
    compiled = backend.load(grammar, artifact)
    loaded_s = time.perf_counter() - begun
    failures: list[BaseException] = []
    plans: list[CompletionPlan] = []
    before = threading.stack_size(WALK_STACK_BYTES)
    try:
        # The way to an answer's end is searched after the reasoning, which is ended by a count of tokens.
        answer = compiled.answer if isinstance(compiled, ReasoningCompiled) else compiled
        arguments = (answer.matcher, grammar.text, texts, plans, failures)
        walking = threading.Thread(target=_walk_and_plan, args=arguments, name="proof")
        walking.start()
    finally:
        threading.stack_size(before)
    walking.join()
    for error in failures:
        if isinstance(error, MatcherFailed):
            raise LimitExceeded(f"{backend.name}: a row of the grammar exceeds the library's limits: {error}")
        raise error
    return Proof(loaded_s, plans[0])


def _walk_and_plan(
    start: Callable[[], Matcher],
    source: str,
    texts: TokenTexts,
    plans: list[CompletionPlan],
    failures: list[BaseException],
) -> None:
    try:
        _walk(start(), Rows(np.zeros((1, texts.num_words), dtype=np.int32)))
        plans.append(CompletionPlan.of(start(), source, texts))
    except BaseException as error:  # passed to the waiting thread; a panic of a Rust library is not an Exception
        failures.append(error)


def _walk(matcher: Matcher, rows: Rows) -> None:
    deadline = time.perf_counter() + PROOF_S
    for step in range(PROOF_STEPS):
        try:
            matcher.fill(rows, 0)
        except MatcherFailed as error:
            # LLGuidance reports a state without a legal token this way.
            if step == 0 and "NoExtension" in str(error):
                raise InvalidGrammar(NO_ANSWER) from None
            raise
        legal = np.flatnonzero(rows.words[0])
        if step == 0 and not len(legal):
            raise InvalidGrammar(NO_ANSWER)
        if not len(legal) or time.perf_counter() > deadline:
            return
        # The middle word: in free text the first legal token would be a single control character.
        at = int(legal[len(legal) // 2])
        word = int(rows.words[0, at]) & 0xFFFFFFFF
        if not matcher.accept(at * 32 + word.bit_length() - 1) or matcher.terminated:
            return
