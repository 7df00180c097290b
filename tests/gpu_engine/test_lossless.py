"""The tokens of every feature are those of one token a step, whatever drafts and whatever happens to the engine.

One workload has every feature of a request: sampling, penalties, biases, bans, stop tokens, log-probabilities,
logits processors of each kind, adapters, tensors of the model, grammars. An engine without drafts answers it once,
one request at a time. Each row of the table answers it with one drafter while one event happens, and has the same
tokens, log-probabilities, ends and tensors.

Not responsible for: what the drafter proposes (see drafters/), the recorded device (see device/), beams
(see core/test_beams.py), real grammar libraries (see drafters/test_jump_forward_backends.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_engine.api.output_tensors import LOGITS, WantedOutput
from gpu_engine.api.request import SuffixScope
from gpu_engine.core.engine import Engine
from gpu_engine.model.loader import LoadedModel, load_model
from shared_mem.layout import Stage
from tests.fakes import EOS
from tests.gpu_engine import dflash
from tests.gpu_engine.adapters.files import save_lora, save_prompt
from tests.gpu_engine.harness import (
    Answer,
    answer_each,
    config,
    until_false,
)
from tests.gpu_engine.processor_cases import SETTING, processed
from tests.gpu_engine.toy_sidecar import Automaton, guided_engine
from tests.gpu_engine.workload import EVENTS, LENGTH, UNHURRIED, WORKLOAD

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
def expected_with(adapted: tuple[LoadedModel, dict[str, Any]]) -> Callable[[str], list[Answer]]:
    """Return a function from kv_cache_dtype to the workload, one request at a time and one token a step."""
    return functools.cache(lambda kv: answered_one_by_one(*adapted, kv))


def answered_one_by_one(model: LoadedModel, settings: dict[str, Any], kv: str) -> list[Answer]:
    one_token = config(drafter="none", kv_cache_dtype=kv, **settings, **UNHURRIED)
    with guided_engine(model, one_token) as (engine, _):
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


def rows() -> list[Any]:
    """Return each drafter with each event; an eighth of the rows, with each of both among them, is not slow. Another
    eighth also has a cache of 8 bits."""
    found = []
    for i, drafter in enumerate(DRAFTERS):
        for j, event in enumerate(EVENTS):
            marks = [] if (i + j) % 8 == 0 else [pytest.mark.slow]
            # Over the rows that are not slow, steps alternate between the two.
            overlap = (i + j) // 8 % 2 == 0
            found.append(pytest.param(drafter, event, overlap, "auto", marks=marks, id=f"{drafter}, {event}"))
            if (i + j) % 8 == 4:
                slow = [pytest.mark.slow] if i % 3 else []
                found.append(pytest.param(drafter, event, overlap, "int8", marks=slow, id=f"{drafter}, {event}, int8"))
    return found


@pytest.mark.parametrize(("drafter", "event", "overlap", "kv"), rows())
def test_tokens_depend_on_neither_drafts_nor_events(
    adapted: tuple[LoadedModel, dict[str, Any]],
    networks: dict[str, str],
    expected_with: Callable[[str], list[Answer]],
    drafter: str,
    event: str,
    overlap: bool,
    kv: str,
) -> None:
    (model, settings), expected = adapted, expected_with(kv)
    happens, fields = EVENTS[event]
    drafts = {"num_draft_tokens": 3, **DRAFTERS[drafter]}
    if "draft_model" in drafts:
        named = drafts["draft_model"]
        kind = next((name for name in ("eagle3", "dflash") if name in named), "model")
        drafts = {"drafter": kind, **drafts, "draft_model": networks[named]}
        if drafter != "apart":
            drafts["adapters"] = settings["adapters"][:1]
    with guided_engine(model, config(**{**settings, **fields, **drafts, "overlap": overlap, "kv_cache_dtype": kv})) as (
        engine,
        grammar,
    ):
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
