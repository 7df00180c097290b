"""The decision of a beam search, against transformers' arithmetic written out over whole score tables."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_engine.api.request import BeamParams, EarlyStopping
from gpu_engine.core.beams.edits import edits_of
from gpu_engine.core.beams.search import BeamSearch
from gpu_engine.step.outcomes import Candidates
from kernels.logprobs import Edit
from tests.gpu_engine.harness import ask

V = 6
STOPS = (0, 3)


def log_probs(seed: int, tokens: list[int]) -> np.ndarray:
    """Return the log-probabilities after `tokens`, float32 [V]: any model, as a function of its whole input."""
    rng = np.random.default_rng([seed, len(tokens), *tokens])
    x = rng.normal(size=V) * 2
    return (x - np.log(np.exp(x).sum())).astype(np.float32)


def candidates(seed: int, tokens: list[int], count: int, illegal: frozenset[int] = frozenset()) -> Candidates:
    row = log_probs(seed, tokens)
    best = sorted((t for t in range(V) if t not in illegal), key=lambda t: -row[t])
    return Candidates(tuple((t, float(row[t])) for t in best[:count]))


def run(search: BeamSearch, seed: int, width: int, illegal: frozenset[int] = frozenset()) -> BeamSearch:
    while not search.done:
        before = [beam.token_ids for beam in search.beams]
        children = search.advance([candidates(seed, ids, width + len(STOPS), illegal) for ids in before])
        assert [[*before[child.parent], child.token] for child in children] == [b.token_ids for b in search.beams]
    return search


def reference(
    seed: int, params: BeamParams, max_tokens: int, stops: tuple[int, ...]
) -> list[tuple[tuple[int, ...], float]]:
    """`GenerationMixin._beam_search` of transformers for one prompt, in its own order of operations."""
    W, low = params.width, np.float32(-1e9)
    running = [([], np.float32(0.0))] + [([], low)] * (W - 1)
    finished: list[tuple[tuple[int, ...], np.float32, bool]] = [((), low, False)] * W
    length = 0
    while True:
        table = [(score + log_probs(seed, ids), ids) for ids, score in running]
        flat = [(row[t], [*ids, t]) for row, ids in table for t in range(V)]
        keep = sorted(flat, key=lambda each: -each[0])[: max(2, 1 + len(stops)) * W]
        hits = [ids[-1] in stops or len(ids) >= max_tokens for _, ids in keep]
        length += 1
        open_ones = [(score + low * np.float32(hit), ids) for (score, ids), hit in zip(keep, hits, strict=True)]
        running = [(ids, score) for score, ids in sorted(open_ones, key=lambda each: -each[0])[:W]]
        divisor = np.float32(float(length) ** params.length_penalty)
        merged = list(finished)
        for rank, ((score, ids), hit) in enumerate(zip(keep, hits, strict=True)):
            ends = hit and rank < W
            merged.append((tuple(ids), score / divisor + (np.float32(0.0) if ends else low), ends))
        finished = sorted(merged, key=lambda each: -each[1])[:W]
        never = params.early_stopping is EarlyStopping.NEVER and params.length_penalty > 0.0
        best = running[0][1] / np.float32(float(max_tokens if never else length) ** params.length_penalty)
        worst = min(score for _, score, _ in finished)
        improves = any(best > (worst if ended else low) for _, _, ended in finished)
        full = all(ended for *_, ended in finished) and params.early_stopping is EarlyStopping.AT_ONCE
        if not improves or full or all(hits):
            return [(ids, float(score)) for ids, score, ended in finished if ended]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10_000),
    st.integers(2, 4),
    st.floats(-2, 3, allow_nan=False),
    st.sampled_from(EarlyStopping),
    st.integers(1, 7),
    st.integers(0, 2),
)
def test_a_search_decides_as_transformers_does(
    seed: int, width: int, penalty: float, stopping: EarlyStopping, max_tokens: int, num_stops: int
) -> None:
    params = BeamParams(width, penalty, stopping, num_returned=width)
    stops = STOPS[:num_stops]
    search = run(BeamSearch(params, max_tokens, stops, guided=False), seed, width)
    found = [(each.token_ids, each.score) for each in search.hypotheses]
    expected = reference(seed, params, max_tokens, stops)
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], rel=1e-5)
    assert [each.stopped for each in search.hypotheses] == [ids[-1] in stops for ids, _ in found]


def test_a_wide_search_without_penalty_finds_the_most_likely_answers() -> None:
    """With `width` at least the number of prefixes nothing is pruned."""
    found = run(BeamSearch(BeamParams(36, 0.0, EarlyStopping.NEVER, 5), 3, (0,), guided=False), 5, 36).hypotheses
    answers: list[tuple[float, tuple[int, ...]]] = []
    for size in (1, 2, 3):
        for ids in itertools.product(range(V), repeat=size):
            if 0 not in ids[:-1] and (ids[-1] == 0 or size == 3):
                answers.append((sum(float(log_probs(5, list(ids[:i]))[t]) for i, t in enumerate(ids)), ids))
    assert [each.token_ids for each in found] == [ids for _, ids in sorted(answers, reverse=True)[:5]]


def test_fewer_legal_answers_than_beams_end_the_search() -> None:
    illegal = frozenset({1, 2, 3, 4, 5})
    search = run(BeamSearch(BeamParams(3, num_returned=3), 9, (0,), guided=True), 1, 3, illegal)
    assert [each.token_ids for each in search.hypotheses] == [(0,)]
    nothing = BeamSearch(BeamParams(2), 9, (0,), guided=True)
    assert nothing.advance([Candidates(())]) == []
    assert nothing.done
    assert nothing.hypotheses == []


def test_a_complete_guided_answer_is_better_than_a_cut_one() -> None:
    search = BeamSearch(BeamParams(2, length_penalty=0.0, num_returned=2), 2, (0,), guided=True)
    search.advance([Candidates(((1, -0.1), (0, -4.0)))])
    search.advance([Candidates(((2, -0.1),), closes=True)])
    complete, cut = search.hypotheses
    assert (complete.token_ids, complete.stopped, complete.closed) == ((0,), True, False)
    assert (cut.token_ids, cut.stopped, cut.closed) == ((1, 2), False, True)


def test_edits_are_those_of_sampling() -> None:
    sampling = {
        "min_tokens": 3,
        "bad_token_ids": (7,),
        "bad_words": ((5, 6), (1, 2, 3)),
        "logit_bias": ((5, 1.5), (9, -2.0)),
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
    }
    request = ask([4, 1, 2], **sampling).request
    assert edits_of(request, (256,), []) == (
        *(Edit(1, 0.0, 1.2), Edit(2, 0.0, 1.2), Edit(3, -math.inf), Edit(4, 0.0, 1.2), Edit(5, 1.5)),
        *(Edit(7, -math.inf), Edit(9, -2.0), Edit(256, -math.inf)),
    )
    late = {edit.token: edit for edit in edits_of(request, (256,), [5, 5, 5])}
    assert late[5] == Edit(5, 1.5, 1.2, 0.5 + 3 * 0.25)
    assert late[6] == Edit(6, -math.inf)
    assert 256 not in late
    assert 3 not in late
    assert edits_of(ask([1]).request, (256,), [2]) == ()
    # A word that is longer than the answer begins in the prompt.
    spanning = ask([4, 1, 2], bad_words=((1, 2, 8, 9), (2, 8, 3), (4, 2, 8, 5))).request
    assert {edit.token for edit in edits_of(spanning, (), [8])} == {9, 3}
