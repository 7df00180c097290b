"""The recipe of docs/contributing.md for a new drafter, followed once with a toy.

A new drafter touches these files:

1. `gpu_engine/drafters/NAME.py`: a class with the protocol `gpu_engine.step.program.Drafter` (here `RepeatDrafter`). A
   drafting network implements `gpu_engine.drafters.nets.DraftNet` instead, and is run by `ChainDrafter`.
2. `gpu_engine/drafters/build.py`: a function from `DrafterParts` to the drafter, and its entry in `BUILDERS`.
3. `gpu_engine/api/config.py`: the name among the values of `drafter`, and settings of its own, if any.
4. `tests/gpu_engine/drafters/test_NAME.py`: the two tests below, and tests of the drafts that the drafter proposes.

No step, kernel, graph or loop changes. Arithmetic that needs its own kernel on a GPU gets a method of
`StepLaunches`: `gpu_engine/step/launches.py`, `gpu_engine/step/device/triton_launches.py`, and the kernel in
`kernels/cuda`.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpu_engine.api.engine_settings import DRAFTER_GROUP, DRAFTERS
from gpu_engine.core.cpu_executor import cpu_executor
from gpu_engine.core.engine import Engine
from gpu_engine.core.executor import Executor
from gpu_engine.drafters.build import BUILDERS, DrafterParts
from gpu_engine.model.loader import LoadedModel, load_model
from gpu_engine.step.buffers import StepBatch
from gpu_engine.step.launches import place_of
from gpu_engine.step.program import Drafter
from gpu_engine.step.prompt_rows import Chunks, Hidden
from gpu_engine.step.stream import Stream
from kernels.accept import StepTensors
from tests.gpu_engine.harness import Answer, answer_all, ask, config, running, tokens, unguided_engine, with_drafts

SMALL = {
    "max_batch_size": 2,
    "max_model_len": 64,
    "max_batched_tokens": 32,
    "jump_forward_tokens": 0,
    "fuse_parts": False,
}


class RepeatDrafter:
    """Drafts the last token again, as often as a lane may have drafts."""

    layers: tuple[int, ...] = ()

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def prefill(self, chunks: Chunks, hidden: Hidden) -> None:
        """Do nothing: the last token is already in the history."""

    def propose(self, batch: StepBatch, step: StepTensors, page_table_BN: torch.Tensor, hidden: Hidden) -> None:
        """Enqueue one launch. It reads no value back to the host, so it can be captured."""
        self._stream.kernel(self._propose, batch)

    def _propose(self, batch: StepBatch) -> None:
        slot, place_B, going_B = batch.slot, place_of(batch), batch.lane.drafting_B[: batch.num_lanes]
        length_B = slot.length_S[place_B]
        last_B1 = slot.history_SL[place_B[:, None], (length_B - 1).clamp(min=0)[:, None].long()]
        room_B = (slot.params.max_length_S[place_B] - length_B - 1).clamp(min=0, max=batch.max_rows - 1)
        count_B = torch.minimum(slot.draft_limit_S[place_B], room_B)
        slot.drafts_SR[place_B] = torch.where(going_B[:, None], last_B1, slot.drafts_SR[place_B])
        # A lane that emitted nothing keeps its drafts.
        slot.num_drafts_S[place_B] = torch.where(going_B, count_B, slot.num_drafts_S[place_B])


def build_repeat(parts: DrafterParts) -> Drafter:
    return RepeatDrafter(parts.stream)


TOYS = {**BUILDERS, "ngram": build_repeat}
"""The toy has no name of its own in the configuration, so it takes another drafter's."""


def requests() -> list[Answer]:
    return [ask(tokens(9, 1), max_tokens=5, ignore_eos=True), ask(tokens(5, 2), max_tokens=4, temperature=0.5)]


@pytest.fixture(scope="module")
def target(llama: LoadedModel) -> LoadedModel:
    """Return the tiny Llama without native code, which no recorded stream sees."""
    return load_model(config(model=llama.name, fuse_parts=False))


@pytest.fixture(scope="module")
def expected(target: LoadedModel) -> list[list[int]]:
    with unguided_engine(target, with_drafts(0, **SMALL)) as engine:
        return answer_all(engine, requests())


def test_the_toy_drafter_runs_in_a_cpu_step(target: LoadedModel, expected: list[list[int]]) -> None:
    def build_executor(*args: object) -> Executor:
        return cpu_executor(*args, drafter_builders=TOYS)  # type: ignore[arg-type]

    settings = with_drafts(2, **SMALL)
    engine = Engine(settings, replace(target, max_model_len=64), build_executor=build_executor)
    with running(engine):
        assert answer_all(engine, requests()) == expected
        assert engine.stats().draft_tokens > 2


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton: pip install .[dev]")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="for Triton's interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_toy_drafter_is_captured_in_a_graph(target: LoadedModel, expected: list[list[int]]) -> None:
    from tests.gpu_engine.device.device_engine import RecordedDevice, opaque_launches

    device = RecordedDevice(drafter_builders=TOYS)
    settings = with_drafts(2, device="cuda", **SMALL)
    try:
        engine = Engine(settings, replace(target, max_model_len=64), build_executor=device.build_executor)
        with opaque_launches(), running(engine):
            assert answer_all(engine, requests()) == expected
            assert engine.stats().draft_tokens > 2
    finally:
        device.stream.close()


def test_a_drafter_of_another_distribution_is_found(
    target: LoadedModel, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = tmp_path / "toy_drafter-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-drafter\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{DRAFTER_GROUP}]\nrepeat = {__name__}:build_repeat\n")
    with pytest.raises(ValueError, match=r"^drafter: 'repeat' is not one of ngram, "):
        config(drafter="repeat")
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = config(drafter="repeat", num_draft_tokens=2, **SMALL)
    with running(Engine(settings, replace(target, max_model_len=64))) as engine:
        assert answer_all(engine, requests()) == expected
        assert engine.stats().draft_tokens > 2


def test_every_drafter_has_a_builder() -> None:
    assert {*BUILDERS, "none"} == set(DRAFTERS)
