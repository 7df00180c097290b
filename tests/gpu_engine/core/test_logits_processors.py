"""Logits processors on the engine's thread: what they see, and an error that ends only its request.

Not responsible for: drafts and events that change none of their tokens (see tests/gpu_engine/test_lossless.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_engine.api.errors import ProcessorFailed
from gpu_engine.api.output_tensors import LOGITS, WantedOutput
from gpu_engine.api.request import FinishReason
from gpu_engine.model.loader import LoadedModel, load_model
from tests.gpu_engine.harness import (
    Answer,
    answer_all,
    answer_each,
    ask,
    tokens,
    unguided_engine,
    with_drafts,
)
from tests.gpu_engine.processor_cases import SETTING, processed
from tests.gpu_engine.toy_sidecar import guided_engine

NAMED = {"logits_processors": SETTING}
REPEATING = partial(ask, [*range(196, 203)] * 2, max_tokens=30)
"""A prompt that the tiny model goes on with; drafts of it are right."""


def test_bfloat16_logits_are_processed_in_float32(saved: Callable[[str], Path]) -> None:
    settings = {"model": str(saved("llama")), "dtype": "bfloat16", **NAMED}
    model = load_model(with_drafts(3, **settings))
    found = []
    for num_drafts in (0, 3):
        with unguided_engine(model, with_drafts(num_drafts, **settings)) as engine:
            answers = [
                processed(engine.processors, REPEATING(logprobs=1), (name, '{"strength": 0.5}'))
                for name in ("waves", "batch", "captured")
            ]
            found.append((answer_all(engine, answers), [answer.logprobs for answer in answers]))
    assert found[0] == found[1]


def test_three_kinds_of_one_function_give_the_same_tokens_and_are_called_only_where_they_are_named(
    llama: LoadedModel,
) -> None:
    with unguided_engine(llama, with_drafts(3, **NAMED)) as engine:
        single, batch, captured = (
            answer_all(engine, [processed(engine.processors, REPEATING(), (name, ""))])
            for name in ("waves", "batch", "captured")
        )
        assert single == batch == captured
        waves: Any = engine.processors.by_name["waves"].processor
        calls = waves.calls
        plain = answer_all(engine, [REPEATING() for _ in range(6)])
        assert waves.calls == calls > 0
    assert plain[0] != single[0]


def test_log_probabilities_and_logits_are_the_model_s_own(llama: LoadedModel) -> None:
    """A bias and a processor force the same tokens; both answers have the numbers that the model had."""

    def rows(answer: Answer) -> np.ndarray[Any, Any]:
        return np.concatenate([part.data for event in answer.events for part in event.outputs]).view("<f4")

    for num_drafts in (0, 3):
        with unguided_engine(llama, with_drafts(num_drafts, prefix_cache=False, **NAMED)) as engine:
            by_bias = ask(tokens(9, 1), logit_bias=((7, 100.0),), max_tokens=8, logprobs=3, ignore_eos=True)
            forced = ask(tokens(9, 1), max_tokens=8, logprobs=3, ignore_eos=True)
            processed(engine.processors, forced, ("only", '{"token": 7}'))
            for answer in (by_bias, forced):
                spec = llama.outputs[LOGITS]
                answer.change(tensors=(WantedOutput(LOGITS, LOGITS, spec, context=True, answer=True),))
            assert answer_all(engine, [by_bias, forced]) == [[7] * 8] * 2
        assert forced.logprobs == by_bias.logprobs
        np.testing.assert_allclose(rows(forced), rows(by_bias), atol=1e-4)
        assert rows(forced)[-1].argmax() != 7


def test_a_processor_sees_the_ids(llama: LoadedModel) -> None:
    with unguided_engine(llama, with_drafts(3, **NAMED)) as engine:
        answers = []
        for index, client in ((0, "65"), (2, "65"), (0, "70")):
            answer = ask(tokens(9, 1), max_tokens=4, ignore_eos=True, client_id=client, index=index)
            answers.append(processed(engine.processors, answer, ("by_client", "")))
        assert answer_all(engine, answers) == [[65] * 4, [67] * 4, [70] * 4]


# -- what goes wrong ---------------------------------------------------------------------------------------------------

PROBLEMS = {
    "raise": "raised RuntimeError",
    "shape": r"returned \[1, 299\] float32 on cpu, must be \[1, 300\] float32 on cpu",
    "dtype": r"returned \[1, 300\] float64 on cpu, must be \[1, 300\] float32 on cpu",
    "none": "returned NoneType, must be a tensor",
    "nan": r"returned NaN or \+inf",
    "inf": r"returned NaN or \+inf",
}


@pytest.mark.parametrize("how", PROBLEMS)
@pytest.mark.parametrize("name", ["wrong", "wrong_batch"])
def test_an_error_ends_its_own_request_after_the_tokens_before_it(llama: LoadedModel, how: str, name: str) -> None:
    """The tiny model goes round in a circle of seven; the processor fails after the second 201."""
    ends = []
    for num_drafts in (0, 7):
        with unguided_engine(llama, with_drafts(num_drafts, **NAMED)) as engine:
            alone = answer_each(engine, [REPEATING()])[0]
            broken, *others = (REPEATING() for _ in range(3))
            processed(engine.processors, others[0], (name, '{"after": []}'))
            processed(engine.processors, broken, (name, f'{{"after": [{alone[5]}], "how": "{how}"}}'))
            answer_all(engine, [others[0], broken, others[1]])
            assert [other.tokens for other in others] == [alone, alone]
        assert isinstance(broken.error, ProcessorFailed)
        with pytest.raises(ProcessorFailed, match=f"logits_processors: {name} {PROBLEMS[how]}; see the server's log"):
            raise broken.error
        ends.append(broken.tokens)
    assert ends[0] == ends[1] == alone[: alone.index(alone[5]) + 1]


def test_an_error_after_a_wrong_draft_is_none(llama: LoadedModel) -> None:
    """The drafter proposes 201 again and again, and the processor forbids it: its rows fail, and none is reached."""
    found = []
    for num_drafts in (0, 7):
        with unguided_engine(llama, with_drafts(num_drafts, **NAMED)) as engine:
            use = ("wrong", '{"after": [201], "how": "raise", "never": [201]}')
            answer = processed(engine.processors, REPEATING(), use)
            found.append(answer_all(engine, [answer]))
            stats = engine.stats()
        assert answer.finish is FinishReason.LENGTH
    assert found[0] == found[1]
    assert stats.draft_tokens > stats.accepted_draft_tokens


def test_an_error_of_a_guided_request_closes_its_matcher(llama: LoadedModel) -> None:
    with guided_engine(llama, with_drafts(3, row_timeout_ms=2000.0, **NAMED)) as (engine, _):
        alone, good, broken = (ask(tokens(30, 1), grammar="20", max_tokens=60) for _ in range(3))
        (expected,) = answer_all(engine, [alone])
        use = ("wrong", f'{{"after": [{expected[8]}], "how": "raise"}}')
        answer_all(engine, [good, processed(engine.processors, broken, use)])
    assert good.tokens == expected
    assert isinstance(broken.error, ProcessorFailed)
    assert broken.tokens == expected[: expected.index(expected[8]) + 1]


def test_a_processor_that_leaves_no_token_ends_the_answer(llama: LoadedModel) -> None:
    with unguided_engine(llama, with_drafts(3, **NAMED)) as engine:
        answer = ask(tokens(9, 1), bad_token_ids=(7,))
        answer_all(engine, [processed(engine.processors, answer, ("only", '{"token": 7}'))])
    assert (answer.tokens, answer.finish) == ([], FinishReason.LENGTH)
