"""The accept kernels have the results of the CPU's kernel and of the definition, on the same cases."""

from __future__ import annotations

import pytest
import torch

from kernels.accept import (
    RUN_ON,
    STEERED,
    STOP_LENGTH,
    STOP_STEERED,
    STOP_TOKEN,
    AcceptResult,
    StepTensors,
    gumbel_noise,
    pack_rules,
)
from kernels.cuda.accept import accept, draw_drafts
from kernels.cuda.noise import noise_kernel
from kernels.cuda.row_state import SEEN, DeviceRows, RowScratch, SlotRows
from kernels.row_kinds import ALL, APPLY, DEAD_END, DEFER, FORCED
from tests.kernels.accept_cases import Case, expected, random_cases, reference_token, tensors
from tests.kernels.cuda.accept_runs import none_ended, on, run


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (0x0123456789ABCDEF, 77), (2**63 - 1, 2**31 - 1)])
def test_noise_equals_that_of_the_cpu(device: torch.device, seed: int, position: int) -> None:
    out = torch.empty(600, device=device)
    noise_kernel[(3,)](out, seed, position, 600, ROWS=8)
    torch.testing.assert_close(out.cpu(), gumbel_noise(seed, position, 600), rtol=1e-6, atol=5e-7)


@pytest.mark.parametrize(
    ("V", "dtype"),
    [(50, torch.float32), pytest.param(600, torch.bfloat16, marks=pytest.mark.slow), (519, torch.float16)],
)
def test_accept_follows_the_definition_on_random_cases(device: torch.device, V: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(V)
    for _ in range(2 if device.type == "cpu" else 20):
        B, rows = 3, 1 + int(torch.randint(4, (1,), generator=g))
        logits = (torch.randn(B * rows, V, generator=g) * 3).to(dtype)
        cases = random_cases(g, logits, B, rows)
        result, history, length, _ = run(cases, logits, rows, rows + 1, device)
        for b, case in enumerate(cases):
            want = expected(case, logits, b * rows)
            assert result.emitted_BR[b, : int(result.num_emitted_B[b])].tolist() == want, case
            assert history[b, : int(length[b])].tolist() == case.history + want


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
    ],
)
def test_filters_keep_the_tokens_of_exact_thresholds(device: torch.device, sampling: dict[str, float]) -> None:
    V, rows = 300, 8
    logits = torch.randn(rows, V, generator=torch.Generator().manual_seed(4)).round(decimals=1)  # with ties
    cases = [Case([1, 2], 1, seed=j, **{"temperature": 1.3, **sampling}) for j in range(rows)]
    result, _, _, _ = run(cases, logits, 1, 1, device)
    for j, case in enumerate(cases):
        assert result.emitted_BR[j].tolist() == [reference_token(case, case.history, logits[j], 0)], case


def test_a_kernel_without_filters_draws_the_same_tokens(device: torch.device) -> None:
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(2))
    cases = [Case([1], 1, temperature=0.8, seed=3), Case([1], 1)]
    tokens = [run(cases, logits, 1, 1, device, filters=f)[0].emitted_BR.tolist() for f in (True, False)]
    assert tokens[0] == tokens[1]


def test_blocked_rows_emit_nothing_and_earlier_tokens_remain(device: torch.device) -> None:
    logits = torch.zeros(3, 50)
    logits[0, 7] = logits[1, 8] = logits[2, 9] = 5.0
    empty = torch.zeros(50, dtype=torch.bool)
    for kinds, masks, want in (
        ([ALL, DEFER, ALL], {}, (1, DEFER, 3)),
        ([DEFER, ALL, ALL], {}, (0, DEFER, 2)),
        ([ALL, ALL, APPLY], {2: empty}, (2, DEAD_END, 4)),
        ([APPLY, ALL, ALL], {0: empty}, (0, DEAD_END, 2)),
        ([ALL, ALL, 5], {}, (2, 5, 4)),
    ):
        case = Case([1, 2], 2, drafts=[7, 8], kinds=kinds, masks=masks)
        result, _, length, state = run([case], logits, 3, 3, device)
        assert (int(result.num_emitted_B[0]), int(result.blocked_B[0]), int(length[0])) == want
        assert state.done_S.tolist() == [want[1] > DEFER]


