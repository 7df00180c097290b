"""Tensors of the embedded model, through the executor of the example."""

from __future__ import annotations

import runpy

import pytest

from tests.docs.pages import ROOT
from tests.e2e.conftest import RunningServer


@pytest.mark.model
def test_the_example_of_additional_outputs_returns_logits_and_states(server: RunningServer) -> None:
    first, second = runpy.run_path(str(ROOT / "examples/executor/additional_outputs.py"))["main"]([server.address])
    assert first.output_token_ids == second.output_token_ids
    for result in (first, second):
        logits, states = result.generation_logits, result.additional_outputs["hidden_states.30"]
        prompt, (tokens,) = result.usage.prompt_tokens, result.output_token_ids
        assert logits.start == prompt - 1
        assert tuple(logits.numpy().argmax(-1)) == tokens, "a quantised model on a CPU has the logits of its steps"
        assert states.start == result.usage.cached_tokens
        assert states.shape == (prompt + len(tokens) - 1 - states.start, 576)
    assert first.usage.cached_tokens == 0 < second.usage.cached_tokens
