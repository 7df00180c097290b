"""Trees, heads, beams, processors and tensors on a CUDA device have the tokens and the numbers of a CPU in float32."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_engine.api.errors import ProcessorFailed
from gpu_engine.api.output_tensors import WantedOutput
from tests.gpu.on_gpu import GUIDED, SYNCS, UNGUIDED, Models, on_gpu
from tests.gpu_engine import eagle
from tests.gpu_engine.beams import search, search_all
from tests.gpu_engine.harness import (
    Answer,
    answer_all,
    answer_each,
    ask,
    executor_of,
    tokens,
    unguided_engine,
    with_drafts,
)
from tests.gpu_engine.processor_cases import HERE, SETTING, processed
from tests.gpu_engine.toy_sidecar import guided_engine

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def head(models: Models, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of an EAGLE3 head of random weights."""
    folder = tmp_path_factory.mktemp("random") / "eagle3"
    eagle.save_random(Path(models.cpu.name), folder)
    return str(folder)


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize(
    ("drafts_by", "tree", "num_drafts"), [("lookup", "on", 5), ("head", "off", 3), ("head", "on", 15)]
)
def test_trees_and_heads_change_no_token(
    models: Models, head: str, unguided_tokens: list[list[int]], drafts_by: str, tree: str, num_drafts: int, eager: bool
) -> None:
    fields = {"draft_model": head} if drafts_by == "head" else {}
    settings = on_gpu(num_drafts, draft_tree=tree, enforce_eager=eager, **fields)
    with unguided_engine(models.gpu, settings) as engine:
        assert answer_all(engine, [make() for make in UNGUIDED]) == unguided_tokens
        assert engine.stats().accepted_draft_tokens > 0


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("drafts_by", ["lookup", "head"])
def test_trees_under_a_grammar_change_no_token(
    models: Models, head: str, guided_tokens: list[list[int]], drafts_by: str, sync: str
) -> None:
    fields = {"draft_model": head} if drafts_by == "head" else {}
    with guided_engine(models.gpu, on_gpu(7, draft_tree="on", sync=sync, **fields)) as (engine, _):
        assert answer_all(engine, [make() for make in GUIDED]) == guided_tokens
        assert engine.stats().deferred_rows == 0


def test_searches_are_those_of_a_cpu(models: Models) -> None:
    free = partial(search, tokens(17, 2), 3, max_tokens=20, repetition_penalty=1.2, logit_bias=((65, 1.5),))
    under_grammar = partial(search, tokens(17, 3), 3, max_tokens=30, grammar="20")
    with guided_engine(models.cpu, with_drafts(0)) as (engine, _):
        expected = search_all(engine, [free(), under_grammar()])
    with guided_engine(models.gpu, on_gpu(3, max_batch_size=8)) as (engine, _):
        found = search_all(engine, [free(), under_grammar()])
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.scores == pytest.approx(theirs.scores, rel=1e-4)


def test_captured_processors_are_a_part_of_the_graph_and_others_leave_it(models: Models) -> None:
    ngrams = "ngrams=gpu_engine.processors.ngrams:NoRepeatedNgrams"
    captured = f"captured={HERE}:CapturedWaves", f"nan={HERE}:CapturedNaN", ngrams
    others = tuple(entry for entry in SETTING if "aptured" not in entry)
    circle = partial(ask, [*range(196, 203)] * 2, max_tokens=20)
    uses: list[tuple[tuple[str, ...], bool, list[tuple[tuple[str, str], ...]]]] = [
        (captured, False, [(("captured", '{"strength": 9.0}'),), (("ngrams", '{"size": 2}'),), ()]),
        (others, True, [(("waves", '{"strength": 0.5}'), ("batch", "")), (("batch", ""),), ()]),
    ]
    for setting, leaves, each in uses:
        with unguided_engine(models.cpu, with_drafts(0, logits_processors=setting)) as engine:
            expected = answer_each(engine, [processed(engine.processors, circle(), *use) for use in each])
        with unguided_engine(models.gpu, on_gpu(3, logits_processors=setting)) as engine:
            assert answer_all(engine, [processed(engine.processors, circle(), *use) for use in each]) == expected
            counts = executor_of(engine).runner.launcher.stats  # type: ignore[attr-defined]
            assert (counts.eager_steps > 0) == leaves
            assert counts.replays > 0
            if not leaves:
                broken = processed(engine.processors, circle(), ("nan", '{"after": 198}'))
                answer_all(engine, [broken])
                assert isinstance(broken.error, ProcessorFailed)


def test_log_probabilities_of_prompts_and_tensors_are_those_of_a_cpu(models: Models) -> None:
    names = ("logits", "hidden_states.1", "model.layers.0.mlp")
    wanted = tuple(WantedOutput(name, name, models.cpu.outputs[name], context=True, answer=True) for name in names)

    def made() -> list[Answer]:
        answers = [ask(tokens(n, n), max_tokens=12, logprobs=3, ignore_eos=True) for n in (70, 5)]
        for answer in answers:
            answer.change(prompt_logprobs=3, tensors=wanted)
        return answers

    def rows(answer: Answer, name: str) -> Any:
        parts = [each for event in answer.events for each in event.outputs if each.name == name]
        return np.concatenate([part.data for part in parts]).view(np.float32)

    expected, found = made(), made()
    with unguided_engine(models.cpu, with_drafts(0)) as engine:
        answer_all(engine, expected)
    with unguided_engine(models.gpu, on_gpu(3)) as engine:
        assert answer_all(engine, found) == [answer.tokens for answer in expected]
    for ours, theirs in zip(found, expected, strict=True):
        (got,), (want,) = (
            [event.prompt_logprobs for event in each.events if event.prompt_logprobs is not None]
            for each in (ours, theirs)
        )
        assert got.logprob_N == pytest.approx(want.logprob_N, abs=1e-3)
        for name in names:
            np.testing.assert_allclose(rows(ours, name), rows(theirs, name), atol=1e-3)