def test_a_stop_token_at_a_steered_row_is_reported(device: torch.device) -> None:
    logits = torch.zeros(6, 50)
    for j in range(6):
        logits[j, 7 + j % 3] = 5.0
    one = torch.zeros(50, dtype=torch.bool)
    one[8] = True
    kinds, masks = [ALL, APPLY, ALL], {1: one}
    led = Case([1, 2], 2, drafts=[7, 8], kinds=kinds, masks=masks, forced={1: STEERED}, stop=(8,))
    before = Case([1, 2], 2, drafts=[7, 8], kinds=kinds, masks=masks, forced={0: STEERED}, stop=(8,))
    result, _, _, _ = run([led, before], logits, 3, 3, device)
    assert result.finish_B.tolist() == [STOP_STEERED, STOP_TOKEN]


def test_stop_tokens_and_lengths_end_acceptance_inside_a_block_of_drafts(device: torch.device) -> None:
    logits = torch.zeros(12, 50)
    for j in range(12):
        logits[j, 7 + j % 4] = 5.0
    stop = Case([1, 2], 2, drafts=[7, 8, 9], stop=(8,))
    limit = Case([1, 2], 2, drafts=[7, 8, 9], max_length=5)
    result, _, length, state = run([stop, limit, Case([1, 2], 2, drafts=[7, 8, 9])], logits, 4, 4, device)
    assert result.finish_B.tolist() == [STOP_TOKEN, STOP_LENGTH, RUN_ON]
    assert result.num_emitted_B.tolist() == [2, 3, 4]
    assert result.num_accepted_B.tolist() == [2, 3, 3]
    assert length.tolist() == [4, 5, 6]
    assert state.done_S.tolist() == [True, True, False]


def test_bad_words_may_begin_in_the_drafts(device: torch.device) -> None:
    logits = torch.zeros(4, 50)
    logits[0, 7], logits[1, 9], logits[1, 3] = 5.0, 5.0, 4.0
    logits[2, 7], logits[3, 9], logits[3, 3] = 5.0, 5.0, 4.0
    cases = [Case([1, head], 1, drafts=[7], words=((2,), (6, 7, 9))) for head in (6, 5)]
    result, _, _, _ = run(cases, logits, 2, 2, device)
    assert result.emitted_BR.tolist() == [[7, 3], [7, 9]]


def test_logprobs_have_the_distribution_of_the_model(device: torch.device) -> None:
    logits = torch.randn(2, 70, generator=torch.Generator().manual_seed(0))
    logits[:, 40] = logits[:, 20] = 9.0  # a tie: the lower id is listed first
    mask = torch.zeros(70, dtype=torch.bool)
    mask[11] = True
    cases = [
        Case([1, 11], 1, kinds=[APPLY], masks={0: mask}, num_logprobs=20, repetition=1.5, temperature=0.5),
        Case([1, 11], 1, kinds=[FORCED], forced={0: 5}, num_logprobs=0),
    ]
    result, _, _, _ = run(cases, logits, 1, 1, device)
    want = logits.log_softmax(-1)
    assert result.emitted_BR[:, 0].tolist() == [11, 5]
    torch.testing.assert_close(result.logprob_BR[:, 0].cpu(), want[[0, 1], [11, 5]], atol=1e-5, rtol=0)
    values, ids = want[0].sort(descending=True, stable=True)
    assert result.top_ids_BRN[0, 0].tolist() == ids[:20].tolist()
    torch.testing.assert_close(result.top_logprobs_BRN[0, 0].cpu(), values[:20], atol=1e-5, rtol=0)


