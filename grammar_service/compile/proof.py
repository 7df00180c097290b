"""A compiled grammar tried out in the process that compiled it, before the sidecar meets it; and its end looked for.

Invariant: what passes was loaded from its artifact, and gave its first rows, within the library's own limits and on
stacks smaller than the sidecar's. So loading it again in the sidecar, with the same limits, ends the same way. It
proves the way that the walk took and no other: a row that hits a limit later is an error of one request. Runs where a
compilation runs: in a process that can be killed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from grammar_service.backends.backend import Backend, Matcher, MatcherFailed, Rows
from grammar_service.completion.plan import CompletionPlan
from grammar_service.completion.texts import TokenTexts
from grammar_service.errors import InvalidGrammar, LimitExceeded
from grammar_service.grammar.value import Grammar

WORKER_STACK_BYTES = 256 << 20
"""A library recurses over nested references; 1,024 of them ended a thread of 8 MiB. Only what is used is paid for."""

LOADER_STACK_BYTES = 288 << 20
WALK_STACK_BYTES = 4 << 20
"""Rows are filled on threads of the system's size, 8 MiB as a rule."""

PROOF_STEPS = 8
PROOF_S = 0.1
"""The walk takes no more than this beyond its first row, which is always computed."""

NO_ANSWER = "it admits no answer: no text begins one"


@dataclass(frozen=True, slots=True)
class Proof:
    """What trying an artifact out gave."""

    loaded_s: float
    """Seconds that loading took."""
    plan: CompletionPlan


def prove(backend: Backend, grammar: Grammar, artifact: bytes, texts: TokenTexts) -> Proof:
    """Load `artifact`, walk over its first rows, and look for its shortest answers.

    Raises InvalidGrammar when no answer begins at all, LimitExceeded when the library hits one of its limits, and what
    `Backend.load` raises.
    """
    begun = time.perf_counter()
    compiled = backend.load(grammar, artifact)
    loaded_s = time.perf_counter() - begun
    failures: list[BaseException] = []
    plans: list[CompletionPlan] = []
    before = threading.stack_size(WALK_STACK_BYTES)
    try:
        arguments = (compiled.matcher, grammar.text, texts, plans, failures)
        walking = threading.Thread(target=_walk_noting, args=arguments, name="proof")
        walking.start()
    finally:
        threading.stack_size(before)
    walking.join()
    for error in failures:
        if isinstance(error, MatcherFailed):
            raise LimitExceeded(f"{backend.name}: a row of the grammar exceeds the library's limits: {error}")
        raise error
    return Proof(loaded_s, plans[0])


def _walk_noting(
    start: Callable[[], Matcher],
    source: str,
    texts: TokenTexts,
    plans: list[CompletionPlan],
    failures: list[BaseException],
) -> None:
    try:
        _walk(start(), Rows(np.zeros((1, texts.num_words), dtype=np.int32)))
        plans.append(CompletionPlan.of(start(), source, texts))
    except BaseException as error:  # told to the thread that waits; a library's panic is no Exception
        failures.append(error)


def _walk(matcher: Matcher, rows: Rows) -> None:
    deadline = time.perf_counter() + PROOF_S
    for step in range(PROOF_STEPS):
        try:
            matcher.fill(rows, 0)
        except MatcherFailed as error:
            # LLGuidance's word for a state without a legal token.
            if step == 0 and "NoExtension" in str(error):
                raise InvalidGrammar(NO_ANSWER) from None
            raise
        legal = np.flatnonzero(rows.words[0])
        if step == 0 and not len(legal):
            raise InvalidGrammar(NO_ANSWER)
        if not len(legal) or time.perf_counter() > deadline:
            return
        # The middle one: the first would be a control character, and short, wherever text is free.
        at = int(legal[len(legal) // 2])
        word = int(rows.words[0, at]) & 0xFFFFFFFF
        if not matcher.accept(at * 32 + word.bit_length() - 1) or matcher.terminated:
            return
