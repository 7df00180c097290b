"""Cases for the accept kernels of every device, their definition in float64, and runs over them.

A target is the device of Triton's kernels, or None for the native ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from kernels.accept import AcceptResult, SlotParams, StepTensors, accept, gumbel_noise, pack_rules
from kernels.row_kinds import ALL, APPLY, DEFER, FORCED
from kernels.step_tensors import TreeRows


@dataclass
class Case:
    """The inputs of `accept` for one slot, as plain lists."""

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
    biases: tuple[tuple[int, float], ...] = ()


def reference_logits(case: Case, history: list[int], logits: torch.Tensor, row: int) -> torch.Tensor:
    """Return the logits of a row under its mask, bans, biases and penalties, in float64."""
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
    for token, bias in case.biases:
        x[token] += bias
    for token in set(history):
        x[token] = x[token] / case.repetition if x[token] > 0 else x[token] * case.repetition
        count = answer.count(token)
        x[token] -= case.frequency * count + (case.presence if count else 0.0)
    return x


def reference_token(case: Case, history: list[int], logits: torch.Tensor, row: int) -> int | None:
    """Return the token of a row by the definition, in float64; None for a row that emits nothing."""
    x = reference_logits(case, history, logits, row)
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


@dataclass
class Inputs:
    """The cases as tensors in CPU memory, with one slot and one lane for each case."""

    drafts_BR: torch.Tensor
    num_drafts_B: torch.Tensor
    kinds_BR: torch.Tensor
    forced_BR: torch.Tensor
    masks_SRW: torch.Tensor
    history_SL: torch.Tensor
    length_S: torch.Tensor
    params: SlotParams


def tensors(cases: list[Case], V: int, R: int) -> Inputs:
    """Return the cases as tensors. The caller writes the rules."""
    B, words = len(cases), (V + 31) // 32
    history, length = torch.zeros(B, 200, dtype=torch.int32), torch.zeros(B, dtype=torch.int32)
    drafts, num = torch.zeros(B, R, dtype=torch.int32), torch.zeros(B, dtype=torch.int32)
    kinds, forced = torch.zeros(B, R, dtype=torch.uint8), torch.full((B, R), -1, dtype=torch.int32)
    masks = torch.zeros(B, R, words, dtype=torch.int64)
    params = SlotParams.allocate(B)
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
            padded[V:] = 1  # bits past the vocabulary are ignored
            masks[b, row] = (padded.view(-1, 32) << torch.arange(32)).sum(1)
        params.seed_S[b] = c.seed
        for name in ("prompt_length", "max_length", "min_tokens", "temperature", "top_p", "min_p", "repetition"):
            getattr(params, f"{name}_S")[b] = getattr(c, name)
        params.presence_S[b], params.frequency_S[b] = c.presence, c.frequency
        params.top_k_S[b], params.num_logprobs_S[b] = c.top_k, c.num_logprobs
    bits = masks.to(torch.uint32).view(torch.int32).contiguous()
    return Inputs(drafts, num, kinds, forced, bits, history, length, params)


@dataclass
class Made:
    """A step over cases. `rows` are Triton's state of the slots; the native kernel reads what `kept` holds."""

    step: StepTensors
    rows: Any
    kept: object


def step_of(
    cases: list[Case],
    V: int,
    R: int,
    target: torch.device | None,
    *,
    rows: int = 1,
    block: int = 256,
    filters: bool = True,
    tree: TreeRows | None = None,
) -> Made:
    """Return a step with one lane and one slot for each case, and scratch for `rows` rows of each."""
    B, t = len(cases), tensors(cases, V, R)
    slots, result = torch.arange(B, dtype=torch.int32), AcceptResult.allocate(B, R, V, target or "cpu")
    lanes = (slots, t.drafts_BR, t.num_drafts_B, t.kinds_BR, t.forced_BR)
    if target is None:
        rules, words = [pack_rules(c.stop, c.bad, c.words, c.biases) for c in cases], t.masks_SRW.shape[2]
        t.params.rules_S.copy_(torch.tensor([r.data_ptr() for r in rules]))
        masks = (t.masks_SRW.data_ptr(), (R * words, words))
        return Made(StepTensors(*lanes, *masks, t.history_SL, t.length_S, t.params, result), None, (rules, t))
    from kernels.cuda.row_state import DeviceRows, RowScratch, SlotRows  # a CPU install has no Triton

    done = torch.zeros(B, dtype=torch.bool, device=target)
    state = SlotRows.allocate(B, V, t.masks_SRW.to(target), done, max_rules=64)
    for b, c in enumerate(cases):
        state.write_rules(b, pack_rules(c.stop, c.bad, c.words))
        ids, values = [token for token, _ in c.biases], [bias for _, bias in c.biases]
        state.biases.write(b, torch.tensor(ids, dtype=torch.int32), torch.tensor(values))
        state.count_seen(b, torch.tensor(c.history), c.prompt_length)
    params = SlotParams(**{f.name: getattr(t.params, f.name).to(target) for f in fields(t.params)})
    there = (lane.to(target) for lane in lanes)
    scratch = RowScratch.allocate(B * rows, V, target, block=block, filters=filters)
    step = StepTensors(
        *(*there, 0, (0, 0), t.history_SL.to(target), t.length_S.to(target), params, result),
        DeviceRows(state, scratch, filters=filters),
        tree=tree,
    )
    return Made(step, state, None)


def run(
    cases: list[Case],
    logits: torch.Tensor,
    rows: int,
    R: int,
    target: torch.device | None,
    *,
    tree: TreeRows | None = None,
) -> tuple[AcceptResult, torch.Tensor, torch.Tensor, Any]:
    """Accept once. Return the result, histories and lengths in CPU memory, and Triton's state of the slots."""
    V = logits.shape[1]
    made = step_of(cases, V, R, target, rows=rows, tree=tree)
    accept(logits.to(target or "cpu"), made.step, num_rows=rows)
    history, length = made.step.history_SL.cpu(), made.step.length_S.cpu()
    if target is None:
        assert int(made.step.result.counts_BV.abs().sum()) == 0
    else:
        for b, c in enumerate(cases):  # the counts are those of the new history
            want = step_of([c], V, R, target).rows
            want.seen_SV.zero_()
            want.count_seen(0, history[b, : int(length[b])], c.prompt_length)
            assert torch.equal(made.rows.seen_SV[b], want.seen_SV[0])
    return made.step.result, history, length, made.rows


def random_cases(g: torch.Generator, logits_NV: torch.Tensor, B: int, rows: int) -> list[Case]:
    """Return B cases with random parameters of every kind. Their first drafts are right, so that some are accepted."""
    V = logits_NV.shape[1]

    def pick(n: int) -> int:
        return int(torch.randint(n, (1,), generator=g))

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
                biases=tuple((token, pick(9) - 4.5) for token in sorted({pick(V) for _ in range(pick(V))})),
            )
        )
    for b, case in enumerate(cases):
        history = list(case.history)
        for j in range(rows - 1):
            token = reference_token(case, history, logits_NV[b * rows + j], j)
            case.drafts.append(token if token is not None and pick(4) else pick(V))
            history.append(case.drafts[-1])
    return cases
