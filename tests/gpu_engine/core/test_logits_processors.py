"""Logits processors on the engine's thread: lossless with drafts, and an error that ends one request alone."""

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
from gpu_engine.core.engine import Engine
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
PATIENT = {"row_timeout_ms": 2000.0}
REPEATING = partial(ask, [*range(196, 203)] * 2, max_tokens=30)
"""A prompt that the tiny model goes on with; drafts of it are right."""

Case = tuple[Callable[[], Answer], tuple[tuple[str, str], ...]]
FREE: list[Case] = [
    (REPEATING, (("waves", '{"strength": 0.5}'),)),
    (partial(ask, tokens(30, 1, repeat=12), max_tokens=24, temperature=0.8, seed=4, top_p=0.9), (("batch", ""),)),
    (partial(ask, tokens(20, 2, repeat=8), max_tokens=24, ignore_eos=True), (("captured", '{"strength": 2.0}'),)),
    (partial(ask, tokens(9, 3), max_tokens=20, temperature=0.6, logprobs=2, ignore_eos=True), (("batch", ""),)),
    (partial(ask, [*range(196, 203)] * 2, max_tokens=20), ()),
    (
        partial(ask, tokens(12, 5), max_tokens=20, repetition_penalty=1.2, logit_bias=((7, 2.0),), bad_token_ids=(9,)),
        (("captured", '{"strength": 1.0}'), ("waves", '{"strength": 1.5}'), ("captured", '{"strength": 0.5}')),
    ),
]
"""More than there are slots."""


def made(engine: Engine, cases: list[Case]) -> list[Answer]:
    return [processed(engine.processors, make(), *uses) for make, uses in cases]


def test_bfloat16_logits_are_processed_in_float32(saved: Callable[[str], Path]) -> None:
    settings = {"model": str(saved("llama")), "dtype": "bfloat16", **NAMED}
    model = load_model(with_drafts(3, **settings))
    found = []
    for num_drafts in (0, 3):
        with unguided_engine(model, with_drafts(num_drafts, **settings)) as engine:
            answers = made(engine, FREE)
            found.append((answer_all(engine, answers), [answer.logprobs for answer in answers]))
    assert found[0] == found[1]


def test_three_kinds_of_one_function_give_the_same_tokens(llama: LoadedModel) -> None:
    with unguided_engine(llama, with_drafts(3, **NAMED)) as engine:
        kinds = [[(REPEATING, ((name, ""),))] for name in ("waves", "batch", "captured")]
        single, batch, captured = (answer_all(engine, made(engine, kind)) for kind in kinds)
    assert single == batch == captured


def test_log_probabilities_are_the_models_own(llama: LoadedModel) -> None:
    """A bias forces the same tokens, and its log-probabilities are the model's own."""
    for num_drafts in (0, 3):
        with unguided_engine(llama, with_drafts(num_drafts, **NAMED)) as engine:
            wanted = {"max_tokens": 8, "logprobs": 3, "ignore_eos": True}
            by_bias = ask(tokens(9, 1), logit_bias=((7, 100.0),), **wanted)
            forced = processed(engine.processors, ask(tokens(9, 1), **wanted), ("only", '{"token": 7}'))
            assert answer_all(engine, [by_bias, forced]) == [[7] * 8] * 2
            assert forced.logprobs == by_bias.logprobs


def logits(answer: Answer) -> np.ndarray[Any, Any]:
    """Return the rows of an answer; asserts that each token but the last, and each of the prompt, has one."""
    parts = [rows for event in answer.events for rows in event.outputs]
    assert [rows.start for rows in parts[1:]] == [rows.end for rows in parts[:-1]]
    cached = answer.telemetry.cached_tokens
    assert (parts[0].start, parts[-1].end) == (cached, len(answer.request.prompt_ids) + len(answer.tokens) - 1)
    return np.concatenate([rows.data for rows in parts]).view("<f4")


