"""Tensors of the embedded model, through the client of the example."""

from __future__ import annotations

import runpy

import pytest

from tests.docs.pages import ROOT


@pytest.mark.model
def test_the_example_of_additional_outputs_returns_logits_and_states() -> None:
    first, second = runpy.run_path(str(ROOT / "examples/executor/additional_outputs.py"))["main"]()
    assert first.token_ids == second.token_ids
    for answer in (first, second):
        logits, states = (answer.outputs[name] for name in ("generation_logits", "hidden_states.30"))
        prompt, tokens = answer.usage.prompt_tokens, answer.token_ids
        assert logits.start == prompt - 1
        assert tuple(logits.numpy().argmax(-1)) == tokens, "a quantised model on a CPU has the logits of its steps"
        assert states.start == answer.usage.cached_tokens
        assert states.shape == (prompt + len(tokens) - 1 - states.start, 576)
    assert first.usage.cached_tokens == 0 < second.usage.cached_tokens
