"""Calls the logits processors of a step's lanes, between the forward and the mask rows.

The calls of one round, the k-th processor of every request, are grouped by processor: a batched one is called once for
all its lanes. A call that fails is repeated for each sequence and then for each row, so an error belongs to
one row. Drafts before a failed row are verified as usual, and the sequence ends only if the row is reached: so it
ends with the same tokens with drafts and without. Invariant: the rows of a lane without processors are not touched.
Not responsible for: captured steps (see captured.py), the error that the client gets (see core/runner.py).

Shapes: B lanes, R rows of one sequence, N rows of a call, P rows of the step, V columns of the logits, L tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from gpu_engine.api.processors import CapturedRows, LoadedProcessor, SequenceRows
from gpu_engine.api.request import Request
from gpu_engine.processors.loading import unlike
from gpu_engine.step.buffers import StepBatch
from gpu_engine.step.launches import StepLaunches, place_of
from gpu_engine.step.stream import Stream
from kernels.logprobs import RowLogprobs
from kernels.row_kinds import FAILED

log = logging.getLogger(__name__)

NOT_FINITE = "returned NaN or +inf"


@dataclass(slots=True, eq=False)
class _Lane:
    """A lane with processors, for one step."""

    number: int
    request: Request
    tokens: torch.Tensor
    """int32 [n + R - 1]: committed tokens and drafts."""
    length: int
    """n."""
    logits_RV: torch.Tensor
    """Its rows: a view of the step's logits, which the processors change."""
    live: int
    """Rows before the first that failed."""
    model_logits_RV: torch.Tensor | None
    """A copy for the log-probabilities, which are the model's own; None: the request wants none."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows [begin, end) of a lane."""

    lane: _Lane
    begin: int
    end: int

    @property
    def logits_RV(self) -> torch.Tensor:
        return self.lane.logits_RV[self.begin : self.end]

    def rows(self, arguments: object) -> SequenceRows:
        request, lane = self.lane.request, self.lane
        return SequenceRows(
            request.request_id,
            request.scheduling.client_id,
            request.index,
            arguments,
            len(request.prompt_ids),
            lane.tokens[: lane.length + self.end - 1],
            self.end - self.begin,
        )


