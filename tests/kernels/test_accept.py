"""The native accept kernel has the results of a plain reference that follows the definition."""

from __future__ import annotations

import math

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
    accept,
    gumbel_noise,
    pack_rules,
)
from kernels.row_kinds import ALL, APPLY, DEAD_END, DEFER
from tests.kernels.accept_cases import Case, expected, random_cases, tensors


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> list[int]:
    """Return the words of Philox4x32-10, computed in plain integers as in its paper."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k1, p0 & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def test_philox_reference_gives_the_published_vectors() -> None:
    # Known answers of Random123: zero key and counter, and the digits of pi.
    assert philox((0, 0), (0, 0, 0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    pi = philox((0xA4093822, 0x299F31D0), (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344))
    assert pi == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (0x0123456789ABCDEF, 77), (2**64 - 1, 2**31 - 1)])
def test_noise_is_the_gumbel_transform_of_philox(seed: int, position: int) -> None:
    noise = gumbel_noise(seed, position, 200)
    for v in (0, 1, 2, 3, 63, 64, 130, 199):
        word = philox((seed & 0xFFFFFFFF, seed >> 32), (v // 4, position, 0, 0))[v % 4]
        u = ((word >> 9) + 0.5) / 2**23
        assert noise[v].item() == pytest.approx(-math.log(-math.log(u)), rel=2e-5, abs=2e-6)


def test_noise_has_the_mean_and_variance_of_gumbel() -> None:
    noise = torch.cat([gumbel_noise(7, p, 4096) for p in range(50)]).double()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)


def run(cases: list[Case], logits: torch.Tensor, rows: int, R: int) -> tuple[AcceptResult, torch.Tensor, torch.Tensor]:
    B, V = len(cases), logits.shape[1]
    t = tensors(cases, V, R)
    rules = [pack_rules(c.stop, c.bad, c.words, c.biases) for c in cases]
    t.params.rules_S.copy_(torch.tensor([r.data_ptr() for r in rules]))
    result, words = AcceptResult.allocate(B, R, V), t.masks_SRW.shape[2]
    step = StepTensors(
        *(torch.arange(B, dtype=torch.int32), t.drafts_BR, t.num_drafts_B, t.kinds_BR, t.forced_BR),
        *(t.masks_SRW.data_ptr(), (R * words, words), t.history_SL, t.length_S, t.params, result),
    )
    accept(logits, step, num_rows=rows)
    assert int(result.counts_BV.abs().sum()) == 0
    return result, t.history_SL, t.length_S


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("V", [50, 64, 1000, 1031])
def test_accept_follows_the_definition_on_random_cases(dtype: torch.dtype, V: int) -> None:
    g = torch.Generator().manual_seed(V)

    def pick(n: int) -> int:
        return int(torch.randint(n, (1,), generator=g))

    for _ in range(12):
        B, rows = 1 + pick(3), 1 + pick(4)
        logits = (torch.randn(B * rows, V, generator=g) * 3).to(dtype)
        cases = random_cases(g, logits, B, rows)
        result, history, length = run(cases, logits, rows, R=rows + 1)
        for b, case in enumerate(cases):
            want = expected(case, logits, b * rows)
            got = result.emitted_BR[b, : int(result.num_emitted_B[b])].tolist()
            assert got == want, case
            assert history[b, : int(length[b])].tolist() == case.history + want


def test_a_deferred_row_emits_nothing_and_earlier_tokens_remain() -> None:
    logits = torch.zeros(3, 50)
    logits[0, 7] = logits[1, 8] = logits[2, 9] = 5.0
    result, _, length = run([Case([1, 2], 2, drafts=[7, 8], kinds=[ALL, DEFER, ALL])], logits, 3, 3)
    assert (int(result.num_emitted_B[0]), int(result.blocked_B[0]), int(length[0])) == (1, DEFER, 3)
    result, _, length = run([Case([1, 2], 2, drafts=[7, 8], kinds=[DEFER, ALL, ALL])], logits, 3, 3)
    assert (int(result.num_emitted_B[0]), int(result.blocked_B[0]), int(length[0])) == (0, DEFER, 2)


def test_a_row_without_a_legal_token_is_a_dead_end_and_never_token_zero() -> None:
    logits = torch.randn(1, 50)
    empty = torch.zeros(50, dtype=torch.bool)
    result, _, length = run([Case([1], 1, kinds=[APPLY], masks={0: empty})], logits, 1, 1)
    assert (int(result.num_emitted_B[0]), int(result.blocked_B[0]), int(length[0])) == (0, DEAD_END, 1)


def test_a_stop_token_at_a_steered_row_is_reported() -> None:
    logits = torch.zeros(3, 50)
    for j, token in enumerate((7, 8, 9)):
        logits[j, token] = 5.0
    one = torch.zeros(50, dtype=torch.bool)
    one[8] = True
    kinds, masks = [ALL, APPLY, ALL], {1: one}
    led = Case([1, 2], 2, drafts=[7, 8], kinds=kinds, masks=masks, forced={1: STEERED}, stop=(8,))
    before = Case([1, 2], 2, drafts=[7, 8], kinds=kinds, masks=masks, forced={0: STEERED}, stop=(8,))
    result, _, _ = run([led, before], torch.cat([logits, logits]), 3, 3)
    assert result.finish_B.tolist() == [STOP_STEERED, STOP_TOKEN]
    assert result.num_emitted_B.tolist() == [2, 2]


def test_stop_tokens_and_lengths_end_acceptance_inside_a_block_of_drafts() -> None:
    logits = torch.zeros(4, 50)
    for j, token in enumerate((7, 8, 9, 10)):
        logits[j, token] = 5.0
    stop = Case([1, 2], 2, drafts=[7, 8, 9], stop=(8,))
    limit = Case([1, 2], 2, drafts=[7, 8, 9], max_length=5)
    result, _, length = run([stop, limit], torch.cat([logits, logits]), 4, 4)
    assert result.finish_B.tolist() == [STOP_TOKEN, STOP_LENGTH]
    assert result.num_emitted_B.tolist() == [2, 3]
    assert result.num_accepted_B.tolist() == [2, 3]
    assert length.tolist() == [4, 5]
    result, _, _ = run([Case([1, 2], 2, drafts=[7, 8, 9])], logits, 4, 4)
    assert (int(result.finish_B[0]), int(result.num_emitted_B[0]), int(result.num_accepted_B[0])) == (RUN_ON, 4, 3)


def test_bad_words_ban_the_last_token_only_after_their_head() -> None:
    logits = torch.zeros(2, 50)
    logits[:, 9], logits[:, 3] = 5.0, 4.0
    result, _, _ = run([Case([1, 6, 7], 1, words=((6, 7, 9),)), Case([1, 7, 6], 1, words=((6, 7, 9),))], logits, 1, 1)
    assert result.emitted_BR[:, 0].tolist() == [3, 9]


def test_logprobs_have_the_distribution_of_the_model() -> None:
    logits = torch.randn(1, 70)
    mask = torch.zeros(70, dtype=torch.bool)
    mask[11] = True
    case = Case([1, 11], 1, kinds=[APPLY], masks={0: mask}, num_logprobs=4, repetition=1.5, temperature=0.5)
    result, _, _ = run([case], logits, 1, 1)
    logprobs = logits[0].log_softmax(-1)
    assert int(result.emitted_BR[0, 0]) == 11
    assert result.logprob_BR[0, 0].item() == pytest.approx(logprobs[11].item(), abs=1e-5)
    assert result.top_ids_BRN[0, 0, :4].tolist() == logprobs.topk(4).indices.tolist()
    torch.testing.assert_close(result.top_logprobs_BRN[0, 0, :4], logprobs.topk(4).values, atol=1e-5, rtol=0)


def test_sampling_frequencies_match_the_softmax() -> None:
    # The Gumbel-max trick draws from softmax(logits / T): compare over many positions.
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0] + [-9.0] * 60])
    counts = torch.zeros(64)
    for seed in range(1500):
        result, _, _ = run([Case([1], 1, temperature=1.5, seed=seed * 7919)], logits, 1, 1)
        counts[int(result.emitted_BR[0, 0])] += 1
    want = (logits[0] / 1.5).softmax(-1)
    assert (counts / counts.sum() - want).abs().max().item() < 0.04


def test_a_tiny_temperature_is_greedy_and_never_nan() -> None:
    logits = torch.randn(1, 64) * 50
    result, _, _ = run([Case([1], 1, temperature=1e-30)], logits, 1, 1)
    assert int(result.emitted_BR[0, 0]) == int(logits.argmax())