def test_a_slot_that_has_ended_emits_nothing(device: torch.device) -> None:
    t = tensors([Case([1, 2], 1), Case([1, 2], 1)], 50, 1)
    state = SlotRows.allocate(2, 50, t.masks_SRW.to(device), torch.tensor([True, False], device=device))
    length, result = t.length_S.to(device), AcceptResult.allocate(2, 1, 50, device)
    step = StepTensors(
        *(torch.arange(2, dtype=torch.int32, device=device), t.drafts_BR.to(device), t.num_drafts_B.to(device)),
        *(t.kinds_BR.to(device), t.forced_BR.to(device), 0, (0, 0), t.history_SL.to(device), length),
        *(on(t.params, device), result, DeviceRows(state, RowScratch.allocate(2, 50, device, block=64))),
    )
    accept(torch.ones(2, 50, device=device), step, num_rows=1)
    assert length.tolist() == [2, 3]
    assert result.num_emitted_B.tolist() == [0, 1]
    assert result.blocked_B.tolist() == [DEFER, 0]


def test_idle_lanes_emit_nothing_and_touch_no_slot(device: torch.device) -> None:
    t = tensors([Case([1, 2], 1)], 50, 2)
    history, length = t.history_SL.to(device), t.length_S.to(device)
    state = SlotRows.allocate(1, 50, t.masks_SRW.to(device), none_ended(1, device))
    result = AcceptResult.allocate(2, 2, 50, device)
    result.num_emitted_B.fill_(7)
    lanes = torch.zeros(2, 2, dtype=torch.int32, device=device)
    step = StepTensors(
        *(torch.tensor([-1, 0], dtype=torch.int32, device=device), lanes, lanes[:, 0].contiguous()),
        *(lanes.to(torch.uint8), lanes, 0, (0, 0), history, length, on(t.params, device), result),
        DeviceRows(state, RowScratch.allocate(2, 50, device, block=64)),
    )
    accept(torch.ones(2, 50, device=device), step, num_rows=1)
    assert result.num_emitted_B.tolist() == [0, 1]
    assert length.tolist() == [3]


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
    device: torch.device, sampling: dict[str, float], pruned: bool
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
    t = tensors(cases, V, R)
    state = SlotRows.allocate(5, V, t.masks_SRW.to(device), none_ended(5, device))
    for b, c in enumerate(cases):
        state.count_seen(b, torch.tensor(c.history), c.prompt_length)
    scratch = RowScratch.allocate(5, V, device, block=64)
    # Rows that the kernel skips leave old values here, which must never be used as indices.
    scratch.chosen_N.fill_(1 << 30)
    scratch.best_column_NC.fill_(1 << 30)
    step = StepTensors(
        *(torch.arange(5, dtype=torch.int32, device=device), t.drafts_BR.to(device), t.num_drafts_B.to(device)),
        *(t.kinds_BR.to(device), t.forced_BR.to(device), 0, (0, 0), t.history_SL.to(device), t.length_S.to(device)),
        *(on(t.params, device), AcceptResult.allocate(5, R, V, device)),
        DeviceRows(state, scratch),
    )
    d2t = (target_ids - torch.arange(len(target_ids))).int().to(device) if pruned else None
    draw_drafts(small.to(device), step, row, d2t_V=d2t)
    tokens = step.drafts_BR[:, row].tolist()
    for b in (0, 1):
        assert tokens[b] == reference_token(cases[b], [*cases[b].history, 5, 6], full[b], row)
    assert tokens[2:] == [-1, forced, -1]
    assert step.history_SL[:, 4].tolist() == [max(token, 0) for token in tokens]


def test_rules_that_do_not_fit_are_rejected(device: torch.device) -> None:
    masks = torch.zeros(1, 1, 2, dtype=torch.int32, device=device)
    state = SlotRows.allocate(1, 50, masks, none_ended(1, device), max_rules=4)
    with pytest.raises(ValueError, match="at most 4"):
        state.write_rules(0, pack_rules((1, 2, 3), (), ()))
    assert SEEN == 1 << 30
