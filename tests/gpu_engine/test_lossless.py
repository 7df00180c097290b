"""The tokens of every feature are those of one token a step, whatever drafts and whatever happens to the engine.

One workload has every feature of a request: sampling, penalties, biases, bans, stop tokens, log-probabilities,
logits processors of each kind, adapters, tensors of the model, grammars. An engine without drafts answers it once,
one request at a time. Each row of the table answers it with one drafter while one event happens, and has the same
tokens, log-probabilities, ends and tensors.

Not responsible for: what the drafter proposes (see drafters/), the recorded device (see device/), beams
(see core/test_beams.py), real grammar libraries (see drafters/test_jump_forward_backends.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from gpu_engine.api.output_tensors import LOGITS, WantedOutput
from gpu_engine.api.request import SuffixScope
from gpu_engine.api.stats import Stage as SequenceStage
from gpu_engine.core.engine import Engine
from gpu_engine.model.loader import LoadedModel, load_model
from shared_mem.channel import Record
from shared_mem.layout import Stage
from tests.fakes import EOS
from tests.gpu_engine import dflash
from tests.gpu_engine.adapters.files import save_lora, save_prompt
from tests.gpu_engine.harness import (
    PATIENCE_S,
    UNHURRIED_MS,
    Answer,
    Hold,
    answer_all,
    answer_each,
    answer_staggered,
    ask,
    config,
    tokens,
    until_false,
)
from tests.gpu_engine.processor_cases import SETTING, processed
from tests.gpu_engine.toy_sidecar import Automaton, CrashError, ToyGrammar, guided_engine

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

DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {"drafter": "none"},
    "ngram": {"drafter": "ngram", "num_draft_tokens": 7},
    "ngram of few": {"drafter": "ngram", "num_draft_tokens": 3, "jump_forward_tokens": 15},
    "grammar": {"drafter": "grammar", "num_draft_tokens": 3, "jump_forward_tokens": 7},
    "same model": {"draft_model": "same", "draft_masks": "on"},
    "other model": {"draft_model": "other", "draft_masks": "off", "jump_forward_tokens": 1},
    "late masks": {"draft_model": "other", "draft_masks": "on", "draft_timeout_ms": 0.001},
    "circle head": {"draft_model": "circle eagle3", "draft_masks": "on", "jump_forward_tokens": 1},
    "random head": {"draft_model": "random eagle3", "draft_masks": "off"},
    "block": {"draft_model": "repeating dflash", "draft_masks": "on", "num_draft_tokens": 7},
    "random block": {"draft_model": "random dflash", "draft_masks": "off", "jump_forward_tokens": 1},
    "apart": {"draft_model": "other", "drafter": "decoupled", "num_draft_tokens": 7},
    "earlier answers": {"drafter": "ngram", "num_draft_tokens": 7, "jump_forward_tokens": 3},
}
"""Settings of each drafter; `draft_model` is a key of the fixture `networks`."""


@pytest.fixture(scope="module")
def networks(draft_models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    repeating, random = (tmp_path_factory.mktemp(name) / "dflash" for name in ("repeating", "random"))
    dflash.save_repeating(repeating)
    dflash.save_random(random)
    return {**draft_models, "repeating dflash": str(repeating), "random dflash": str(random)}


@pytest.fixture(scope="module")
def adapted(llama: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, dict[str, Any]]:
    """A model that takes adapters, and the settings of its engines."""
    lora = save_lora(Path(llama.name), tmp_path_factory.mktemp("l"), seed=1, gain=2.0)
    prompt = save_prompt(tmp_path_factory.mktemp("p"), tokens=20, hidden=64)
    fields = {"model": llama.name, "adapters": (f"l={lora}", f"p={prompt}")}
    settings = {**fields, "logits_processors": SETTING, "max_model_len": LENGTH}
    return load_model(config(**fields)), settings


def made(engine: Engine, *, plain: bool = False) -> list[Answer]:
    """Return the answers of the workload, not yet submitted; without those of prompt adapters that are not loaded.

    `plain`: without processors and adapters.
    """
    loaded = {use.adapter.name: use.adapter for use in engine.adapters.listed()}
    answers = []
    for case in WORKLOAD:
        if case.prompt and case.prompt not in loaded:
            continue
        answer = case.make()
        answers.append(answer)
        if plain:
            continue
        processed(engine.processors, answer, *case.processors)
        answer.change(lora=loaded[case.lora] if case.lora else None)
        if case.prompt:
            adapter = loaded[case.prompt]
            prompt_ids = [*adapter.virtual_ids, *answer.request.prompt_ids]
            answer.change(prompt_adapter=adapter, prompt_ids=prompt_ids)
        if case.tensors:
            spec = engine.model.outputs[LOGITS]
            answer.change(tensors=(WantedOutput(LOGITS, LOGITS, spec, context=True, answer=True),))
    return answers


def logits(answer: Answer) -> np.ndarray[Any, Any]:
    """Return the rows of an answer; asserts that each token but the last has one, and each that was prefilled."""
    parts = [rows for event in answer.events for rows in event.outputs]
    cached = answer.telemetry.cached_tokens
    assert [rows.start for rows in parts] == [cached, *(rows.end for rows in parts[:-1])]
    assert parts[-1].end == len(answer.request.prompt_ids) + len(answer.tokens) - 1
    return np.concatenate([rows.data for rows in parts]).view("<f4")


def scores(answer: Answer) -> np.ndarray[Any, Any]:
    """Return the log-probabilities of the prompt, which are only in the first event."""
    first, *others = (event.prompt_logprobs for event in answer.events)
    assert first is not None
    assert not any(others)
    assert len(first.logprob_N) == len(answer.request.prompt_ids) - 1
    return first.logprob_N


def assert_same(answers: list[Answer], expected: list[Answer]) -> None:
    for answer, wanted, case in zip(answers, expected, WORKLOAD, strict=False):  # prompt adapters come last
        found = answer.tokens, answer.finish, answer.events[-1].matched_token_id, answer.logprobs
        assert found == (wanted.tokens, wanted.finish, wanted.events[-1].matched_token_id, wanted.logprobs)
        if case.make().request.outputs.prompt_logprobs is not None:
            np.testing.assert_array_equal(scores(answer), scores(wanted))
        if case.tensors:
            rows, others = logits(answer), logits(wanted)
            both = min(len(rows), len(others))  # the prefix cache may have a part of one of the prompts
            np.testing.assert_allclose(rows[-both:], others[-both:], atol=1e-4)


@pytest.fixture(scope="module")
def expected(adapted: tuple[LoadedModel, dict[str, Any]]) -> list[Answer]:
    """The workload, one request at a time and one token a step."""
    model, settings = adapted
    with guided_engine(model, config(drafter="none", **settings, **UNHURRIED)) as (engine, _):
        answers, plain = made(engine), made(engine, plain=True)
        for each in (answers, plain):
            answer_each(engine, each)
    for answer, without, case in zip(answers, plain, WORKLOAD, strict=True):
        assert (answer.tokens != without.tokens) == bool(case.processors or case.lora or case.prompt), (
            "each of them has an effect"
        )
        if answer.request.grammar is not None:
            automaton, whole = Automaton.parse(answer.request.grammar.source), answer.tokens[-1] == EOS
            assert automaton.allows(answer.tokens)
            assert answer.finish is not None
            assert answer.finish.name == ("STOP" if whole else "GRAMMAR_INCOMPLETE")
    return answers


# -- events ------------------------------------------------------------------------------------------------------------

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


def rows() -> list[Any]:
    """Return each drafter with each event; a quarter of the rows, with each of both among them, is not slow."""
    found = []
    for i, drafter in enumerate(DRAFTERS):
        for j, event in enumerate(EVENTS):
            marks = [] if (i + j) % 4 == 0 else [pytest.mark.slow]
            # Over the rows that are not slow, steps alternate between the two.
            found.append(pytest.param(drafter, event, (i + j) // 4 % 2 == 0, marks=marks, id=f"{drafter}, {event}"))
    return found


@pytest.mark.parametrize(("drafter", "event", "overlap"), rows())
def test_tokens_depend_on_neither_drafts_nor_events(
    adapted: tuple[LoadedModel, dict[str, Any]],
    networks: dict[str, str],
    expected: list[Answer],
    drafter: str,
    event: str,
    overlap: bool,
) -> None:
    model, settings = adapted
    happens, fields = EVENTS[event]
    drafts = {"num_draft_tokens": 3, **DRAFTERS[drafter]}
    if "draft_model" in drafts:
        named = drafts["draft_model"]
        kind = next((name for name in ("eagle3", "dflash") if name in named), "model")
        drafts = {"drafter": kind, **drafts, "draft_model": networks[named]}
        if drafter != "apart":
            drafts["adapters"] = settings["adapters"][:1]
    with guided_engine(model, config(**{**settings, **fields, **drafts, "overlap": overlap})) as (engine, grammar):
        answers = made(engine)
        if drafter == "earlier answers":
            scope = SuffixScope(b"one", seeds=tuple(tuple(answer.tokens) for answer in expected[:8]))
            for answer in answers:
                answer.change(suffix_scope=scope)
        happens(engine, grammar, answers)
        assert_same(answers, expected)
        stats, records = engine.stats(), grammar.sidecar.records
        until_false(lambda: any(use.in_use for use in engine.adapters.listed()))
    assert (stats.draft_tokens > 0) == (drafter != "none")
    assert stats.accepted_draft_tokens > (-1 if drafter in ("none", "random head", "random block", "grammar") else 20)
    assert (stats.accepted_index_draft_tokens > 20) == (drafter == "earlier answers")
    masked = any(record.stage not in (Stage.VERIFY, Stage.PROPOSE) for record in records)
    assert masked == (drafts.get("draft_masks") == "on") or event in ("killed", "killed in a step", "dying")
