"""The accept kernels, native and Triton's, have the results of the definition in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.accept import (
    RUN_ON,
    STEERED,
    STOP_LENGTH,
    STOP_STEERED,
    STOP_TOKEN,
    accept,
    draw_drafts,
    gumbel_noise,
    pack_rules,
)
from kernels.row_kinds import ALL, APPLY, DEAD_END, DEFER, ERROR, FORCED
from kernels.step_tensors import MASKED_LOGPROBS
from tests.kernels.accept_cases import Case, expected, random_cases, reference_token, run, step_of

Target = torch.device | None
triton_only = pytest.mark.parametrize("target", ["triton"], indirect=True)


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> list[int]:
    """Return the words of Philox4x32-10, computed in plain integers as in its paper."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k1, p0 & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (0x0123456789ABCDEF, 77), (2**63 - 1, 2**31 - 1)])
def test_noise_is_the_gumbel_transform_of_philox(target: Target, seed: int, position: int) -> None:
    # A known answer of Random123: the digits of pi.
    pi = philox((0xA4093822, 0x299F31D0), (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344))
    assert pi == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    noise = gumbel_noise(seed, position, 600)
    for v in (0, 1, 2, 3, 63, 64, 130, 199):
        word = philox((seed & 0xFFFFFFFF, seed >> 32), (v // 4, position, 0, 0))[v % 4]
        u = ((word >> 9) + 0.5) / 2**23
        assert noise[v].item() == pytest.approx(-math.log(-math.log(u)), rel=2e-5, abs=2e-6)
    if target is not None:
        from kernels.cuda.noise import noise_kernel

        out = torch.empty(600, device=target)
        noise_kernel[(3,)](out, seed, position, 600, ROWS=8)
        torch.testing.assert_close(out.cpu(), noise, rtol=1e-6, atol=5e-7)


@pytest.mark.parametrize(
    ("target", "V", "dtype"),
    [
        *(("native", V, dtype) for V in (50, 64, 1031) for dtype in (torch.float32, torch.bfloat16)),
        ("triton", 50, torch.float32),
        ("triton", 519, torch.float16),
        pytest.param("triton", 600, torch.bfloat16, marks=pytest.mark.slow),
    ],
    indirect=["target"],
)
def test_accept_follows_the_definition_on_random_cases(target: Target, V: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(V)
    interpreted = target is not None and target.type == "cpu"
    for _ in range(2 if interpreted else 12):
        B, rows = 3, 1 + int(torch.randint(4, (1,), generator=g))
        logits = (torch.randn(B * rows, V, generator=g) * 3).to(dtype)
        cases = random_cases(g, logits, B, rows)
        result, history, length, _ = run(cases, logits, rows, rows + 1, target)
        for b, case in enumerate(cases):
            want = expected(case, logits, b * rows)
            assert result.emitted_BR[b, : int(result.num_emitted_B[b])].tolist() == want, case
            assert history[b, : int(length[b])].tolist() == case.history + want


PLAIN: tuple[dict[str, Any], ...] = (
    {},
    {"stop": (1, 2), "min_tokens": 0},
    {"stop": (1, 2), "min_tokens": 50},
    {"bad": (3,)},
    {"words": ((2, 1),)},
    {"biases": ((0, 9.0),)},
    {"repetition": 1.5},
    {"presence": 0.7},
    {"frequency": 0.7},
)
"""Greedy requests that change no logit, stop tokens or not, and others that change some."""


@pytest.mark.parametrize(
    ("target", "V", "dtype"),
    [
        *(("native", V, dtype) for V in (33, 64, 1031) for dtype in (torch.float32, torch.bfloat16)),
        ("triton", 64, torch.float32),
    ],
    indirect=["target"],
)
def test_greedy_rows_have_the_first_of_the_likeliest_legal_tokens(target: Target, V: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(V)
    for share in (0.02, 0.3, 1.0) if target is None else (0.3,):
        logits = torch.randn(3 * len(PLAIN), V, generator=g).round().to(dtype)
        logits[:, ::7] = -math.inf
        logits[:, -1] = logits[:, :-1].max(dim=1).values + torch.randint(-1, 2, (len(logits),), generator=g)
        cases = []
        for number, fields in enumerate(PLAIN):
            legal, forced = torch.rand(V, generator=g) < share, int(torch.randint(V, (1,), generator=g))
            for kind in (ALL, APPLY, FORCED):
                history = [5, 6, number % 4, 2]
                case = Case(history, 2, kinds=[kind], masks={0: legal}, forced={0: forced}, max_length=90, **fields)
                cases.append(case)
        result, _, _, _ = run(cases, logits, 1, 2, target)
        for b, case in enumerate(cases):
            want = expected(case, logits, b)
            assert result.emitted_BR[b, : int(result.num_emitted_B[b])].tolist() == want, case
            assert int(result.blocked_B[b]) == (0 if want else DEAD_END)


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({"top_k": 3}, marks=pytest.mark.slow),
        {"top_k": 40, "top_p": 0.9},
        {"top_p": 0.2},
        pytest.param({"top_p": 1e-6}, marks=pytest.mark.slow),
        {"min_p": 0.3},
        pytest.param({"min_p": 1.0, "top_k": 5}, marks=pytest.mark.slow),
        {"top_k": 2, "top_p": 0.5, "min_p": 0.01, "temperature": 1e-30},
        {"temperature": 1e-30},
    ],
)
def test_filters_keep_the_tokens_of_exact_thresholds(target: Target, sampling: dict[str, float]) -> None:
    V, rows = 300, 8
    logits = torch.randn(rows, V, generator=torch.Generator().manual_seed(4)).round(decimals=1)  # with ties
    cases = [Case([1, 2], 1, seed=j, **{"temperature": 1.3, **sampling}) for j in range(rows)]  # type: ignore[arg-type]
    result, _, _, _ = run(cases, logits, 1, 1, target)
    for j, case in enumerate(cases):
        assert result.emitted_BR[j].tolist() == [reference_token(case, case.history, logits[j], 0)], case


def peaks(lanes: int, *tokens: int) -> torch.Tensor:
    """Return logits whose rows of each lane have these tokens as the largest."""
    logits = torch.zeros(lanes * len(tokens), 50)
    for j in range(len(logits)):
        logits[j, tokens[j % len(tokens)]] = 5.0
    return logits


@pytest.mark.parametrize(
    ("kinds", "empty", "want"),
    [
        ([ALL, DEFER, ALL], None, (1, DEFER, 3)),
        ([DEFER, ALL, ALL], None, (0, DEFER, 2)),
        ([ALL, ALL, APPLY], 2, (2, DEAD_END, 4)),
        ([APPLY, ALL, ALL], 0, (0, DEAD_END, 2)),
        ([ALL, ALL, ERROR], None, (2, ERROR, 4)),
    ],
)
def test_blocked_rows_emit_nothing_and_earlier_tokens_remain(
    target: Target, kinds: list[int], empty: int | None, want: tuple[int, int, int]
) -> None:
    """A row without a legal token is a dead end, and never token 0."""
    masks = {} if empty is None else {empty: torch.zeros(50, dtype=torch.bool)}
    case = Case([1, 2], 2, drafts=[7, 8], kinds=kinds, masks=masks)
    result, _, length, state = run([case], peaks(1, 7, 8, 9), 3, 3, target)
    assert (int(result.num_emitted_B[0]), int(result.blocked_B[0]), int(length[0])) == want
    if state is not None:
        assert state.done_S.tolist() == [want[1] > DEFER]


def test_stops_end_acceptance_inside_a_block_of_drafts(target: Target) -> None:
    """A stop token at a steered row is told apart."""
    one = torch.zeros(50, dtype=torch.bool)
    one[8] = True
    chain = {"drafts": [7, 8, 9], "kinds": [ALL, APPLY, ALL, ALL], "masks": {1: one}}
    cases = [
        Case([1, 2], 2, [7, 8, 9], stop=(8,)),
        Case([1, 2], 2, [7, 8, 9], max_length=5),
        Case([1, 2], 2, [7, 8, 9]),
        Case([1, 2], 2, stop=(8,), forced={1: STEERED}, **chain),  # type: ignore[arg-type]
        Case([1, 2], 2, stop=(8,), forced={0: STEERED}, **chain),  # type: ignore[arg-type]
    ]
    result, _, length, state = run(cases, peaks(5, 7, 8, 9, 10), 4, 4, target)
    assert result.finish_B.tolist() == [STOP_TOKEN, STOP_LENGTH, RUN_ON, STOP_STEERED, STOP_TOKEN]
    assert result.num_emitted_B.tolist() == [2, 3, 4, 2, 2]
    assert result.num_accepted_B.tolist() == [2, 3, 3, 2, 2]
    assert length.tolist() == [4, 5, 6, 4, 4]
    if state is not None:
        assert state.done_S.tolist() == [True, True, False, True, True]


def test_bad_words_ban_the_last_token_only_after_their_head(target: Target) -> None:
    """The head may be in the history, or begin there and end in the drafts."""
    logits = peaks(4, 7, 9)
    logits[1::2, 3] = 4.0
    words = ((2,), (6, 7, 9))
    cases = [Case([1, head], 1, drafts=[7], words=words) for head in (6, 5)]
    cases += [Case([1, 6, 7], 1, words=words), Case([1, 7, 6], 1, words=words)]
    logits[4], logits[6] = logits[1], logits[1]
    result, _, _, _ = run(cases, logits, 2, 2, target)
    assert result.emitted_BR[:2].tolist() == [[7, 3], [7, 9]]
    assert result.emitted_BR[2:, 0].tolist() == [3, 9]


def test_logprobs_have_the_distribution_of_the_model(target: Target) -> None:
    logits = torch.randn(2, 70, generator=torch.Generator().manual_seed(0))
    logits[:, 40] = logits[:, 20] = 9.0  # a tie: the lower id is listed first
    mask = torch.zeros(70, dtype=torch.bool)
    mask[11] = True
    cases = [
        Case([1, 11], 1, kinds=[APPLY], masks={0: mask}, num_logprobs=20, repetition=1.5, temperature=0.5),
        Case([1, 11], 1, kinds=[FORCED], forced={0: 5}, num_logprobs=0),
    ]
    result, _, _, _ = run(cases, logits, 1, 1, target)
    want = logits.log_softmax(-1)
    assert result.emitted_BR[:, 0].tolist() == [11, 5]
    torch.testing.assert_close(result.logprob_BR[:, 0].cpu(), want[[0, 1], [11, 5]], atol=1e-5, rtol=0)
    values, ids = want[0].sort(descending=True, stable=True)
    assert result.top_ids_BRN[0, 0].tolist() == ids[:20].tolist()
    torch.testing.assert_close(result.top_logprobs_BRN[0, 0].cpu(), values[:20], atol=1e-5, rtol=0)


def test_masked_logprobs_are_among_the_legal_tokens(target: Target) -> None:
    """With a mask, in the second row of a lane, with one legal token, and without a grammar."""
    logits = torch.randn(8, 70, generator=torch.Generator().manual_seed(1))
    logits[:, 40] = 9.0
    legal = torch.zeros(70, dtype=torch.bool)
    legal[[11, 33, 64]] = True
    wanted = MASKED_LOGPROBS + 5
    cases = [
        Case([1, 2], 1, drafts=[40], kinds=[ALL, APPLY], masks={1: legal}, num_logprobs=wanted, temperature=0.5),
        Case([1, 2], 1, kinds=[FORCED], forced={0: 5}, num_logprobs=wanted),
        Case([1, 2], 1, kinds=[APPLY], masks={0: legal}, num_logprobs=5),
        Case([1, 2], 1, num_logprobs=MASKED_LOGPROBS),
    ]
    result, _, _, _ = run(cases, logits, 2, 2, target)
    own, among = logits.log_softmax(-1), logits[1].masked_fill(~legal, -torch.inf).log_softmax(-1)
    tokens = result.emitted_BR.tolist()
    assert tokens[0][0] == 40
    assert tokens[0][1] in (11, 33, 64)
    want = [own[0, 40], among[tokens[0][1]], torch.tensor(0.0), own[4, tokens[2][0]], own[6, tokens[3][0]]]
    given = result.logprob_BR.cpu()
    torch.testing.assert_close(
        torch.stack([given[0, 0], given[0, 1], given[1, 0], given[2, 0], given[3, 0]]),
        torch.stack(want),
        atol=1e-5,
        rtol=0,
    )
    values, ids = among.sort(descending=True, stable=True)
    assert result.top_ids_BRN[0, 1, :3].tolist() == ids[:3].tolist()
    torch.testing.assert_close(result.top_logprobs_BRN[0, 1, :5].cpu(), values[:5], atol=1e-5, rtol=0)


@triton_only
def test_lanes_without_a_running_slot_emit_nothing(target: torch.device) -> None:
    """The slot of lane 0 has ended; lane 1 is idle; with and without filters lane 2 draws the same."""
    tokens = []
    for filters in (True, False):
        cases = [Case([1, 2], 1), Case([1], 1), Case([1], 1, temperature=0.8, seed=3)]
        made = step_of(cases, 300, 1, target, filters=filters)
        made.rows.done_S[0] = True
        step = replace(made.step, slots_B=torch.tensor([0, -1, 2], dtype=torch.int32, device=target))
        step.result.num_emitted_B.fill_(7)
        accept(torch.randn(3, 300, generator=torch.Generator().manual_seed(2)).to(target), step, num_rows=1)
        assert step.length_S.tolist() == [2, 1, 2]
        assert step.result.num_emitted_B.tolist() == [0, 0, 1]
        assert int(step.result.blocked_B[0]) == DEFER
        tokens.append(int(step.result.emitted_BR[2, 0]))
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("sampling", "pruned"),
    [
        ({}, False),
        pytest.param({}, True, marks=pytest.mark.slow),
        pytest.param({"temperature": 1.0}, False, marks=pytest.mark.slow),
        ({"temperature": 1.0}, True),
        ({"temperature": 1.0, "top_k": 4, "top_p": 0.8}, False),
        pytest.param({"temperature": 1.0, "top_k": 4, "top_p": 0.8}, True, marks=pytest.mark.slow),
    ],
)
def test_a_draft_is_the_token_that_its_row_draws_without_a_draft(
    target: Target, sampling: dict[str, float], pruned: bool
) -> None:
    V, R, row = 200, 4, 2
    g = torch.Generator().manual_seed(5)
    target_ids = torch.randperm(V, generator=g)[:70].sort().values if pruned else torch.arange(V)
    small = torch.randn(5, len(target_ids), generator=g)
    full = torch.full((5, V), -torch.inf).index_copy(1, target_ids, small)
    # With a pruned vocabulary the forced token is outside the drafter's vocabulary.
    forced = 33 if not pruned else int(next(v for v in range(V) if v not in target_ids))
    masks = [torch.rand(V, generator=g) < 0.5, torch.zeros(V, dtype=torch.bool)]
    cases = [
        Case(
            *([1, 2], 1, [5, 6, 0], [0, 0, kind, 0]),
            **{"masks": {row: mask}, "forced": {row: forced}, "repetition": 1.2, **sampling},
        )
        for kind, mask in zip(
            (ALL, APPLY, APPLY, FORCED, DEFER), masks[:1] * 2 + masks[1:] + masks[:1] * 2, strict=True
        )
    ]
    made = step_of(cases, V, R, target, block=64)
    step = made.step
    if step.device is not None:
        # Rows that the kernel skips leave old values here, which must never be used as indices.
        step.device.scratch.chosen_N.fill_(1 << 30)
        step.device.scratch.best_column_NC.fill_(1 << 30)
    d2t = (target_ids - torch.arange(len(target_ids))).int().to(target or "cpu") if pruned else None
    draw_drafts(small.to(target or "cpu"), step, row, d2t_V=d2t)
    tokens = step.drafts_BR[:, row].tolist()
    for b in (0, 1):
        assert tokens[b] == reference_token(cases[b], [*cases[b].history, 5, 6], full[b], row)
    assert tokens[2:] == [-1, forced, -1]
    assert step.history_SL[:, 4].tolist() == [max(token, 0) for token in tokens]


@triton_only
def test_rules_that_do_not_fit_are_rejected(target: torch.device) -> None:
    state = step_of([Case([1], 1)], 50, 1, target).rows
    with pytest.raises(ValueError, match="at most 64"):
        state.write_rules(0, pack_rules(tuple(range(63)), (), ()))
