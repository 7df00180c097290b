"""Requests that are beam searches, their events, and what transformers answers to the same prompt.

Not responsible for: engines (see harness.py), models (see tiny.py).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gpu_engine.api.errors import LockstepError
from gpu_engine.api.request import BeamParams, EarlyStopping, FinishReason, Request, TokenEvent
from gpu_engine.core.engine import Engine
from tests.fakes import EOS
from tests.gpu_engine.harness import PATIENCE_S, ask, held
from tests.gpu_engine.made_requests import changed

STOPPING = {EarlyStopping.HEURISTIC: False, EarlyStopping.AT_ONCE: True, EarlyStopping.NEVER: "never"}
"""transformers' `early_stopping`."""


@dataclass(eq=False)
class BeamAnswer:
    """The sink of one beam search: one event for each sequence that is returned."""

    params: BeamParams
    request: Request = field(init=False)
    events: list[TokenEvent] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def __call__(self, event: TokenEvent) -> None:
        assert event.finish is not None or event.error is not None
        self.events.append(event)
        if len(self.events) == self.params.num_returned:
            self._over.set()

    def change(self, **values: Any) -> None:
        """Change fields of the request, which is not submitted yet."""
        self.request = changed(self.request, **values)

    def submit(self, engine: Engine) -> None:
        engine.submit(self.request)

    def wait(self) -> BeamAnswer:
        assert self._over.wait(PATIENCE_S), f"{self.events} of {self.request}"
        assert [event.index for event in self.events] == list(range(self.params.num_returned))
        return self

    @property
    def over(self) -> bool:
        return self._over.is_set()

    @property
    def tokens(self) -> list[list[int]]:
        return [list(event.token_ids) for event in self.events]

    @property
    def scores(self) -> list[float | None]:
        return [event.beam_score for event in self.events]

    @property
    def finishes(self) -> list[FinishReason | None]:
        return [event.finish for event in self.events]

    @property
    def error(self) -> LockstepError | None:
        return self.events[0].error


def search(
    prompt: list[int],
    width: int = 4,
    *,
    n: int | None = None,
    penalty: float = 1.0,
    stopping: EarlyStopping = EarlyStopping.HEURISTIC,
    **options: Any,
) -> BeamAnswer:
    """Return the answer of a beam search that is not yet submitted; all of its sequences are returned unless `n` is
    given."""
    answer = BeamAnswer(BeamParams(width, penalty, stopping, n or width))
    made = ask(prompt, drafts=0, **options)
    answer.request = changed(made.request, sink=answer, beams=answer.params)
    return answer


def search_all(engine: Engine, answers: Sequence[BeamAnswer]) -> list[BeamAnswer]:
    """Submit all searches at once, and wait for them."""
    with held(engine):
        for answer in answers:
            answer.submit(engine)
    return [answer.wait() for answer in answers]


def of_transformers(
    net: Any, request: Request, stops: Sequence[int] = (EOS,), **options: Any
) -> tuple[list[list[int]], list[float]]:
    """Return the answers and scores of transformers' `generate` for a beam search, best first; `net` is its model."""
    assert request.beams is not None
    prompt = torch.tensor([request.prompt_ids])
    found = net.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        num_beams=request.beams.width,
        num_return_sequences=request.beams.num_returned,
        length_penalty=request.beams.length_penalty,
        early_stopping=STOPPING[request.beams.early_stopping],
        max_new_tokens=request.sampling.max_tokens,
        do_sample=False,
        eos_token_id=list(stops),
        pad_token_id=stops[0],
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    rows = found.sequences[:, prompt.shape[1] :].tolist()
    return [_until(row, stops) for row in rows], found.sequences_scores.tolist()


def _until(row: list[int], stops: Sequence[int]) -> list[int]:
    ends = [i for i, token in enumerate(row) if token in stops]
    return row[: ends[0] + 1] if ends else row
