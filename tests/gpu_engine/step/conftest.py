"""The tokens of the step's requests, made once."""

from __future__ import annotations

import pytest

from gpu_engine.model.loader import LoadedModel
from tests.gpu_engine.harness import answer_each, unguided_engine, with_drafts
from tests.gpu_engine.step.step_requests import made


@pytest.fixture(scope="session")
def step_tokens(llama: LoadedModel) -> list[list[int]]:
    """The tokens of `step_requests.made`: one request at a time, and one token a step."""
    with unguided_engine(llama, with_drafts(0)) as engine:
        return answer_each(engine, made())
