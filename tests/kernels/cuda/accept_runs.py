"""Runs of the acceptance kernel over a case."""

from __future__ import annotations

from dataclasses import fields

import torch

from kernels.accept import (
    AcceptResult,
    SlotParams,
    StepTensors,
    pack_rules,
)
from kernels.cuda.accept import accept
from kernels.cuda.row_state import DeviceRows, RowScratch, SlotRows
from kernels.step_tensors import TreeRows
from tests.kernels.accept_cases import Case, tensors


def on(params: SlotParams, device: torch.device) -> SlotParams:
    return SlotParams(**{f.name: getattr(params, f.name).to(device) for f in fields(params)})


def none_ended(num_slots: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(num_slots, dtype=torch.bool, device=device)


def run(
    cases: list[Case],
    logits: torch.Tensor,
    rows: int,
    R: int,
    device: torch.device,
    *,
    filters: bool = True,
    tree: TreeRows | None = None,
) -> tuple[AcceptResult, torch.Tensor, torch.Tensor, SlotRows]:
    B, V = len(cases), logits.shape[1]
    t = tensors(cases, V, R)
    state = SlotRows.allocate(B, V, t.masks_SRW.to(device), none_ended(B, device), max_rules=64)
    for b, c in enumerate(cases):
        state.write_rules(b, pack_rules(c.stop, c.bad, c.words))
        ids, values = [token for token, _ in c.biases], [bias for _, bias in c.biases]
        state.biases.write(b, torch.tensor(ids, dtype=torch.int32), torch.tensor(values))
        state.count_seen(b, torch.tensor(c.history), c.prompt_length)
    result = AcceptResult.allocate(B, R, V, device)
    history, length = t.history_SL.to(device), t.length_S.to(device)
    step = StepTensors(
        *(torch.arange(B, dtype=torch.int32, device=device), t.drafts_BR.to(device), t.num_drafts_B.to(device)),
        *(t.kinds_BR.to(device), t.forced_BR.to(device), 0, (0, 0), history, length, on(t.params, device), result),
        DeviceRows(state, RowScratch.allocate(B * rows, V, device, block=256, filters=filters), filters=filters),
        tree=tree,
    )
    accept(logits.to(device), step, num_rows=rows)
    for b, c in enumerate(cases):  # the counts are those of the new history
        want = SlotRows.allocate(1, V, t.masks_SRW, none_ended(1, t.masks_SRW.device))
        want.count_seen(0, history[b, : int(length[b])].cpu(), c.prompt_length)
        assert torch.equal(state.seen_SV[b].cpu(), want.seen_SV[0])
    return result, history.cpu(), length.cpu(), state
