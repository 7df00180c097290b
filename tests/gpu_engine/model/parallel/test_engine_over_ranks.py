"""An engine whose model is over two ranks gives the tokens of one rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from gpu_engine.api.output_tensors import LOGITS, WantedOutput
from gpu_engine.model.loader import LoadedModel
from shared_mem.channel import Record
from tests.gpu_engine.beams import search, search_all
from tests.gpu_engine.harness import (
    PATIENCE_S,
    Answer,
    answer_all,
    answer_each,
    ask,
    config,
    tokens,
    unguided_engine,
    with_drafts,
)
from tests.gpu_engine.model.parallel.threads import ThreadRanks
from tests.gpu_engine.processor_cases import SETTING, processed
from tests.gpu_engine.toy_sidecar import guided_engine

MIX: list[Callable[[], Answer]] = [
    partial(ask, tokens(30, 1, repeat=10), grammar="40", max_tokens=50),
    partial(ask, tokens(12, 2), max_tokens=30, ignore_eos=True),
    partial(ask, tokens(20, 3), grammar="30", max_tokens=40, temperature=1.0, seed=3),
    partial(ask, tokens(33, 4), grammar="45", max_tokens=30, temperature=0.5, top_p=0.9),
    partial(ask, tokens(9, 5), max_tokens=30, temperature=0.6, seed=5, logit_bias=((7, 2.0),)),
    partial(ask, tokens(21, 6), grammar="1", max_tokens=30),
    partial(ask, tokens(40, 7), grammar="38", max_tokens=50, repetition_penalty=1.3, presence_penalty=0.4),
    partial(ask, [*range(196, 203)] * 2, max_tokens=40),
]
PATIENT: dict[str, Any] = {"row_timeout_ms": 2000.0}
PROCESSED: list[tuple[Callable[[], Answer], tuple[tuple[str, str], ...]]] = [
    (partial(ask, tokens(30, 1, repeat=10), grammar="40", max_tokens=50), (("waves", ""),)),
    (partial(ask, tokens(20, 3), grammar="30", max_tokens=40, temperature=1.0, seed=3), (("captured", ""),)),
    (partial(ask, [*range(196, 203)] * 2, max_tokens=30), (("batch", '{"strength": 0.5}'), ("waves", ""))),
    (partial(ask, tokens(9, 3), max_tokens=20, temperature=0.6, logprobs=1, ignore_eos=True), (("batch", ""),)),
]


@pytest.fixture(scope="module")
def ranks(llama: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadRanks]:
    two = ThreadRanks(config(model=llama.name, tensor_parallel_size=2), tmp_path_factory.mktemp("ranks") / "store")
    yield two
    two.end()


@pytest.fixture(scope="module")
def expected(llama: LoadedModel) -> list[list[int]]:
    """The answers of one rank without drafts."""
    with guided_engine(llama, with_drafts(0, **PATIENT)) as (engine, _):
        return answer_all(engine, [make() for make in MIX])


@pytest.mark.parametrize("num_drafts", [0, 7])
def test_guided_and_free_tokens_are_those_of_one_rank(
    ranks: ThreadRanks, expected: list[list[int]], num_drafts: int
) -> None:
    """With few pages sequences are preempted."""
    pages = {"max_model_len": 112, "kv_cache_tokens": 128} if num_drafts else {}
    with guided_engine(ranks.model, with_drafts(num_drafts, **PATIENT, **pages)) as (engine, _):
        assert answer_all(engine, [make() for make in MIX]) == expected
        stats = engine.stats()
    assert (stats.preemptions > 0) == bool(pages)
    assert (stats.accepted_draft_tokens > 20) == (num_drafts > 0)
    spent = ranks.collectives.spent
    assert spent["sum"].calls >= 4 * spent["gather"].calls > 0


@pytest.mark.parametrize("grammar", [None, pytest.param("12", marks=pytest.mark.slow)])
def test_beams_copy_pages_on_every_rank(llama: LoadedModel, ranks: ThreadRanks, grammar: str | None) -> None:
    found, scores = [], []
    for model in (llama, ranks.model):
        with guided_engine(model, with_drafts(7 if grammar else 0, **PATIENT)) as (engine, _):
            answer = search_all(engine, [search(tokens(21, 3), max_tokens=24, grammar=grammar)])[0]
            found.append((answer.tokens, answer_all(engine, [MIX[0]()])))
            scores.append(answer.scores)
    assert found[1] == found[0]
    np.testing.assert_allclose(scores[1], scores[0], atol=1e-4)


def test_numbers_are_those_of_the_whole_model_and_other_outputs_are_not_offered(
    llama: LoadedModel, ranks: ThreadRanks
) -> None:
    names = (LOGITS, "hidden_states.0", "hidden_states.2")
    assert set(ranks.model.outputs) == {LOGITS, *(f"hidden_states.{layer}" for layer in range(3))}
    found, rows, scores = [], [], []
    for model in (llama, ranks.model):
        tensors = ask(tokens(20, 2), max_tokens=8)
        tensors.change(
            tensors=tuple(WantedOutput(name, name, model.outputs[name], context=True, answer=True) for name in names)
        )
        scored = ask(tokens(70, 4, repeat=10), max_tokens=6, ignore_eos=True)
        scored.change(prompt_logprobs=3)
        with unguided_engine(model, with_drafts(7)) as engine:
            found.append(answer_all(engine, [tensors, scored, ask(tokens(12, 2), max_tokens=20)]))
        rows.append(np.concatenate([part.data.view("<f4").ravel() for e in tensors.events for part in e.outputs]))
        assert scored.events[0].prompt_logprobs is not None
        scores.append(np.asarray(scored.events[0].prompt_logprobs.logprob_N))
    assert found[0] == found[1]
    assert len(scores[0]) == 69
    np.testing.assert_allclose(rows[1], rows[0], atol=1e-4)
    np.testing.assert_allclose(scores[1], scores[0], atol=1e-4)


def test_processed_tokens_and_log_probabilities_are_those_of_one_rank(llama: LoadedModel, ranks: ThreadRanks) -> None:
    found, logprobs = [], []
    for model, num_drafts in ((llama, 0), (ranks.model, 0), (ranks.model, 7)):
        with guided_engine(model, with_drafts(num_drafts, logits_processors=SETTING, **PATIENT)) as (engine, _):
            answers = [processed(engine.processors, make(), *uses) for make, uses in PROCESSED]
            found.append(answer_all(engine, answers))
            logprobs.append([entry.logprob for entry in answers[-1].logprobs])
    assert found == [found[0]] * 3
    assert len(logprobs[0]) > 5
    np.testing.assert_allclose(logprobs[1:], [logprobs[0]] * 2, atol=1e-4)


def test_pages_of_an_earlier_prompt_are_used_again_on_every_rank(llama: LoadedModel, ranks: ThreadRanks) -> None:
    def turns() -> list[Answer]:
        prompts = [tokens(50, 7) + tokens(20, seed) for seed in (1, 1, 2)]
        return [ask(prompt, max_tokens=24, temperature=0.7, seed=4, ignore_eos=True) for prompt in prompts]

    with unguided_engine(llama, with_drafts(0, prefix_cache=False)) as engine:
        expected = answer_each(engine, turns())
    answers = turns()
    with unguided_engine(ranks.model, with_drafts(7)) as engine:
        assert answer_each(engine, answers) == expected
    assert [answer.telemetry.cached_tokens for answer in answers] == [0, 64, 48]


@pytest.mark.parametrize("num_drafts", [0, pytest.param(7, marks=pytest.mark.slow)])
def test_a_killed_grammar_process_changes_no_token(
    ranks: ThreadRanks, expected: list[list[int]], num_drafts: int
) -> None:
    with guided_engine(ranks.model, with_drafts(num_drafts, **PATIENT)) as (engine, grammar):
        reached, made = threading.Event(), [make() for make in MIX]

        def die(record: Record) -> None:
            if record.commit_pos + len(record.committed) >= 15:
                reached.set()

        grammar.sidecar.before = die
        for answer in made:
            answer.submit(engine)
        assert reached.wait(PATIENCE_S)
        grammar.kill_sidecar()
        engine.grammar_lost()
        grammar.start_sidecar()
        engine.grammar_restored()
        assert [answer.wait().tokens for answer in made] == expected


@pytest.mark.slow
@pytest.mark.parametrize("drafts_by", ["same", "decoupled", "circle eagle3"])
def test_a_drafting_network_on_rank_0_drafts_for_all(
    llama: LoadedModel, ranks: ThreadRanks, draft_models: dict[str, str], drafts_by: str
) -> None:
    cases = [partial(ask, tokens(12, 2), max_tokens=30), partial(ask, tokens(20, 3), max_tokens=30, temperature=0.7)]
    with unguided_engine(llama, with_drafts(0)) as engine:
        expected = answer_all(engine, [make() for make in cases])
    settings = with_drafts(3, draft_model=draft_models["same" if drafts_by == "decoupled" else drafts_by])
    if drafts_by == "decoupled":
        settings = replace(settings, drafter="decoupled")
    with unguided_engine(ranks.model, settings) as engine:
        assert answer_all(engine, [make() for make in cases]) == expected
        assert engine.stats().accepted_draft_tokens > 5
