"""Prompts that a device prefills in one batch have the tokens that they have one by one on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.request import FinishReason
from gpu_engine.core.engine import Engine
from gpu_engine.core.prefill_graphs import MAX_GRAPHS, Prefill
from gpu_engine.core.running import SlotWriter
from gpu_engine.drafters.ngram import NoDrafter
from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.loader import LoadedModel
from gpu_engine.step.buffers import SlotBuffers
from gpu_engine.step.prompt_rows import Chunks, Hidden
from tests.gpu_engine import eagle
from tests.gpu_engine.device.device_engine import RecordedDevice, device_engine, guided_device_engine, opaque_launches
from tests.gpu_engine.device.device_requests import INTERPRETED, PATIENT, on_cpu
from tests.gpu_engine.device.recorded_stream import RecordedGraph, RecordedStream
from tests.gpu_engine.harness import Answer, ask, executor_of, tokens, with_drafts

pytestmark = INTERPRETED

SMALL = {"max_batch_size": 4, "max_model_len": 160, "max_batched_tokens": 128, "row_timeout_ms": 20_000.0}
MIX = [
    partial(ask, tokens(5, 1), max_tokens=3, ignore_eos=True),
    partial(ask, [*range(196, 203)] * 4, max_tokens=6),
    partial(ask, tokens(33, 3, repeat=9), max_tokens=4, temperature=0.4, seed=4),
    partial(ask, tokens(20, 7), max_tokens=3, seed=7, ignore_eos=True),
    partial(ask, tokens(131, 4, repeat=20), max_tokens=3, ignore_eos=True),
    partial(ask, tokens(40, 6), max_tokens=3, temperature=0.9, seed=6, ignore_eos=True),
    partial(ask, tokens(1, 5), max_tokens=3, ignore_eos=True),
]
"""Four prompts that fit one launch, one longer than a chunk, and one without a token to prefill."""
GUIDED = [
    partial(ask, tokens(20, 1, repeat=8), grammar="5", max_tokens=30),
    partial(ask, tokens(33, 2), max_tokens=3, ignore_eos=True),
    partial(ask, tokens(11, 3), grammar="4", max_tokens=30, temperature=1.0, seed=3),
]


@pytest.fixture(scope="module")
def expected(llama: LoadedModel) -> list[list[int]]:
    return on_cpu(llama, [make() for make in MIX], **SMALL)


def prefill_of(engine: Engine) -> Prefill:
    prefill = executor_of(engine).prefill
    assert isinstance(prefill, Prefill)
    return prefill


def answer_together(engine: Engine, answers: list[Answer]) -> list[list[int]]:
    """Submit all requests between two iterations of the engine, when another request has its first token."""

    def submit(first: Answer) -> None:
        first.on_event = None
        for answer in answers:
            answer.submit(engine)

    first = ask(tokens(3, 99), max_tokens=1, on_event=submit)
    first.submit(engine)
    first.wait()
    return [answer.wait().tokens for answer in answers]


@pytest.mark.parametrize(
    "drafts_by",
    ["ngram", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("none", "model", "circle eagle3"))],
)
def test_prompts_prefilled_together_have_the_tokens_of_each_alone(
    llama: LoadedModel, expected: list[list[int]], tmp_path: Path, drafts_by: str
) -> None:
    draft_model = llama.name if drafts_by == "model" else ""
    if drafts_by == "circle eagle3":
        draft_model = str(tmp_path / "eagle3")
        eagle.save_circle(Path(llama.name), Path(draft_model))
    num_drafts = 0 if drafts_by == "none" else 2
    settings = with_drafts(num_drafts, device="cuda", draft_model=draft_model, **SMALL, **PATIENT)
    with device_engine(llama, settings) as (engine, _):
        prefill, answers = prefill_of(engine), [make() for make in MIX]
        warmed = prefill.launches.copy()
        assert set(warmed) == set(settings.prefill_shapes.every)
        assert set(warmed.values()) == {2}, "once before the captures, and again after them"
        assert answer_together(engine, answers) == expected
        stats = engine.stats()
        assert set(prefill.launches) == set(warmed), "every launch has a shape that was warmed up"
        assert {(4, 32), (1, 128)} <= set(prefill.launches - warmed)
    assert stats.prefill_tokens == 2 + sum(len(answer.request.prompt_ids) - 1 for answer in answers)
    for answer in answers:
        times = answer.telemetry
        assert (times.prefilled_s > 0) == (len(answer.request.prompt_ids) > 1)
        assert times.prefilled_s <= times.first_token_s
    if drafts_by == "model":
        # Drafts and tokens are drawn with the same noise, so every draft of a model with all prompts is accepted.
        assert stats.accepted_draft_tokens == stats.draft_tokens > 5


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["grammar", "model"])
def test_guided_prompts_are_prefilled_together_with_others(llama: LoadedModel, drafter: str) -> None:
    expected = on_cpu(llama, [make() for make in GUIDED], **SMALL)
    draft_model = llama.name if drafter == "model" else ""
    settings = replace(with_drafts(2, device="cuda", draft_model=draft_model, **SMALL, **PATIENT), drafter=drafter)
    with guided_device_engine(llama, settings) as (engine, _, _):
        assert answer_together(engine, [make() for make in GUIDED]) == expected
        assert prefill_of(engine).launches[4, 32] == 3, "two warm-ups, and one launch for three prompts"
        assert engine.stats().deferred_rows == 0


@dataclass(eq=False)
class LoggedStream(RecordedStream):
    """A stream that logs, in order, the launches outside captures, "step" for each captured step, and "prefill".

    Launches for scored prompts, which no graph has, are logged next to them.
    """

    refuses: RuntimeError | None = None
    """The error of a capture of prefill."""
    log: list[str] = field(default_factory=list)
    scored_at: list[int] = field(default_factory=list)
    """Lengths of the log at the launches for scored prompts and for tensors of the model."""
    prefills: list[RecordedGraph] = field(default_factory=list)

    def kernel(self, function: Callable[..., None], *args: object) -> None:
        if function.__name__ in ("_score", "_compute"):
            self.scored_at.append(len(self.log))
        elif self._graph is None:
            self.log.append(function.__name__)
        elif function.__name__ == "_run":
            if self.refuses is not None:
                raise self.refuses
            self.log[-1] = "prefill"
            self.prefills.append(self._graph)
        super().kernel(function, *args)

    def capture(self) -> AbstractContextManager[RecordedGraph]:
        self.log.append("step")
        return super().capture()


@contextmanager
def warmed_up(llama: LoadedModel, stream: LoggedStream, settings: EngineConfig) -> Iterator[Prefill]:
    """Build an executor, warm it up and yield its prefill; then close it."""
    device, model = RecordedDevice(stream), replace(llama, max_model_len=settings.max_model_len)
    try:
        with opaque_launches():
            executor = device.build_executor(settings, model, None, num_pages=64, max_inflight_steps=1)
            executor.warm_up()
            assert isinstance(executor.prefill, Prefill)
            yield executor.prefill
            executor.close()
    finally:
        stream.close()


def test_a_prefill_of_every_shape_is_captured_after_the_steps(llama: LoadedModel) -> None:
    stream, settings = LoggedStream(), with_drafts(0, device="cuda", **SMALL, **PATIENT)
    shapes = settings.prefill_shapes.every
    with warmed_up(llama, stream, settings) as prefill:
        assert prefill.captured == set(shapes)
        first = stream.log.index("step")
        assert stream.log[:first].count("_run") == len(shapes), "kernels are loaded before the first wait is captured"
        assert stream.log.count("prefill") == len(shapes)
        sides = [len(shapes)] * 2 + [len(stream.log)] * 2
        assert stream.scored_at == sides, "a shape without a graph is warmed up on both sides"
        assert stream.log[-len(shapes) :] == ["prefill"] * len(shapes), "after the steps, and no launch comes later"
        assert [graph.replays for graph in stream.prefills] == [1] * len(shapes), "the first replay uploads a graph"
    assert not prefill.captured
    assert not any(graph.nodes for graph in stream.prefills), "the graphs are destroyed"
    eager = LoggedStream()
    with warmed_up(llama, eager, replace(settings, enforce_eager=True)) as prefill:
        assert not prefill.captured
        assert not {"step", "prefill"} & set(eager.log)
        assert eager.log.count("_run") == 2 * len(shapes)


def test_a_prefill_whose_capture_runs_out_of_memory_is_launched_eagerly_with_one_line(
    llama: LoadedModel, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """A capture empties the allocator's cache, which the first warm-up has filled, so the second one fills it again."""
    settings = with_drafts(0, device="cuda", **SMALL, **PATIENT)
    shapes = len(settings.prefill_shapes.every)
    stream = LoggedStream(refuses=torch.OutOfMemoryError("CUDA out of memory"))
    with device_engine(llama, settings, RecordedDevice(stream)) as (engine, _):
        assert not prefill_of(engine).captured
        last = len(stream.log) - stream.log[::-1].index("step")
        assert stream.log[last : last + shapes] == ["_run"] * shapes
        assert answer_together(engine, [make() for make in MIX]) == expected
    (line,) = [record.message for record in caplog.records if "prefill" in record.message]
    assert line == f"{shapes} of {shapes} prefill shapes are launched eagerly: CUDA out of memory"


