"""The native accept kernel against a plain reference that follows the definition."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch

from kernels.accept import RUN_ON, STOP_LENGTH, STOP_TOKEN, AcceptResult, SlotParams, accept, gumbel_noise, pack_rules

ALL, APPLY, FORCED, DEFER, DEAD_END = 0, 1, 2, 3, 4


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> list[int]:
    """Philox4x32-10 from its paper, in plain integers."""
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


@dataclass
class Case:
    """One slot: what `accept` is given, with plain lists."""

    history: list[int]
    prompt_length: int
    drafts: list[int] = field(default_factory=list)
    kinds: list[int] | None = None
    forced: dict[int, int] = field(default_factory=dict)
    masks: dict[int, torch.Tensor] = field(default_factory=dict)
    max_length: int = 10_000
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    top_k: int = 0
    seed: int = 0
    num_logprobs: int = -1
    stop: tuple[int, ...] = ()
    bad: tuple[int, ...] = ()
    words: tuple[tuple[int, ...], ...] = ()


def reference_token(case: Case, history: list[int], logits: torch.Tensor, row: int) -> int | None:
    """The definition, in float64."""
    x = logits.double().clone()
    kind = case.kinds[row] if case.kinds else ALL
    if kind == APPLY:
        x[~case.masks[row]] = -math.inf
    if kind == FORCED:
        keep = x[case.forced[row]].clone()
        x[:] = -math.inf
        x[case.forced[row]] = keep
    answer = history[case.prompt_length :]
    if len(answer) < case.min_tokens:
        x[list(case.stop)] = -math.inf
    x[list(case.bad)] = -math.inf
    for word in case.words:
        if tuple(history[len(history) - len(word) + 1 :]) == word[:-1]:
            x[word[-1]] = -math.inf
    for token in set(history):
        x[token] = x[token] / case.repetition if x[token] > 0 else x[token] * case.repetition
        count = answer.count(token)
        x[token] -= case.frequency * count + (case.presence if count else 0.0)
    if x.max() == -math.inf:
        return None
    if case.temperature == 0:
        return int(x.argmax())
    x = x / case.temperature
    if 0 < case.top_k < len(x):
        x[x < x.topk(case.top_k).values[-1]] = -math.inf
    if case.top_p < 1:
        p, order = x.softmax(-1).sort(descending=True)
        cut = x[order[int((p.cumsum(-1) < case.top_p).sum())]]
        x[x < cut] = -math.inf
    if case.min_p > 0:
        x[x < x.max() + math.log(case.min_p)] = -math.inf
    return int((x + gumbel_noise(case.seed, len(history), len(x)).double()).argmax())


def run(cases: list[Case], logits: torch.Tensor, rows: int, R: int) -> tuple[AcceptResult, torch.Tensor, torch.Tensor]:
    B, V = len(cases), logits.shape[1]
    words = (V + 31) // 32
    history, length = torch.zeros(B, 200, dtype=torch.int32), torch.zeros(B, dtype=torch.int32)
    drafts, num = torch.zeros(B, R, dtype=torch.int32), torch.zeros(B, dtype=torch.int32)
    kinds, forced = torch.zeros(B, R, dtype=torch.uint8), torch.full((B, R), -1, dtype=torch.int32)
    masks = torch.zeros(B, R, words, dtype=torch.int64)
    params, keep = SlotParams.allocate(B), []
    for b, c in enumerate(cases):
        history[b, : len(c.history)] = torch.tensor(c.history)
        length[b], num[b] = len(c.history), len(c.drafts)
        drafts[b, : len(c.drafts)] = torch.tensor(c.drafts, dtype=torch.int32)
        kinds[b, : len(c.kinds or [])] = torch.tensor(c.kinds or [], dtype=torch.uint8)
        for row, token in c.forced.items():
            forced[b, row] = token
        for row, mask in c.masks.items():
            padded = torch.zeros(words * 32, dtype=torch.int64)
            padded[:V] = mask
            padded[V:] = 1  # bits past the vocabulary mean nothing
            masks[b, row] = (padded.view(-1, 32) << torch.arange(32)).sum(1)
        keep.append(pack_rules(c.stop, c.bad, c.words))
        params.rules_S[b] = keep[-1].data_ptr()
        params.seed_S[b] = c.seed
        for name in (
            "prompt_length",
            "max_length",
            "min_tokens",
            "temperature",
            "top_p",
            "min_p",
            "repetition",
            "presence",
        ):
            getattr(params, f"{name}_S")[b] = getattr(c, name)
        params.frequency_S[b], params.top_k_S[b], params.num_logprobs_S[b] = c.frequency, c.top_k, c.num_logprobs
    result = AcceptResult.allocate(B, R, V)
    bits = masks.to(torch.uint32).view(torch.int32).contiguous()
    accept(
        *(logits, torch.arange(B, dtype=torch.int32), drafts, num, kinds, forced, bits.data_ptr(), (R * words, words)),
        *(history, length, params, result),
        num_rows=rows,
    )
    assert int(result.counts_BV.abs().sum()) == 0
    return result, history, length


def expected(case: Case, logits: torch.Tensor, first_row: int) -> list[int]:
    history, out = list(case.history), []
    for j in range(len(case.drafts) + 1):
        if case.kinds and case.kinds[j] >= DEFER:
            break
        token = reference_token(case, history, logits[first_row + j], j)
        if token is None:
            break
        history.append(token)
        out.append(token)
        if token in case.stop or len(history) >= case.max_length or j >= len(case.drafts) or token != case.drafts[j]:
            break
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("V", [50, 64, 1000, 1031])
def test_accept_follows_the_definition_on_random_cases(dtype: torch.dtype, V: int) -> None:
    g = torch.Generator().manual_seed(V)

    def pick(n: int) -> int:
        return int(torch.randint(n, (1,), generator=g))

    for _ in range(12):
        B, rows = 1 + pick(3), 1 + pick(4)
        logits = (torch.randn(B * rows, V, generator=g) * 3).to(dtype)
        cases = []
        for _ in range(B):
            kinds = [pick(3) for _ in range(rows)]
            cases.append(
                Case(
                    history=[pick(V) for _ in range(5 + pick(20))],
                    prompt_length=3,
                    kinds=kinds,
                    forced={j: pick(V) for j, k in enumerate(kinds) if k == FORCED},
                    masks={j: torch.rand(V, generator=g) < 0.3 for j, k in enumerate(kinds) if k == APPLY},
                    temperature=[0.0, 0.3, 1.0, 2.0][pick(4)],
                    top_p=[1.0, 0.9, 0.3][pick(3)],
                    top_k=[0, 1, 5, 40][pick(4)],
                    min_p=[0.0, 0.2][pick(2)],
                    repetition=[1.0, 1.3][pick(2)],
                    presence=[0.0, 0.7][pick(2)],
                    frequency=[0.0, 0.4, -0.4][pick(3)],
                    seed=pick(2**31) << 20,
                    min_tokens=[0, 50][pick(2)],
                    stop=(pick(V),),
                    bad=(pick(V), pick(V)),
                )
            )
        for b, case in enumerate(cases):  # drafts that are right for a while, so that acceptance is exercised
            history = list(case.history)
            for j in range(rows - 1):
                token = reference_token(case, history, logits[b * rows + j], j)
                case.drafts.append(token if token is not None and pick(4) else pick(V))
                history.append(case.drafts[-1])
        result, history, length = run(cases, logits, rows, R=rows + 1)
        for b, case in enumerate(cases):
            want = expected(case, logits, b * rows)
            got = result.emitted_BR[b, : int(result.num_emitted_B[b])].tolist()
            assert got == want, case
            assert history[b, : int(length[b])].tolist() == case.history + want


def test_a_deferred_row_emits_nothing_and_keeps_what_came_before() -> None:
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


def test_stop_token_and_length_end_the_walk_inside_a_draft_block() -> None:
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


def test_logprobs_are_of_the_models_own_distribution() -> None:
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
