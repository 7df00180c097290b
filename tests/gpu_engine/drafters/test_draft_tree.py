"""The grammar chooses among the lookup's candidates: answers are those of one token a step, and drafts are legal."""

from __future__ import annotations

import pytest

from gpu_engine.model.loader import LoadedModel
from tests.gpu_engine.core.test_guided import made as made_of_toys
from tests.gpu_engine.harness import Answer, answer_all, answer_each, answer_staggered, ask, config, with_drafts
from tests.gpu_engine.library_sidecars import EACH_LIBRARY, PATIENT, Sidecars
from tests.gpu_engine.toy_sidecar import guided_engine

SCHEMA = (
    'JSON_SCHEMA COMPACT {"type":"array","minItems":4,"maxItems":6,"items":{"type":"object","properties":'
    '{"kind":{"enum":["cat","car","dog"]},"n":{"type":"integer","minimum":1,"maximum":40}},"required":["kind","n"]}}'
)
PROMPT = b'kind: dog, n: 12; "kind" is "cow" or "cab", "n":"7"; [{"kind":"cat","n":7},{"kind":"cab"}]'
"""Text near the answers, some of it illegal in them."""


def made() -> list[Answer]:
    """Return greedy and sampled requests; some end near their limit."""
    return [
        ask(list(PROMPT), grammar=SCHEMA, max_tokens=(100, 70)[number % 2], temperature=0.8 * (number > 1), seed=number)
        for number in range(4)
    ]


@pytest.fixture(scope="module", params=EACH_LIBRARY)
def sidecars(request: pytest.FixtureRequest, llama: LoadedModel) -> Sidecars:
    return Sidecars(request.param, llama)


@pytest.fixture(scope="module")
def expected(sidecars: Sidecars) -> list[list[int]]:
    """Return the answers of an engine that emits one token a step."""
    answers = made()
    with sidecars.engine(with_drafts(0, **PATIENT)) as (engine, _):
        answer_each(engine, answers)
    return [answer.tokens for answer in answers]


@pytest.mark.parametrize(("num_drafts", "max_jump_forward"), [(3, 0), (7, 15)])
def test_tokens_do_not_depend_on_what_the_grammar_chooses(
    sidecars: Sidecars, expected: list[list[int]], num_drafts: int, max_jump_forward: int
) -> None:
    tree = {"draft_tree": "on", "step_rows": 64, **PATIENT}
    settings = config(num_draft_tokens=num_drafts, jump_forward_tokens=max_jump_forward, **tree)
    with sidecars.engine(settings) as (engine, worker):
        answers = made()
        assert answer_all(engine, answers) == expected
        assert engine.stats().deferred_rows == 0
    assert worker.stats()["chosen_tokens"] > 20


def test_without_trees_the_grammar_chooses_nothing(sidecars: Sidecars, expected: list[list[int]]) -> None:
    with sidecars.engine(config(step_rows=64, draft_tree="off", **PATIENT)) as (engine, worker):
        assert answer_all(engine, made()) == expected
    assert worker.stats()["chosen_tokens"] == 0


def test_auto_lets_the_grammar_choose_for_a_sequence_alone(sidecars: Sidecars, expected: list[list[int]]) -> None:
    with sidecars.engine(config(step_rows=64, **PATIENT)) as (engine, worker):
        nodes_S, alone, together = engine._loop.executor.slot_writer.slot.num_nodes_S, list[int](), list[int]()
        first, second, third, _ = made()
        first.on_event = lambda _: alone.append(int(nodes_S.max()))

        def watch(_: Answer) -> None:
            if third.events and not third.over:  # so both were in this step, and in the one before it
                together.append(int(nodes_S.max()))

        second.on_event = watch
        assert answer_each(engine, [first]) == expected[:1]
        assert answer_all(engine, [second, third]) == expected[1:3]
    assert worker.stats()["chosen_tokens"] > 5
    assert any(alone)
    assert len(together) > 5
    assert not any(together)


@pytest.mark.parametrize(
    "num_drafts", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(7, marks=pytest.mark.slow)]
)
def test_slots_that_change_hands_keep_their_own_trees(llama: LoadedModel, num_drafts: int, overlap: bool) -> None:
    answers = made_of_toys()
    with guided_engine(llama, with_drafts(0, row_timeout_ms=2000.0)) as (engine, _):
        answer_each(engine, answers)
    wanted = [answer.tokens for answer in answers]
    waits = {"row_timeout_ms": 2000.0, "draft_timeout_ms": 2000.0}
    settings = with_drafts(num_drafts, overlap=overlap, draft_tree="on", **waits)
    with guided_engine(llama, settings) as (engine, grammar):
        assert answer_staggered(engine, made_of_toys()) == wanted
        assert grammar.sidecar.chosen > 0
        assert not grammar.sidecar.problems