def test_any_other_failure_of_a_capture_ends_the_start(llama: LoadedModel) -> None:
    """An invalidated capture leaves torch's allocator serving the stream from the memory of the graph."""
    settings = with_drafts(0, device="cuda", **SMALL, **PATIENT)
    stream = LoggedStream(refuses=RuntimeError("operation not permitted when stream is capturing"))
    with (
        pytest.raises(RuntimeError, match=r"cannot be captured as a CUDA graph; enforce_eager .* not permitted"),
        device_engine(llama, settings, RecordedDevice(stream)),
    ):
        pass


def test_the_number_of_captured_prefills_is_bounded(llama: LoadedModel) -> None:
    """The forwards with the most tokens are launched kernel by kernel."""
    sizes = {**SMALL, "max_batch_size": 16, "max_model_len": 8192, "max_batched_tokens": 8192}
    shapes = with_drafts(0, device="cuda", **sizes).prefill_shapes.every
    assert len(shapes) > MAX_GRAPHS
    stream = RecordedStream(drops=True)
    try:
        slots = SlotWriter(SlotBuffers.allocate(2, 1, 8192, 32), max_model_len=8192, num_drafts=0, eos_token_ids=())
        prefill = Prefill(stream, NoModel(), [], NoDrafter(), slots, lambda *_: None, 16)  # type: ignore[arg-type]
        prefill.capture(shapes)
    finally:
        stream.close()
    assert len(prefill.captured) == MAX_GRAPHS
    eager = set(shapes) - prefill.captured
    assert max(B * P for B, P in prefill.captured) <= min(B * P for B, P in eager)


