"""Beam searches in an engine: equal to transformers', in any company, and nothing is lost or leaks."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from gpu_engine.api.errors import InvalidRequest
from gpu_engine.api.request import EarlyStopping, FinishReason
from gpu_engine.core.engine import Engine
from gpu_engine.model.embedded import ensure_embedded
from gpu_engine.model.loader import LoadedModel, load_model
from shared_mem.layout import Stage
from tests.fakes import EOS
from tests.gpu_engine.beams import BeamAnswer, of_transformers, search, search_all
from tests.gpu_engine.harness import (
    UNHURRIED_MS,
    Hold,
    answer_all,
    ask,
    config,
    settle,
    tokens,
    unguided_engine,
    until_false,
    with_drafts,
)
from tests.gpu_engine.toy_sidecar import Automaton, ToyGrammar, guided_engine

SEARCHES = [
    partial(
        search,
        tokens(5 + 3 * i, i),
        2 + i % 3,
        penalty=(1.0, 0.0, 2.0, -1.0)[i % 4],
        stopping=list(EarlyStopping)[i % 3],
        max_tokens=12 + i,
    )
    for i in range(12)
]
GUIDED = [
    partial(search, tokens(20, 3), 4, grammar="9", max_tokens=30),
    partial(search, tokens(7, 4), 2, grammar="14", max_tokens=30, penalty=0.0, stopping=EarlyStopping.AT_ONCE),
    partial(search, tokens(33, 5), 3, grammar="30", max_tokens=11),
]


@pytest.fixture(scope="module")
def model(saved: Callable[[str], Path]) -> LoadedModel:
    """A tiny model whose answers end, in float32."""
    return load_model(config(model=str(saved("qwen2"))))


@pytest.fixture(scope="module")
def net(saved: Callable[[str], Path]) -> Any:
    """The same model in transformers."""
    return AutoModelForCausalLM.from_pretrained(saved("qwen2"), dtype=torch.float32)


def toy_engine(
    llama: LoadedModel, num_drafts: int = 0, **fields: Any
) -> AbstractContextManager[tuple[Engine, ToyGrammar]]:
    return guided_engine(llama, with_drafts(num_drafts, row_timeout_ms=UNHURRIED_MS, **fields))


@pytest.fixture(scope="module")
def first_alone(llama: LoadedModel) -> list[tuple[list[list[int]], list[float | None]]]:
    """The first guided search, undisturbed."""
    with toy_engine(llama) as (engine, _):
        return results(search_all(engine, [GUIDED[0]()]))


def results(answers: list[BeamAnswer]) -> list[tuple[list[list[int]], list[float | None]]]:
    return [(answer.tokens, answer.scores) for answer in answers]


def test_searches_equal_those_of_transformers(model: LoadedModel, net: Any) -> None:
    answers = [make() for make in SEARCHES]
    with unguided_engine(model, with_drafts(0, max_batch_size=8)) as engine:
        search_all(engine, answers)
    for answer in answers:
        wanted, scores = of_transformers(net, answer.request)
        assert answer.tokens == wanted
        assert answer.scores == pytest.approx(scores, rel=1e-5)
        ends = [FinishReason.STOP if ids[-1] == EOS else FinishReason.LENGTH for ids in wanted]
        assert answer.finishes == ends


def test_penalties_bans_and_min_tokens_are_transformers_processors(model: LoadedModel, net: Any) -> None:
    sampling = {"repetition_penalty": 1.3, "bad_token_ids": (EOS - 1, 65), "min_tokens": 6}
    answer = search(tokens(12, 3), 3, max_tokens=16, bad_words=((10, 11), (20, 21)), **sampling)
    with unguided_engine(model, with_drafts(0)) as engine:
        search_all(engine, [answer])
    bad = [[EOS - 1], [65], [10, 11], [20, 21]]
    wanted, scores = of_transformers(net, answer.request, repetition_penalty=1.3, min_new_tokens=6, bad_words_ids=bad)
    assert answer.tokens == wanted
    assert answer.scores == pytest.approx(scores, rel=1e-5)


@pytest.mark.parametrize("num_drafts", [pytest.param(0, marks=pytest.mark.slow), 7])
def test_a_search_does_not_depend_on_company(model: LoadedModel, num_drafts: int, overlap: bool) -> None:
    """Beams of different width and ordinary sequences run in one batch; none of them changes another."""
    widths = [partial(search, tokens(9, 1), 4), partial(search, tokens(30, 2), 2), partial(search, tokens(17, 3), 3)]
    others = [partial(ask, tokens(21, 5, repeat=8), ignore_eos=True), partial(ask, tokens(8, 6), temperature=0.7)]
    with unguided_engine(model, with_drafts(0, max_batch_size=4)) as engine:
        alone = [results(search_all(engine, [make()]))[0] for make in widths]
        plain = [answer_all(engine, [make()])[0] for make in others]
    with unguided_engine(model, with_drafts(num_drafts, max_batch_size=12, overlap=overlap)) as engine:
        searches, answers = [make() for make in widths], [make() for make in others]
        for answer in answers:
            answer.submit(engine)
        found = results(search_all(engine, searches))
        assert [answer.wait().tokens for answer in answers] == plain
        assert [ids for ids, _ in found] == [ids for ids, _ in alone]
        for (_, scores), (_, wanted) in zip(found, alone, strict=True):
            assert scores == pytest.approx(wanted, rel=1e-5)
        assert engine.stats().preemptions == 0


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_group_is_preempted_and_resumed_whole(model: LoadedModel, prefix_cache: bool) -> None:
    """Pages are too few for both searches at their full length; the younger one waits, and goes on where it was."""
    makes = [
        partial(search, tokens(20, 1), 4, max_tokens=40, ignore_eos=True),
        partial(search, tokens(22, 2), 4, max_tokens=40, ignore_eos=True),
    ]
    small = {"max_batch_size": 8, "kv_cache_tokens": 144, "max_model_len": 96, "prefix_cache": prefix_cache}
    with unguided_engine(model, with_drafts(0, **{**small, "kv_cache_tokens": 0})) as engine:
        alone = [results(search_all(engine, [make()]))[0] for make in makes]
    with unguided_engine(model, with_drafts(0, **small)) as engine:
        found = results(search_all(engine, [make() for make in makes]))
        assert engine.stats().preemptions >= 4
    assert [ids for ids, _ in found] == [ids for ids, _ in alone]


def test_beams_share_the_pages_of_their_prompt(model: LoadedModel) -> None:
    with unguided_engine(model, with_drafts(0)) as engine:
        search_all(engine, [search(tokens(160, 1), 4, max_tokens=90, ignore_eos=True)])
        settle(engine)
        iterations, _ = engine.iterations.since(0)
    # Ten full pages are shared. Each beam has at most those of its answer, and of the next step.
    assert 10 + 3 < max(each.pages_used for each in iterations) <= 10 + 4 * 6


def test_guided_beams_are_legal_and_do_not_depend_on_company(llama: LoadedModel, overlap: bool) -> None:
    with toy_engine(llama) as (engine, grammar):
        alone = [results(search_all(engine, [make()]))[0] for make in GUIDED]
        assert grammar.forks
    with toy_engine(llama, 7, max_batch_size=10, overlap=overlap) as (
        engine,
        grammar,
    ):
        answers, other = [make() for make in GUIDED], ask(tokens(30, 1, repeat=10), grammar="50", max_tokens=60)
        other.submit(engine)
        found = results(search_all(engine, answers))
        other.wait()
        # Each search binds one matcher; every other one is a copy.
        assert len(grammar.opened) == len(GUIDED) + 1
        assert engine.stats().deferred_rows == 0
    assert [ids for ids, _ in found] == [ids for ids, _ in alone]
    for answer in answers:
        automaton = Automaton.parse(answer.request.grammar.source)  # type: ignore[union-attr]
        assert len({tuple(ids) for ids in answer.tokens}) == len(answer.tokens)
        assert all(automaton.allows(ids) for ids in answer.tokens)
        assert answer.scores == sorted(answer.scores, reverse=True)  # type: ignore[type-var]
    assert answers[0].finishes == [FinishReason.STOP] * 4
    assert answers[2].finishes == [FinishReason.GRAMMAR_INCOMPLETE] * 3


def test_searches_whose_beams_do_not_all_end_with_an_answer(llama: LoadedModel) -> None:
    """Fewer answers than beams, a matcher in error, a dead end, and a grammar that is refused."""
    sources = ("0", "9 error 3", "9 dead 3", "x")
    few, failed, stuck, wrong = (search(tokens(9, 1), 4, grammar=source, max_tokens=5) for source in sources)
    with toy_engine(llama) as (engine, _):
        search_all(engine, [few, failed, stuck, wrong])
    assert few.tokens == [[EOS], [], [], []]
    assert few.finishes == [FinishReason.STOP, *[FinishReason.GRAMMAR_ERROR] * 3]
    assert [score is None for score in few.scores] == [False, True, True, True]
    assert failed.finishes == stuck.finishes == [FinishReason.GRAMMAR_ERROR] * 4
    assert isinstance(wrong.error, InvalidRequest)


@pytest.mark.parametrize("at", [1, 4, 9])
def test_beams_survive_a_kill_of_the_grammar_process(
    llama: LoadedModel, first_alone: Any, at: int, overlap: bool
) -> None:
    """The n-th record of the searches is not answered, because the process is gone; matchers are built again."""
    with toy_engine(llama, overlap=overlap) as (engine, grammar):
        seen, dead = [0], threading.Event()

        def die(record: object) -> None:
            seen[0] += record.stage == Stage.VERIFY  # type: ignore[attr-defined]
            if seen[0] == at and not dead.is_set():
                dead.set()
                grammar.sidecar.stopping = True

        grammar.sidecar.before = die
        answer = GUIDED[0]()
        answer.submit(engine)
        until_false(lambda: not dead.is_set())
        grammar.lose_sidecar(engine)
        engine.forgive_grammar_end()
        grammar.restore_sidecar(engine)
        assert results([answer.wait()]) == first_alone


def test_a_lost_fork_is_bound_again(llama: LoadedModel, first_alone: Any) -> None:
    """A fork that is overwritten before it is read leaves no matcher that the next record fits."""
    with toy_engine(llama) as (engine, grammar):
        number = itertools.count()
        grammar.sidecar.loses = lambda record: next(number) in (1, 2)
        assert results(search_all(engine, [GUIDED[0]()])) == first_alone
        assert len(grammar.opened) > 1


@pytest.mark.parametrize("guided", [False, True])
def test_a_search_can_be_aborted_and_dropped(llama: LoadedModel, guided: bool) -> None:
    with toy_engine(llama) as (engine, _):
        options = {"grammar": "200"} if guided else {"ignore_eos": True}
        answer = search(tokens(9, 1), 3, max_tokens=200, **options)
        hold = Hold(engine, lambda: engine.stats().steps >= 5)
        answer.submit(engine)
        with hold.reached():
            assert engine.stats().running == 3
            assert engine.abort(answer.request.request_id)
        assert answer.wait().finishes == [FinishReason.ABORTED] * 3
        dropped = search(tokens(9, 2), 3, max_tokens=200, **options)
        hold = Hold(engine, lambda: engine.stats().steps >= 12)
        dropped.submit(engine)
        with hold.reached():
            engine.drop(dropped.request)
        settle(engine)
        assert dropped.events == []


def test_searches_that_cannot_run_are_refused_by_name(model: LoadedModel) -> None:
    with unguided_engine(model, with_drafts(0, kv_cache_tokens=256)) as engine:
        for answer, problem in (
            (search([1], 5), "max_batch_size"),
            (search([1], 4, max_tokens=200), "kv_cache_tokens"),
            (search([1], 4, stop_token_ids=tuple(range(17))), "stop tokens"),
        ):
            with pytest.raises(InvalidRequest, match=problem) as raised:
                answer.submit(engine)
            assert raised.value.field == "beam_search.beam_width"


def test_log_probabilities_of_the_prompt_come_with_the_best_sequence(model: LoadedModel) -> None:
    plain = ask(tokens(40, 1), max_tokens=4, prompt_logprobs=2)
    answer = search(tokens(40, 1), 2, max_tokens=4, prompt_logprobs=2)
    with unguided_engine(model, with_drafts(0)) as engine:
        answer_all(engine, [plain])
        search_all(engine, [answer])
    wanted, found = plain.events[0].prompt_logprobs, answer.events[0].prompt_logprobs
    assert wanted is not None
    assert found is not None
    assert found.logprob_N.tolist() == wanted.logprob_N.tolist()
    assert answer.events[1].prompt_logprobs is None


PROMPTS = [f"{begin} {topic}" for begin in ("The history of", "How to learn") for topic in ("the sea", "bread")]


@pytest.mark.slow
@pytest.mark.model
def test_searches_of_the_embedded_model_equal_those_of_transformers() -> None:
    """Ten tokens: transformers runs the prompts one by one, and all of its weights for each token."""
    folder = ensure_embedded()
    served = load_model(config(model=str(folder), max_model_len=128, num_threads=2))
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    encode = served.tokenizer.backend_tokenizer.encode
    answers = [
        search(
            list(encode(prompt).ids),
            (4, 2, 5)[i % 3],
            penalty=(1.0, 0.5, 2.0)[i % 3],
            stopping=list(EarlyStopping)[i % 3],
            max_tokens=10,
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    with unguided_engine(served, with_drafts(0, max_batch_size=12, max_model_len=128)) as engine:
        search_all(engine, answers)
    for answer in answers:
        wanted, scores = of_transformers(net, answer.request, served.eos_token_ids)
        assert answer.tokens == wanted
        assert answer.scores == pytest.approx(scores, rel=1e-5)