def test_logits_are_the_models_own_whatever_a_processor_does(llama: LoadedModel) -> None:
    """A bias and a processor force the same tokens; both answers have the logits that the model had."""
    fields = {"max_tokens": 8, "ignore_eos": True}
    with unguided_engine(llama, with_drafts(3, prefix_cache=False, **NAMED)) as engine:
        by_bias = ask(tokens(9, 1), logit_bias=((7, 100.0),), **fields)
        by_processor = processed(engine.processors, ask(tokens(9, 1), **fields), ("only", '{"token": 7}'))
        spec = llama.outputs[LOGITS]
        for answer in (by_bias, by_processor):
            answer.change(tensors=(WantedOutput(LOGITS, LOGITS, spec, context=True, answer=True),))
        answer_all(engine, [by_bias, by_processor])
    assert by_processor.tokens == by_bias.tokens == [7] * 8
    np.testing.assert_allclose(logits(by_processor), logits(by_bias), atol=1e-4)
    assert logits(by_processor)[-1].argmax() != 7


def test_a_processor_sees_the_ids(llama: LoadedModel) -> None:
    with unguided_engine(llama, with_drafts(3, **NAMED)) as engine:
        answers = []
        for index, client in ((0, "65"), (2, "65"), (0, "70")):
            answer = ask(tokens(9, 1), max_tokens=4, ignore_eos=True)
            answer.change(client_id=client, index=index)
            answers.append(processed(engine.processors, answer, ("by_client", "")))
        assert answer_all(engine, answers) == [[65] * 4, [67] * 4, [70] * 4]


def test_a_request_without_processors_causes_no_call(llama: LoadedModel) -> None:
    with unguided_engine(llama, with_drafts(3, **NAMED)) as engine:
        answer_each(engine, made(engine, [FREE[0]]))
        waves = engine.processors.by_name["waves"].processor
        calls = waves.calls  # type: ignore[union-attr]
        answer_all(engine, [REPEATING() for _ in range(6)])
        assert waves.calls == calls > 0  # type: ignore[union-attr]


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
def test_an_error_ends_its_own_request_behind_the_tokens_before_it(llama: LoadedModel, how: str, name: str) -> None:
    """The tiny model goes round in a circle of seven; the processor fails after the second 201."""
    ends = []
    for num_drafts in (0, 7):
        with unguided_engine(llama, with_drafts(num_drafts, **NAMED)) as engine:
            others = made(engine, [(REPEATING, ((name, '{"after": []}'),)), (REPEATING, ())])
            alone = answer_each(engine, [REPEATING()])[0]
            broken = REPEATING(name="broken")
            processed(engine.processors, broken, (name, f'{{"after": [{alone[5]}], "how": "{how}"}}'))
            answer_all(engine, [others[0], broken, others[1]])
            assert [other.tokens for other in others] == [alone, alone]
        assert isinstance(broken.error, ProcessorFailed)
        broken_at = f"logits_processors: {name} {PROBLEMS[how]}; see the server's log"
        with pytest.raises(ProcessorFailed, match=broken_at):
            raise broken.error
        ends.append(broken.tokens)
    assert ends[0] == ends[1] == alone[: alone.index(alone[5]) + 1]


def test_an_error_behind_a_wrong_draft_is_none(llama: LoadedModel) -> None:
    """The drafter proposes 201 again and again, and the processor forbids it: its rows fail, and none is reached."""
    with unguided_engine(llama, with_drafts(0, **NAMED)) as engine:
        use = ("wrong", '{"after": [201], "how": "raise", "never": [201]}')
        expected = answer_each(engine, made(engine, [(REPEATING, (use,))]))
    with unguided_engine(llama, with_drafts(7, **NAMED)) as engine:
        answers = made(engine, [(REPEATING, (use,))])
        assert answer_each(engine, answers) == expected
        stats = engine.stats()
    assert answers[0].finish is FinishReason.LENGTH
    assert stats.draft_tokens > stats.accepted_draft_tokens


def test_an_error_of_a_guided_request_closes_its_matcher(llama: LoadedModel) -> None:
    with guided_engine(llama, with_drafts(3, **NAMED, **PATIENT)) as (engine, _):
        good, broken = (ask(tokens(30, 1), grammar="20", max_tokens=60) for _ in range(2))
        expected = answer_each(engine, [ask(tokens(30, 1), grammar="20", max_tokens=60)])[0]
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