class PairReader(NoDrafter):
    """Reads the token after each one of a chunk, as a drafter over pairs does."""

    def prefill(self, chunks: Chunks, hidden: Hidden) -> None:
        chunks.ids_BP(offset=1)


def test_the_warm_up_reads_no_token_after_the_history() -> None:
    """The largest shape is as long as a history that ends with a page."""
    stream = RecordedStream()
    try:
        slots = SlotWriter(SlotBuffers.allocate(2, 1, 127, 16), max_model_len=100, num_drafts=0, eos_token_ids=())
        assert slots.buffers.history_SL.shape[1] == 128
        prefill = Prefill(stream, NoModel(), [], PairReader(), slots, lambda *_: None, 16)  # type: ignore[arg-type]
        prefill.warm_up(((1, 128),))
        stream.synchronize()
    finally:
        stream.close()


class NoModel:
    """A model without layers."""

    adapters = None

    def prefill(self, ids_BP: torch.Tensor, ctx: AttentionContext) -> None:
        pass


def test_pages_and_slot_of_a_request_aborted_between_two_chunks_are_reused(
    llama: LoadedModel, expected: list[list[int]]
) -> None:
    settings = with_drafts(0, device="cuda", **{**SMALL, "max_batched_tokens": 64, "max_batch_size": 2}, **PATIENT)
    long, following = ask(tokens(158, 8), name="long"), [MIX[0](), MIX[2]()]

    def submit_and_abort(answer: Answer) -> None:
        if len(answer.tokens) == 1:
            long.submit(engine)
            for later in following:
                later.submit(engine)
        elif len(answer.tokens) == 3:
            engine.abort("long")

    with device_engine(llama, settings) as (engine, _):
        first = ask(tokens(3, 9), max_tokens=5, ignore_eos=True, on_event=submit_and_abort)
        first.submit(engine)
        assert long.wait().finish is FinishReason.ABORTED
        assert [answer.wait().tokens for answer in following] == [expected[0], expected[2]]
        first.wait()
        whole = sum(len(answer.request.prompt_ids) - 1 for answer in (first, *following))
        assert engine.stats().prefill_tokens - whole in (64, 128)
    assert long.telemetry.prefilled_s > 0


@pytest.mark.slow
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_request_preempted_between_two_chunks_has_the_same_tokens(llama: LoadedModel, prefix_cache: bool) -> None:
    late = partial(ask, tokens(150, 8), max_tokens=3, ignore_eos=True)
    small = {**SMALL, "max_batched_tokens": 64, "max_batch_size": 2}
    expected = on_cpu(llama, [late()], **small)
    last = late()

    def submit(answer: Answer) -> None:
        if len(answer.tokens) == 19:
            last.submit(engine)

    settings = with_drafts(0, device="cuda", kv_cache_tokens=160, prefix_cache=prefix_cache, **small, **PATIENT)
    with device_engine(llama, settings) as (engine, _):
        # There are 12 pages; the late request takes 10, and two more tokens require a third page for the first one.
        first = ask(tokens(10, 9), max_tokens=26, ignore_eos=True, on_event=submit)
        first.submit(engine)
        assert [last.wait().tokens] == expected
        assert len(first.wait().tokens) == 26
        stats = engine.stats()
    assert stats.preemptions == 1
    # The chunk that was prefilled before the preemption is prefilled again, or its pages are cached.
    assert stats.prefill_tokens + stats.cached_tokens - 9 - 149 in (64, 128)
    assert (stats.cached_tokens > 0) == prefix_cache
