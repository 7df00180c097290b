"""Rows of exact slots: the draw and the reported masses are those of the definition in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kernels.accept import accept, gumbel_noise
from kernels.row_kinds import ALL, APPLY, DEAD_END, FORCED
from kernels.step_tensors import PREFIX
from tests.kernels.accept_cases import Case, reference_logits, step_of

V = 300
Known = dict[tuple[int, ...], float]
"""Prefix of an answer, not the empty one -> log of its mass."""


def packed(known: Known) -> np.ndarray:
    """Return the prefixes in memory; the prefix before each one is known as well."""
    numbers: dict[tuple[int, ...], int] = {(): 0}
    rows = np.zeros(1 + len(known), PREFIX)
    rows[0] = (-1, -1, -1, 0.0)
    for at, (prefix, log_mass) in enumerate(known.items(), 1):
        numbers[prefix] = at
        parent = numbers[prefix[:-1]]
        rows[at] = (prefix[-1], rows[parent]["child"], -1, log_mass)
        rows[parent]["child"] = at
    return rows


def exact(
    case: Case, logits: torch.Tensor, known: Known, num_rows: int = 1
) -> tuple[list[int], list[list[float]], int]:
    """Return the emitted tokens of one lane, their masses, and why its step ended early."""
    made = step_of([case], V, num_rows, None, rows=num_rows)
    rows = packed(known)
    made.step.params.prefixes_S[0] = rows.ctypes.data
    accept(logits, made.step, num_rows=num_rows)
    result = made.step.result
    count = int(result.num_emitted_B[0])
    return result.emitted_BR[0, :count].tolist(), result.masses_BR2[0, :count].tolist(), int(result.blocked_B[0])


def wanted(case: Case, history: list[int], logits: torch.Tensor, row: int, known: Known) -> tuple[int, float, float]:
    """Return the token of a row, log p of it, and log of p's mass on other legal tokens that make no known prefix."""
    legal = reference_logits(case, history, logits, row)
    free = Case(**{**{f: getattr(case, f) for f in case.__dataclass_fields__}, "kinds": None})
    log_p = (reference_logits(free, history, logits, row) / case.temperature).log_softmax(-1)
    log_p[legal == -math.inf] = -math.inf
    answer = tuple(history[case.prompt_length :])
    mass = {prefix[-1]: value for prefix, value in known.items() if prefix[:-1] == answer}
    drawn = log_p.clone()
    for token, value in mass.items():
        drawn[token] += value
    token = int((drawn + gumbel_noise(case.seed, len(history), V).double()).argmax())
    rest = log_p.clone()
    rest[[*mass, token]] = -math.inf
    return token, float(log_p[token]), float(rest.logsumexp(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [ALL, APPLY, FORCED])
def test_a_row_has_the_token_and_the_masses_of_the_definition(kind: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(kind)
    for seed in range(8):
        logits = (torch.randn(1, V, generator=g) * 3).to(dtype)
        mask = torch.rand(V, generator=g) < 0.3
        mask[[7, 8, 9]] = True
        case = Case(
            history=[1, 2, 3, 5, 7],
            prompt_length=3,
            kinds=[kind],
            forced={0: 8} if kind == FORCED else {},
            masks={0: mask},
            temperature=0.8,
            repetition=1.2,
            presence=0.3,
            min_tokens=4,
            stop=(11,),
            bad=(12, 13),
            biases=((20, 1.5),),
            seed=seed,
        )
        likeliest = int(logits[0].argmax())
        known = {(5,): -0.5, (6,): -3.0, (5, 7): -1.0, (5, 7, 8): -0.7, (5, 7, likeliest): -4.0, (5, 7, 9): -math.inf}
        tokens, masses, _ = exact(case, logits, known)
        token, log_p, log_rest = wanted(case, case.history, logits[0], 0, known)
        assert tokens == [token]
        assert masses[0][0] == pytest.approx(log_p, abs=1e-4)
        assert masses[0][1] == (-math.inf if log_rest == -math.inf else pytest.approx(log_rest, abs=1e-4))


def test_rows_of_drafts_have_the_masses_of_single_rows() -> None:
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(5)) * 2
    known: Known = {(9,): -2.0}
    history, tokens, masses = [1, 9], list[int](), list[list[float]]()
    for row in logits:
        (token,), (mass,), _ = exact(Case(history=history, prompt_length=1, temperature=1.0, seed=4), row[None], known)
        known[(*history[1:], token)] = -0.3
        history = [*history, token]
        tokens.append(token)
        masses.append(mass)
    before = {prefix: mass for prefix, mass in known.items() if len(prefix) == 1}
    case = Case(history=[1, 9], prompt_length=1, drafts=tokens[:2], temperature=1.0, seed=4)
    assert exact(case, logits, before, num_rows=3)[:2] == (tokens, masses)


def test_a_row_whose_tokens_all_have_no_mass_is_a_dead_end() -> None:
    mask = torch.zeros(V, dtype=torch.bool)
    mask[[4, 5]] = True
    case = Case(history=[1], prompt_length=1, kinds=[APPLY], masks={0: mask}, temperature=1.0)
    assert exact(case, torch.zeros(1, V), {(4,): -math.inf, (5,): -math.inf}) == ([], [], DEAD_END)
    assert exact(case, torch.zeros(1, V), {(4,): -math.inf})[0] == [5]


def test_a_slot_without_prefixes_draws_as_before() -> None:
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(6))
    case = Case(history=[1], prompt_length=1, temperature=1.0, seed=3)
    made = step_of([case], V, 1, None)
    accept(logits, made.step, num_rows=1)
    assert exact(case, logits, {})[0] == made.step.result.emitted_BR[0, :1].tolist()