@dataclass(slots=True, eq=False)
class HostProcessing:
    """Used only by the engine thread, with the stream current.

    Args:
        stream: of the steps. One that does not run at once is waited for: processors may read values.
        launches: of the stream's device.
        num_rows: the most rows of a lane.
    """

    stream: Stream
    launches: StepLaunches
    num_rows: int
    failures: dict[tuple[int, int], str] = field(default_factory=dict)
    """Failures in the last step: by lane and row, the processor and what it did."""
    _codes: dict[tuple[int, int], int] = field(default_factory=dict)
    _lanes: list[_Lane] = field(default_factory=list)
    _scores: RowLogprobs | None = None

    @torch.no_grad()
    def run(self, batch: StepBatch, logits_NV: torch.Tensor, first_row_B: torch.Tensor | None) -> torch.Tensor:
        """Return the step's logits with those of `batch.host_processed` changed, float32.

        `logits_NV` [B * P, V] is changed in place where it is float32. Row j of lane b is `first_row_B[b] + j`; None:
        b * P + j.
        """
        logits_NV = logits_NV.float()
        self.failures, self._codes = {}, {}
        self._lanes = self._lanes_of(batch, logits_NV, first_row_B)
        with _one_thread() if self.stream.runs_at_once else nullcontext():
            self._run(self._lanes)
        return logits_NV

    def _run(self, lanes: list[_Lane]) -> None:
        for k in range(max((len(lane.request.logits_processors) for lane in lanes), default=0)):
            parts: dict[LoadedProcessor, list[_Part]] = {}
            for lane in lanes:
                if lane.live and k < len(uses := lane.request.logits_processors):
                    parts.setdefault(uses[k].loaded, []).append(_Part(lane, 0, lane.live))
            for loaded, members in parts.items():
                if loaded.single is not None:
                    for part in members:
                        self._apply(loaded, k, [part])
                else:
                    self._apply(loaded, k, members)

    def before_accept(self, batch: StepBatch) -> None:
        """Give the failed rows a kind that ends their sequence. Runs inside a launch, after the wait for rows."""
        for (b, row), code in self._codes.items():
            batch.lane.kinds_BR[b, row].fill_(code)

    def after_accept(self, batch: StepBatch) -> None:
        """Replace the log-probabilities of the processed lanes by the model's own. Runs inside a launch."""
        for lane in self._lanes:
            if lane.model_logits_RV is not None:
                self._score(batch, lane, lane.model_logits_RV)
        self._lanes = []  # holds views of the step's logits

    def _lanes_of(self, batch: StepBatch, logits_NV: torch.Tensor, first_row_B: torch.Tensor | None) -> list[_Lane]:
        slot, lane, place_B, P = batch.slot, batch.lane, place_of(batch), batch.num_rows
        numbers = (slot.length_S[place_B], lane.num_drafts_B[: batch.num_lanes], slot.done_S[place_B].int(), place_B)
        lengths, drafts, done, places = torch.stack(numbers).tolist()
        first = range(0, batch.num_lanes * P, P) if first_row_B is None else first_row_B.tolist()
        found = []
        for b, request in enumerate(batch.host_processed):
            if request is None or done[b]:
                continue  # a step that the host has not read yet ended the sequence
            tokens = slot.history_SL[places[b], : lengths[b]]
            if drafts[b]:
                tokens = torch.cat([tokens, lane.drafts_BR[b, : drafts[b]].clamp(min=0)])
            rows_RV = logits_NV[first[b] : first[b] + drafts[b] + 1]
            own_RV = None if request.outputs.num_logprobs is None else rows_RV.clone()
            found.append(_Lane(b, request, tokens, lengths[b], rows_RV, len(rows_RV), own_RV))
        return found

    def _apply(self, loaded: LoadedProcessor, k: int, parts: list[_Part]) -> None:
        """Change the logits of the parts, or find the rows that fail."""
        error: Exception | None = None
        given_NV = torch.cat([part.logits_RV for part in parts])  # a copy: after an error the rows are as before
        try:
            out = _call(loaded, k, parts, given_NV)
            problem = unlike(out, given_NV)
        except Exception as raised:  # whatever the processor does
            out, error, problem = None, raised, f"raised {type(raised).__name__}"
        if isinstance(out, torch.Tensor) and problem is None:
            self._take(loaded, parts, out)
        elif len(parts) > 1:
            for part in parts:
                self._apply(loaded, k, [part])
        elif parts[0].end - parts[0].begin > 1:
            for row in range(parts[0].begin, parts[0].end):
                if row < parts[0].lane.live:
                    self._apply(loaded, k, [_Part(parts[0].lane, row, row + 1)])
        else:
            log.error("logits processor %s %s", loaded.name, problem, exc_info=error)
            self._fail(loaded, parts[0].lane, parts[0].begin, problem or "")

    def _take(self, loaded: LoadedProcessor, parts: list[_Part], out_NV: torch.Tensor) -> None:
        finite = (out_NV.amax(dim=1) < torch.inf).tolist()  # the largest of a row with NaN is NaN
        at = 0
        for part in parts:
            count = part.end - part.begin
            part.logits_RV.copy_(out_NV[at : at + count])
            if not all(finite[at : at + count]):
                row = part.begin + finite[at : at + count].index(False)
                log.error("logits processor %s %s", loaded.name, NOT_FINITE)
                self._fail(loaded, part.lane, row, NOT_FINITE)
            at += count

    def _fail(self, loaded: LoadedProcessor, lane: _Lane, row: int, problem: str) -> None:
        # An earlier row of the lane may have failed in an earlier round; later rows are not processed then.
        lane.live = row
        self.failures[lane.number, row] = f"{loaded.name} {problem}"
        self._codes[lane.number, row] = FAILED + loaded.number

    def _score(self, batch: StepBatch, lane: _Lane, logits_RV: torch.Tensor) -> None:
        if self._scores is None:
            self._scores = RowLogprobs.allocate(self.num_rows, logits_RV.shape[1], logits_RV.device)
        scores, result, count, b = self._scores, batch.lane.result, len(logits_RV), lane.number
        scores.tokens_N[:count] = result.emitted_BR[b, :count]
        scores.count_1.fill_(count)
        scores.wanted_1.fill_(lane.request.outputs.num_logprobs or 0)
        self.launches.row_logprobs(logits_RV, scores)
        result.logprob_BR[b, :count] = scores.logprob_N[:count]
        result.top_ids_BRN[b, :count] = scores.top_ids_NM[:count]
        result.top_logprobs_BRN[b, :count] = scores.top_logprobs_NM[:count]

    def __repr__(self) -> str:
        return f"<HostProcessing, {len(self.failures)} failures in the last step>"


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch's operations only on the calling thread: they are short, and waking others takes longer than they."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


def _call(loaded: LoadedProcessor, k: int, parts: Sequence[_Part], logits_NV: torch.Tensor) -> object:
    """Return whatever the processor returns; it is the k-th of each part's request."""
    arguments = [part.lane.request.logits_processors[k].arguments for part in parts]
    if loaded.captured is not None:
        return loaded.captured.process_rows(_captured_rows(loaded.captured.num_arguments, parts, arguments), logits_NV)
    sequences = [part.rows(own) for part, own in zip(parts, arguments, strict=True)]
    if loaded.single is not None:
        (only,) = sequences
        return loaded.single.process(only, logits_NV)
    assert loaded.batched is not None
    return loaded.batched.process_batch(sequences, logits_NV)


def _captured_rows(num_arguments: int, parts: Sequence[_Part], arguments: Sequence[Sequence[float]]) -> CapturedRows:
    """Return the rows of some lanes as a captured processor gets them."""
    device, counts = parts[0].lane.tokens.device, [part.end - part.begin for part in parts]
    most = max(part.lane.length + part.end - 1 for part in parts)
    tokens_CL = torch.zeros(len(parts), most, dtype=torch.int32, device=device)
    for tokens_L, part in zip(tokens_CL, parts, strict=True):
        count = part.lane.length + part.end - 1
        tokens_L[:count] = part.lane.tokens[:count]
    of_row = torch.tensor([c for c, count in enumerate(counts) for _ in range(count)], device=device)
    lengths = [part.lane.length + row for part in parts for row in range(part.begin, part.end)]
    prompts = torch.tensor([len(part.lane.request.prompt_ids) for part in parts], device=device)
    numbers = torch.tensor([[*own] for own in arguments], dtype=torch.float64, device=device)
    return CapturedRows(
        tokens_CL[of_row],
        torch.tensor(lengths, device=device),
        prompts[of_row],
        numbers.view(len(parts), num_arguments)[of_row],
        torch.ones(len(of_row), dtype=torch.bool, device=device),
    )
