"""The step program over recording fakes: the order of its launches, and the tensors that each of them gets.

Not responsible for: tokens (see test_step.py), the launches themselves (see test_native_launches.py).

Shapes: S slots, B lanes, R rows a slot, P rows of a step, V columns of the logits.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, cast

import pytest
import torch

from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.loader import LoadedModel
from gpu_engine.model.states import SequenceStates
from gpu_engine.step.buffers import LaneBuffers, SlotBuffers, StepBatch
from gpu_engine.step.mask_rows import RowStore
from gpu_engine.step.output_ring import OutputRing
from gpu_engine.step.processing.captured import CapturedProcessing
from gpu_engine.step.processing.host import HostProcessing
from gpu_engine.step.processing.processing import Processing
from gpu_engine.step.program import StepProgram
from gpu_engine.step.stream import ImmediateStream
from kernels.accept import StepTensors
from kernels.logprobs import MAX_LOGPROBS, BeamRows
from kernels.row_kinds import ALL, APPLY
from kernels.step_tensors import TreeRows

S, B, R, V, LAYER = 6, 3, 4, 8, 5
DRAFTS = [2, 1, 0]
"""Drafts of the three lanes: in a step of three rows, six of the nine are no padding."""


@dataclass
class Recorder:
    """Every part of a program but its buffers: writes its calls down, in order."""

    vocab: int = V
    skips_padding: bool = False
    takes_prompts: bool = False
    can_defer_head: bool = False
    adapters: object | None = None
    layers: tuple[int, ...] = ()
    calls: list[str] = field(default_factory=list)
    loaded: list[tuple[torch.Tensor, ...]] = field(default_factory=list)
    forwards: list[tuple[torch.Tensor, AttentionContext]] = field(default_factory=list)
    heads: list[tuple[StepTensors, int]] = field(default_factory=list)
    accepted: list[tuple[torch.Tensor, StepTensors]] = field(default_factory=list)
    proposed: list[tuple[StepTensors, torch.Tensor, dict[int, torch.Tensor | None]]] = field(default_factory=list)
    compacted: list[tuple[object, ...]] = field(default_factory=list)
    first_rows: list[torch.Tensor | None] = field(default_factory=list)
    kinds_at_accept: list[torch.Tensor] = field(default_factory=list)
    changed_NV: torch.Tensor | None = None
    """Returned by the logits processors."""
    drafting_s: float = 0.0
    store: RowStore = field(default_factory=lambda: RowStore.around(torch.zeros(S - 1, R, 1, dtype=torch.int32)))

    def __post_init__(self) -> None:
        tokens_SR = torch.arange(S - 1, dtype=torch.int32)[:, None] + torch.arange(R, dtype=torch.int32)
        self.store.mask_SRW[:] = 1 << tokens_SR[:, :, None]

    def load(self, batch: StepBatch, *inputs: torch.Tensor) -> None:
        self.calls.append("load")
        self.loaded.append(inputs)
        ids_BP, positions_BP, table_BN = inputs
        ids_BP.copy_(torch.arange(ids_BP.numel()).view(ids_BP.shape))
        positions_BP.copy_(100 + ids_BP)
        table_BN.copy_(torch.arange(len(table_BN), dtype=torch.int32)[:, None].expand(table_BN.shape))

    def post(self, batch: StepBatch) -> None:
        self.calls.append("post")

    def await_rows(self, batch: StepBatch) -> None:
        self.calls.append("await")

    def rows(self) -> tuple[int, tuple[int, int]]:
        return 4096, (12, 3)

    def logits(self, ids_BP: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        self.calls.append("forward")
        assert not torch.is_grad_enabled()
        self.forwards.append((ids_BP.clone(), context))
        rows = ids_BP.numel()
        return torch.arange(rows, dtype=torch.float32)[:, None] * torch.arange(self.vocab)

    def masked_head(self, step: StepTensors, num_rows: int) -> None:
        self.calls.append("head")
        assert not torch.is_grad_enabled()
        self.heads.append((step, num_rows))

    def accept(self, batch: StepBatch, logits_NV: torch.Tensor, step: StepTensors) -> None:
        self.calls.append("accept")
        self.accepted.append((logits_NV, step))
        self.kinds_at_accept.append(batch.lane.kinds_BR.clone())

    def __call__(
        self,
        slots_B: torch.Tensor,
        length_S: torch.Tensor,
        num_emitted_B: torch.Tensor,
        tree: TreeRows,
        page_table_BN: torch.Tensor,
    ) -> None:
        self.calls.append("compact")
        self.compacted.append((slots_B, length_S, num_emitted_B, tree, page_table_BN))

    def advance(self, batch: StepBatch, store: RowStore) -> None:
        self.calls.append("advance")
        assert store is self.store

    def drop_drafts(self, batch: StepBatch) -> None:
        self.calls.append("drop_drafts")

    def propose(
        self, batch: StepBatch, step: StepTensors, page_table_BN: torch.Tensor, hidden: dict[int, torch.Tensor | None]
    ) -> None:
        self.calls.append("propose")
        time.sleep(self.drafting_s)
        self.proposed.append((step, page_table_BN, hidden))

    def pack(self, batch: StepBatch) -> None:
        self.calls.append("pack")

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def forward_of(self, *lanes: list[int]) -> object:
        self.calls.append(f"states {lanes}")
        return lanes

    # The logits processors, which the host calls.

    def run(self, batch: StepBatch, logits_NV: torch.Tensor, first_row_B: torch.Tensor | None) -> torch.Tensor:
        self.calls.append("host")
        self.first_rows.append(first_row_B)
        self.changed_NV = logits_NV + 1
        return self.changed_NV

    def before_accept(self, batch: StepBatch) -> None:
        self.calls.append("before accept")

    def after_accept(self, batch: StepBatch) -> None:
        self.calls.append("after accept")


@dataclass
class Captured:
    """Logits processors that are captured; the row of lane 1 fails."""

    calls: list[str]
    given_NV: torch.Tensor | None = None
    changed_NV: torch.Tensor | None = None

    def run(self, batch: StepBatch, logits_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append("captured")
        self.given_NV, self.changed_NV = logits_NV, logits_NV + 1
        codes_BP = torch.zeros(batch.num_lanes, batch.num_rows, dtype=torch.uint8)
        codes_BP[1, 0] = 77
        return self.changed_NV, codes_BP


class DeviceLike(ImmediateStream):
    """Runs at once, but says that it does not; every kernel is written down."""

    runs_at_once = False

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self._calls = calls

    def synchronize(self) -> None:
        self._calls.append("synchronize")


class Bench:
    """A program over fakes, with three lanes in the slots 4, 0 and 2."""

    def __init__(
        self,
        *,
        device_like: bool = False,
        trees: bool = False,
        processing: bool = False,
        recurrent: bool = False,
        **recorder: Any,
    ) -> None:
        self.fake = fake = Recorder(**recorder)
        self.captured = Captured(fake.calls)
        self.slot = SlotBuffers.allocate(S, R, 40, 16)
        self.lane = LaneBuffers.allocate(B, R, V, trees=trees)
        self.lane.slots_B.copy_(torch.tensor([4, 0, 2], dtype=torch.int32))
        self.lane.num_drafts_B.copy_(torch.tensor(DRAFTS, dtype=torch.int32))
        self.slot.adapter_S.copy_(torch.arange(S, dtype=torch.int32) * 10)
        self.pages: list[Any] = [object()]
        self.program = StepProgram(
            DeviceLike(fake.calls) if device_like else ImmediateStream(),
            cast(Any, fake),
            cast(LoadedModel, fake),
            self.pages,
            cast(Any, fake),
            cast(Any, fake),
            self.slot,
            self.lane,
            cast(OutputRing, fake),
            processing=Processing(cast(HostProcessing, fake), cast(CapturedProcessing, self.captured))
            if processing
            else None,
            compaction=fake if trees else None,
            states=cast(SequenceStates, fake) if recurrent else None,
        )

    def step(self, num_rows: int = 3, num_lanes: int = B, **changes: Any) -> StepBatch:
        """Run one step; the fakes have what it did."""
        self.fake.calls.clear()
        changes.setdefault("any_guided", False)
        batch = StepBatch(self.slot, self.lane, num_lanes, num_rows, **changes)
        self.program(batch)
        return batch

    @property
    def context(self) -> AttentionContext:
        """Of the last forward."""
        return self.fake.forwards[-1][1]


BEAMS = BeamRows(torch.tensor([2, 0]), None, None)


@pytest.mark.parametrize(
    ("bench", "step", "between"),
    [
        ({}, {}, "forward await accept advance propose"),
        ({"can_defer_head": True}, {"any_guided": True}, "forward await head accept advance propose"),
        ({"can_defer_head": True}, {}, "forward await accept advance propose"),
        ({"can_defer_head": True, "device_like": True}, {"any_guided": True}, "forward await accept advance propose"),
        ({"can_defer_head": True}, {"any_guided": True, "beams": BEAMS}, "forward await accept advance propose"),
        (
            {"can_defer_head": True, "processing": True},
            {"any_guided": True, "host_processed": (None,)},
            "forward host await before_accept accept after_accept advance propose",
        ),
        (
            {"device_like": True, "processing": True},
            {"host_processed": (None,)},
            "forward synchronize host await before_accept accept after_accept advance propose",
        ),
        (
            {"can_defer_head": True, "processing": True},
            {"any_guided": True, "captured_processing": True},
            "forward captured await accept advance propose",
        ),
        ({"processing": True}, {}, "forward await accept advance propose"),
        ({"trees": True, "device_like": True}, {}, "forward await accept compact advance propose"),
        ({"trees": True, "device_like": True}, {"num_rows": 1}, "forward await accept advance propose"),
        ({"device_like": True}, {"max_rows": 1}, "forward await accept advance"),
        ({"device_like": True}, {"max_rows": 2}, "forward await accept advance propose"),
        ({}, {"max_rows": 1}, "forward await accept advance drop_drafts propose"),
    ],
)
def test_a_step_is_one_order_of_launches(bench: dict[str, Any], step: dict[str, Any], between: str) -> None:
    bench_ = Bench(**bench)
    bench_.step(**step)
    expected = ["load", "post", *between.split(), "pack"]
    assert [call.replace(" ", "_") for call in bench_.fake.calls] == expected
    assert bench_.program.propose_s >= 0


def test_the_time_of_proposing_is_the_time_of_the_drafter() -> None:
    bench = Bench(drafting_s=0.02)
    begun_s = time.perf_counter()
    bench.step()
    assert 0.02 <= bench.program.propose_s <= time.perf_counter() - begun_s


def test_the_inputs_are_views_of_the_same_memory_in_every_step() -> None:
    bench = Bench(skips_padding=True)
    bench.step(3)
    bench.step(R, num_lanes=2)
    bench.step(3)
    (ids, positions, table), other, again = bench.fake.loaded
    assert [(tuple(t.shape), t.dtype) for t in (ids, positions)] == [((B, 3), torch.int64), ((B, 3), torch.int32)]
    assert tuple(table.shape) == (B, bench.slot.page_table_SN.shape[1])
    assert table.dtype == torch.int32
    assert [tuple(t.shape) for t in other] == [(2, R), (2, R), (2, table.shape[1])]
    assert all(a is b for a, b in zip((ids, positions, table), again, strict=True))
    assert [t.data_ptr() for t in other] == [t.data_ptr() for t in again]
    assert all(t.untyped_storage().nbytes() == t.element_size() * B * R for t in (ids, positions))
    assert table.untyped_storage().nbytes() == 4 * table.numel()
    assert torch.equal(bench.fake.forwards[-1][0], ids)
    context = bench.context
    assert context.pages is bench.pages
    assert context.page_table_BN is table
    assert context.positions_BP is positions
    assert bench.fake.proposed[-1][1] is table


def test_every_launch_gets_the_buffers_of_the_slots_and_lanes() -> None:
    bench = Bench(can_defer_head=True)
    batch = bench.step(3, num_lanes=2, any_guided=True)
    step, num_rows = bench.fake.heads[-1]
    expected: dict[str, object] = {
        "drafts_BR": bench.lane.drafts_BR,
        "num_drafts_B": bench.lane.num_drafts_B,
        "kinds_BR": bench.lane.kinds_BR,
        "forced_BR": bench.lane.forced_BR,
        "history_SL": bench.slot.history_SL,
        "length_S": bench.slot.length_S,
        "params": bench.slot.params,
        "result": bench.lane.result,
        "device": None,
        "first_row_B": None,
        "model_logits_NV": None,
        "tree": None,
    }
    values = {f.name: getattr(step, f.name) for f in fields(step)}
    assert torch.equal(values.pop("slots_B"), batch.slots_B)
    assert (values.pop("mask_address"), values.pop("mask_strides")) == (4096, (12, 3))
    assert values.pop("arguments") == [], "made at the first native call"
    assert values.keys() == expected.keys()
    assert all(values[name] is expected[name] for name in expected)
    assert num_rows == 3
    assert bench.context.defers_head
    assert bench.fake.proposed[-1][0] is step


@pytest.mark.parametrize(
    ("bench", "packs", "mixes"),
    [
        ({}, True, False),
        ({"takes_prompts": True}, True, True),
        ({"skips_padding": True, "takes_prompts": True}, True, True),
        ({"layers": (LAYER,), "takes_prompts": True}, False, False),
        ({"layers": (LAYER,), "skips_padding": True, "takes_prompts": True}, True, False),
        ({"device_like": True}, False, False),
        ({"device_like": True, "skips_padding": True, "takes_prompts": True}, False, False),
    ],
)
def test_only_a_stream_that_runs_at_once_packs_and_mixes(bench: dict[str, Any], packs: bool, mixes: bool) -> None:
    program = Bench(**bench).program
    assert (program.packs, program.mixes) == (packs, mixes)


def test_a_forward_that_skips_no_padding_gets_the_real_rows() -> None:
    bench = Bench(adapters=object())
    bench.step(3)
    ids, context = bench.fake.forwards[-1]
    # Lane 0 has rows 0 to 2 of the step, lane 1 rows 3 and 4, lane 2 row 6.
    assert ids.tolist() == [[0], [1], [2], [3], [4], [6]]
    assert context.positions_BP.tolist() == [[100], [101], [102], [103], [104], [106]]
    assert context.page_table_BN[:, 0].tolist() == [0, 0, 0, 1, 1, 2]
    assert context.adapters_B is not None
    assert context.adapters_B.tolist() == [40, 40, 40, 0, 0, 20]
    assert bench.program.forward_rows == 6
    logits_NV, step = bench.fake.accepted[-1]
    assert len(logits_NV) == 6
    assert step.first_row_B is not None
    assert (step.first_row_B.dtype, step.first_row_B.tolist()) == (torch.int32, [0, 3, 5])
    assert bench.fake.proposed[-1][0].first_row_B is None

    bench.lane.num_drafts_B[:2] = torch.tensor([1, 0])
    bench.step(2, num_lanes=2)  # the smallest step with padding
    assert bench.fake.forwards[-1][0].tolist() == [[0], [1], [2]]

    bench.lane.num_drafts_B.fill_(2)
    bench.step(3)
    ids, context = bench.fake.forwards[-1]
    assert (tuple(ids.shape), bench.program.forward_rows) == ((B, 3), 9)
    assert context.adapters_B is not None
    assert context.adapters_B.tolist() == [40, 0, 20]
    assert bench.fake.accepted[-1][1].first_row_B is None


@pytest.mark.parametrize(
    ("bench", "step", "shape", "rows"),
    [
        ({}, {"num_rows": 1}, (3, 1), 3),
        ({}, {"num_lanes": 1, "num_rows": 4}, (1, 4), 4),
        ({"layers": (LAYER,)}, {}, (3, 3), 9),
        ({"device_like": True}, {}, (3, 3), 9),
        ({"skips_padding": True}, {}, (3, 3), 6),
        ({"skips_padding": True}, {"num_lanes": 2}, (2, 3), 5),
    ],
)
def test_other_forwards_get_every_row(
    bench: dict[str, Any], step: dict[str, Any], shape: tuple[int, int], rows: int
) -> None:
    bench_ = Bench(**bench)
    bench_.step(**step)
    assert tuple(bench_.fake.forwards[-1][0].shape) == shape
    assert bench_.fake.accepted[-1][1].first_row_B is None
    assert bench_.program.forward_rows == rows


def test_a_forward_gets_adapters_prompts_trees_and_the_place_of_hidden_states() -> None:
    prompts: Any = object()
    bench = Bench(adapters=object(), skips_padding=True, layers=(LAYER,))
    bench.step(prompts=prompts)
    assert bench.context.adapters_B is not None
    assert bench.context.adapters_B.tolist() == [40, 0, 20]
    assert bench.context.prompts is prompts
    assert bench.context.hidden == {LAYER: None}
    assert bench.fake.proposed[-1][2] is bench.context.hidden
    assert bench.context.tree_rows_BRR is None
    assert not bench.context.defers_head
    bench.step(adapted=False)
    assert bench.context.adapters_B is None
    without = Bench()
    without.step()
    assert without.context.adapters_B is None

    trees = Bench(trees=True, device_like=True)
    trees.step()
    tree = trees.lane.tree
    assert tree is not None
    assert trees.context.tree_rows_BRR is tree.rows_BRR
    assert trees.fake.accepted[-1][1].tree is tree
    slots_B, *others = trees.fake.compacted[-1]
    assert isinstance(slots_B, torch.Tensor)
    assert slots_B.tolist() == [4, 0, 2]
    table = trees.fake.loaded[-1][2]
    expected = [trees.slot.length_S, trees.lane.result.num_emitted_B, tree, table]
    assert all(a is b for a, b in zip(others, expected, strict=True))


@pytest.mark.parametrize("drafts", [DRAFTS, [2, 2, 2]])
def test_beams_read_the_first_row_of_their_lanes(drafts: list[int]) -> None:
    bench = Bench()
    bench.lane.num_drafts_B.copy_(torch.tensor(drafts, dtype=torch.int32))
    bench.lane.kinds_BR.fill_(APPLY)
    bench.step(any_guided=True, beams=BEAMS)
    result = bench.lane.result
    # Row 0 of slot s allows only token s: lane 2 is slot 2, lane 0 slot 4.
    assert result.top_ids_BRN[:, 0, 0].tolist() == [4, 0, 2]
    assert result.logprob_BR[:, 0].tolist() == [1.0, 0.0, 1.0]
    first = {lane: bench.fake.accepted[-1][0][sum(drafts[:lane]) + lane] for lane in (0, 2)}
    for lane, token in ((0, 4), (2, 2)):
        logprob = torch.log_softmax(first[lane], dim=-1)[token]
        assert result.top_logprobs_BRN[lane, 0, 0] == pytest.approx(float(logprob))
    bench.lane.kinds_BR.fill_(ALL)
    bench.step(beams=BEAMS)
    assert result.logprob_BR[0, 0] == min(MAX_LOGPROBS, V)


def test_the_host_s_processors_change_the_logits_that_are_accepted() -> None:
    bench = Bench(processing=True)
    bench.step(host_processed=(None,))
    first_row_B, accepted_NV = bench.fake.first_rows[-1], bench.fake.accepted[-1][0]
    assert first_row_B is not None
    assert first_row_B.tolist() == [0, 3, 5]
    assert accepted_NV is bench.fake.changed_NV


def test_captured_processors_change_the_logits_and_fail_rows_of_their_own_step_only() -> None:
    bench = Bench(processing=True, device_like=True)
    bench.step(captured_processing=True)
    logits_NV, step = bench.fake.accepted[-1]
    assert logits_NV is bench.captured.changed_NV
    assert step.model_logits_NV is bench.captured.given_NV
    assert bench.fake.kinds_at_accept[-1][:, 0].tolist() == [0, 77, 0]
    bench.lane.kinds_BR.zero_()
    bench.step()
    assert bench.fake.accepted[-1][1].model_logits_NV is None
    assert not bench.fake.kinds_at_accept[-1].any()


@pytest.mark.parametrize("captured", [False, True])
def test_a_program_holds_no_logits_after_its_step(captured: bool) -> None:
    bench = Bench(processing=True, device_like=True)
    bench.step(captured_processing=captured)
    logits = [weakref.ref(bench.fake.accepted.pop()[0])]
    if bench.captured.given_NV is not None:
        logits.append(weakref.ref(bench.captured.given_NV))
    bench.captured.given_NV = bench.captured.changed_NV = None
    assert [logit() for logit in logits] == [None] * len(logits)


def test_the_warm_up_runs_the_target_over_page_0() -> None:
    bench = Bench(layers=(LAYER,))
    begun_s = time.perf_counter()
    seconds = bench.program.warm_up(5)
    assert 0 < seconds <= time.perf_counter() - begun_s
    ids, context = bench.fake.forwards[-1]
    assert (tuple(ids.shape), ids.dtype, int(ids.abs().sum())) == ((5, 1), torch.int64, 0)
    assert (tuple(context.positions_BP.shape), context.positions_BP.dtype) == ((5, 1), torch.int32)
    assert tuple(context.page_table_BN.shape) == (5, bench.slot.page_table_SN.shape[1])
    assert context.page_table_BN.is_contiguous()
    assert context.pages is bench.pages
    assert context.hidden == {LAYER: None}
    assert bench.fake.calls == ["forward"]
    assert context.recurrent is None


def test_the_warm_up_runs_recurrent_layers_in_a_slot_of_sequences() -> None:
    bench = Bench(recurrent=True)
    bench.program.warm_up(5)
    assert bench.fake.calls == ["states ([0], [0], [5], [5])", "forward"]
    assert cast(Any, bench.context.recurrent) == ([0], [0], [5], [5])


@pytest.mark.parametrize("trees", [False, True])
def test_trees_and_their_compaction_come_together(trees: bool) -> None:
    bench, compact = Bench(trees=trees), cast(Callable[..., None], Recorder())
    arguments: Any = [ImmediateStream(), *[bench.fake] * 2, [], *[bench.fake] * 2, bench.slot, bench.lane, bench.fake]
    with pytest.raises(AssertionError):
        StepProgram(*arguments, compaction=None if trees else compact)
