"""A draft model with graphs of its own on its own stream, over recorded streams, has the tokens of no drafts."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from gpu_engine.api.adapters import AdapterKind, AdapterLimits
from gpu_engine.api.config import EngineConfig
from gpu_engine.api.errors import LimitExceeded
from gpu_engine.core.engine import Engine
from gpu_engine.drafters.decoupled_graphs import CapturedDecoupledDrafter
from gpu_engine.model.loader import LoadedModel, load_model
from gpu_engine.ops.memory import weight_bytes
from gpu_engine.step.device.graphs import StepGraphs, lane_buckets
from tests.gpu_engine import tiny
from tests.gpu_engine.adapters.files import save_prompt
from tests.gpu_engine.device.adapter_stacks import over_stacks
from tests.gpu_engine.device.device_engine import RecordedDevice, device_engine
from tests.gpu_engine.device.device_requests import INTERPRETED, SMALL, on_cpu, on_device
from tests.gpu_engine.device.recorded_stream import RecordedStream
from tests.gpu_engine.drafters.exchanges import exchanging
from tests.gpu_engine.harness import (
    PATIENCE_S,
    Answer,
    Hold,
    answer_all,
    answer_each,
    ask,
    config,
    executor_of,
    tokens,
    unguided_engine,
    with_drafts,
)
from tools.scale.memory import FORMATS, Serving
from tools.scale.shape import ModelShape

pytestmark = INTERPRETED


def decoupled(
    draft_model: str,
    num_drafts: int = 3,
    *,
    dirs: tuple[str, ...] = (),
    draft_device: str = "",
    **fields: object,
) -> EngineConfig:
    own = {"draft_dirs": dirs, "draft_device": draft_device}
    settings = on_device(num_drafts, **fields)
    return replace(settings, drafter="decoupled", draft_model=draft_model, **own)  # type: ignore[arg-type]


OWN = {"draft_device": "cuda:1"}


def drafter_of(engine: Engine) -> CapturedDecoupledDrafter:
    drafter = executor_of(engine).decoupled
    assert isinstance(drafter, CapturedDecoupledDrafter)
    return drafter


def launcher_of(engine: Engine) -> StepGraphs:
    launcher = executor_of(engine).runner.launcher  # type: ignore[attr-defined]
    assert isinstance(launcher, StepGraphs)
    return launcher


def over_there(engine: Engine) -> tuple[set[int], set[int]]:
    """Return the addresses that the steps and both ways use, and those that the draft graphs use."""
    drafter = drafter_of(engine)
    replica, now = drafter.replica, drafter._now
    assert replica is not None
    here = [*launcher_of(engine).captured.values(), *replica._packs.values(), *replica._takes.values()]  # type: ignore[attr-defined]
    there = [*now._graphs.values(), now._read]
    return tuple(set().union(*(graph.touched for graph in graphs)) for graphs in (here, there))  # type: ignore[attr-defined,return-value]


@pytest.mark.parametrize("fields", [pytest.param({}, id="shared", marks=pytest.mark.slow), pytest.param(OWN, id="own")])
def test_a_draft_graph_on_a_stream_of_its_own_is_right_as_the_target_is(
    llama: LoadedModel, fields: dict[str, str]
) -> None:
    """The target drafts for itself, with the noise of its own sampling. The second sequence has the slot of the
    first."""

    def asked() -> list[Answer]:
        return [ask(tokens(5, seed), max_tokens=7, temperature=0.8, ignore_eos=True) for seed in (2, 3)]

    expected = on_cpu(llama, asked())
    settings = decoupled(llama.name, 2, max_batch_size=1, **fields)
    with device_engine(llama, settings) as (engine, stream):
        launcher, drafter = launcher_of(engine), drafter_of(engine)
        drafts, carriers = drafter._now.stream, stream._beside[:-2]
        assert isinstance(drafts, RecordedStream)
        assert answer_each(engine, asked()) == expected
        stats, parts = engine.stats(), [graph.parts for graph in launcher.captured.values()]  # type: ignore[attr-defined]
        at_start, ran = len(drafts.eager), drafts.ran
        assert answer_each(engine, asked()[:1]) == expected[:1]
        assert set(drafts.eager[at_start:]) == {"copy"}
        assert drafts.ran > ran
        if fields:
            near, far = over_there(engine)
            assert near
            assert far
            assert near & far == set(), "no kernel of one device gets memory of the other one"
            # Each copy runs on the current stream of its source. The default stream of the draft device may be loading
            # a model, and the stream of the drafts may be reading a text.
            assert [carrier.crossings > 3 for carrier in carriers] == [True, True]
            assert sum(each.crossings for each in (stream, *stream._beside)) == sum(each.crossings for each in carriers)
        # A graph for the only bucket, one that reads, and one for each way to another device.
        assert drafter.num_graphs == (4 if fields else 2)
    assert stats.draft_tokens == stats.accepted_draft_tokens > 4
    assert stats.steps <= 2 * (1 + 2 + 1)
    assert "_draw" not in {name for each in parts for name, _ in each}, "no launch of the drafts is in a step's graph"
    assert launcher.stats.eager_steps == 0
    assert drafter.num_graphs == 0, "an engine that is closed has freed them"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "late"),
    [({}, 0), ({}, 1), (OWN, 0), (OWN, 1), (OWN, 3)],
    ids=["s", "d", "own s", "own carrier", "own d"],
)
def test_each_stream_waits_for_the_others(llama: LoadedModel, fields: dict[str, str], late: int) -> None:
    """A draft graph before its step drafts after an older text, and one after the next step is of no use to it,
    or writes over its tokens."""
    make = partial(ask, tokens(5, 2), max_tokens=17, temperature=0.8, ignore_eos=True)
    expected = on_cpu(llama, [make()])
    with device_engine(llama, decoupled(llama.name, 2, max_batch_size=1, **fields)) as (engine, stream):
        (stream, *stream._beside)[late].before = lambda node: time.sleep(1e-3)
        assert answer_each(engine, [make()]) == expected
        stats = engine.stats()
    assert stats.draft_tokens == stats.accepted_draft_tokens > 9
    assert stats.steps <= 1 + 16 // 3 + 2


@pytest.mark.slow
def test_preemption_changes_no_token(llama: LoadedModel, other: str) -> None:
    def asked() -> list[Answer]:
        return [ask(tokens(20, seed), max_tokens=40, temperature=0.5 * (seed % 2)) for seed in range(3)]

    expected = on_cpu(llama, asked())
    with device_engine(llama, decoupled(other, max_batch_size=3, kv_cache_tokens=64)) as (engine, _):
        assert answer_all(engine, asked()) == expected
        assert engine.stats().preemptions > 0


@pytest.mark.slow
def test_a_text_is_read_beside_the_steps_and_drafted_behind_then(llama: LoadedModel) -> None:
    """`max_batched_tokens` is 32 for two lanes, so the model reads 60 tokens in parts of 16, which the prefix cache had
    for the target. It is right about every draft then."""
    prompt = tokens(60, 5)
    settings = decoupled(llama.name, max_model_len=160, page_size=16)
    expected = on_cpu(llama, [ask(prompt, max_tokens=40, ignore_eos=True)], max_model_len=160)
    with device_engine(llama, settings) as (engine, _):
        answer_each(engine, [ask(prompt, max_tokens=4, ignore_eos=True)])
        before, answers = engine.stats(), [ask(prompt, max_tokens=40, ignore_eos=True)]
        assert answer_each(engine, answers) == expected
        after = engine.stats()
        read = drafter_of(engine)._now._read
        assert read.replays >= 1 + 60 // 16  # type: ignore[union-attr]
    assert after.cached_tokens - before.cached_tokens >= 48
    drafts = after.draft_tokens - before.draft_tokens
    assert after.accepted_draft_tokens - before.accepted_draft_tokens >= 0.7 * drafts > 15


@pytest.mark.slow
def test_virtual_tokens_are_not_drafted_behind(llama: LoadedModel, tmp_path: Path) -> None:
    """The model has no embedding for them; a GPU would read after its table."""
    limits = AdapterLimits(1 << 20, max_adapters=1, max_lora_rank=8, max_virtual_tokens=6)
    named = {"adapters": (f"p={save_prompt(tmp_path / 'p', tokens=5, hidden=64, seed=1)}",)}

    def asked(engine: Engine) -> list[Answer]:
        found = engine.adapters.find(AdapterKind.PROMPT, "p")
        answers = [ask([*found.virtual_ids, *tokens(20, 1)], max_tokens=6), ask(tokens(8, 1), max_tokens=6)]
        answers[0].change(prompt_adapter=found)
        return answers

    model = load_model(config(model=llama.name, fuse_parts=False, max_adapter_bytes=1 << 20))
    with unguided_engine(model, with_drafts(0, **SMALL, **named)) as engine:
        expected = answer_each(engine, asked(engine))
    over = over_stacks(load_model(config(model=llama.name, fuse_parts=False)), limits)
    sizes = {"max_adapter_bytes": 1 << 20, "max_adapters": 1, "max_lora_rank": 8, "max_virtual_tokens": 6}
    with device_engine(over, decoupled(llama.name, max_batch_size=1, **named, **sizes)) as (engine, _):
        answers = asked(engine)
        assert answer_each(engine, answers) == expected
        assert [answer.telemetry.draft_tokens > 0 for answer in answers] == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize(("num_drafts", "fields"), [(7, {}), (3, OWN)], ids=["shared", "own"])
def test_an_exchange_in_the_middle_of_answers_changes_no_token(
    llama: LoadedModel, other: str, num_drafts: int, fields: dict[str, str]
) -> None:
    """The graphs of the model before are freed, and the target drafts for itself from then on."""
    requests = [
        partial(ask, tokens(9, 1), max_tokens=30, ignore_eos=True),
        partial(ask, tokens(30, 2), max_tokens=26, temperature=0.8, seed=2, ignore_eos=True),
    ]
    expected = on_cpu(llama, [make() for make in requests])
    settings = decoupled(other, num_drafts, dirs=(str(Path(llama.name).parent),), **fields)
    with device_engine(llama, settings) as (engine, stream):
        answers, drafter = [make() for make in requests], drafter_of(engine)
        streams, old = len(stream._beside), drafter._now
        hold = Hold(engine, lambda: all(len(answer.tokens) >= 2 for answer in answers))
        for answer in answers:
            answer.submit(engine)
        with hold.reached():
            assert not any(answer.over for answer in answers)
            thread, results = exchanging(engine, llama.name)
        assert [answer.wait().tokens for answer in answers] == expected
        thread.join(PATIENCE_S)
        replays = sum(graph.replays for graph in drafter._now._graphs.values())  # type: ignore[attr-defined]
        assert [info.name for info in results] == [engine.draft_models.name] == [llama.name]  # type: ignore[attr-defined]
        assert old.num_graphs == 0 < drafter.num_graphs
        assert len(stream._beside) == streams, "two streams draft in turn"
        assert drafter._streams == [drafter._now.stream, old.stream]
        assert replays > 2 + 3, "each of the two graphs once at the start, and after steps"
        before = engine.stats()
        assert answer_each(engine, [requests[0]()]) == expected[:1]
        after = engine.stats()
    drafts = after.draft_tokens - before.draft_tokens
    assert after.accepted_draft_tokens - before.accepted_draft_tokens == drafts > 9


class NoCapture(RecordedStream):
    def capture(self) -> NoReturn:
        raise torch.OutOfMemoryError("CUDA out of memory")


class LittleMemory(RecordedStream):
    """A device with memory for the graphs of one draft model alone."""

    def beside(self, device: torch.device | None = None) -> RecordedStream:
        if not self._beside:
            return super().beside()
        self._beside.append(NoCapture(parent=self))
        return self._beside[-1]


@pytest.mark.slow
def test_a_model_whose_graphs_do_not_fit_leaves_the_one_before(llama: LoadedModel, other: str) -> None:
    make, dirs = partial(ask, tokens(9, 1), max_tokens=10), (str(Path(other).parent),)
    expected = on_cpu(llama, [make()])
    settings, device = decoupled(llama.name, max_batch_size=1, dirs=dirs), RecordedDevice(LittleMemory())
    with device_engine(llama, settings, device) as (engine, stream):
        before = drafter_of(engine)._now
        with pytest.raises(LimitExceeded, match=r"^path: .* cannot draft here: CUDA out of memory"):
            engine.draft_models.exchange(other)
        assert drafter_of(engine)._now is before
        assert engine.draft_models.name == llama.name
        assert answer_each(engine, [make()]) == expected
        assert engine.stats().accepted_draft_tokens == engine.stats().draft_tokens > 4
        assert stream.failure is None


def test_its_memory_is_counted_and_planned(llama: LoadedModel, other: str) -> None:
    settings, found = decoupled(other, max_batch_size=3, page_size=32, **OWN), {}
    model = replace(llama, max_model_len=settings.max_model_len)
    for each in (settings, replace(settings, draft_device="")):
        device = RecordedDevice()
        engine = Engine(each, model, build_executor=device.build_executor)
        try:
            draft, memory = drafter_of(engine).draft, engine.stats().memory
        finally:
            engine.close()
            device.stream.close()
        found[each.draft_device] = memory.draft_bytes
    pages = sum(layer.k.nbytes + layer.v.nbytes for layer in draft.pages)
    assert found[""] == weight_bytes(draft.model) + pages
    assert "MB of a draft model" in str(memory)
    kinds = {"num_layers": 1, "hidden": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "intermediate": 96}
    shape = ModelShape(name="tiny", vocab=tiny.VOCAB, **kinds)
    own = Serving(shape, FORMATS["float32"], settings, kv_bytes=4, draft=shape)
    shared = replace(own, config=replace(settings, draft_device=""))
    none = replace(own, config=replace(settings, drafter="grammar", draft_model="", draft_device=""))
    assert shared.draft_memory() - 4 * shape.num_weights == pages
    on_a_cpu = 3 * 8 * -(-tiny.VOCAB // 64) * 64  # acceptance's scratch, which a GPU has not
    assert own.draft_buffers() == pytest.approx(found["cuda:1"] - found[""] - on_a_cpu, rel=0.02)
    assert [part.where for part in own.parts() if part.name == "drafter"] == ["cuda:1"]
    buckets = len(lane_buckets(3))
    assert shared.num_graphs() - none.num_graphs() == 2 * buckets + 1
    assert own.num_graphs() - shared.num_graphs() == 2 * buckets


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"overlap": False, "enforce_eager": True}], ids=["graph", "eager"])
def test_what_crosses_is_all_that_drafting_reads(llama: LoadedModel, fields: dict[str, bool]) -> None:
    """Penalties, bans, biases, filters and seeds; the target is right about its own tokens only where each is there."""
    prompt = tokens(7, 1)
    (likely,) = on_cpu(llama, [ask(prompt, max_tokens=9, ignore_eos=True)])

    def asked() -> list[Answer]:
        return [
            ask([*prompt, *likely], max_tokens=14, ignore_eos=True, presence_penalty=1.5, frequency_penalty=1.5),
            ask(prompt, max_tokens=14, ignore_eos=True, logit_bias=((9, 50.0),), bad_token_ids=(9,)),
            ask(prompt, max_tokens=14, ignore_eos=True, logit_bias=((likely[0] ^ 1, 50.0),)),
            ask(prompt, max_tokens=14, ignore_eos=True, temperature=1.1, top_k=9, top_p=0.8, min_p=0.02, seed=1 << 63),
        ]

    expected = on_cpu(llama, asked())
    with device_engine(llama, decoupled(llama.name, **OWN, **fields)) as (engine, _):
        assert answer_all(engine, asked()) == expected
        stats = engine.stats()
    assert stats.draft_tokens == stats.accepted_draft_tokens > 24


def test_the_automatic_device_may_turn_out_to_be_a_gpu() -> None:
    settings = config(drafter="decoupled", draft_model="m", device="auto", draft_device="cuda:1")
    assert replace(settings, device="cuda").draft_device == "cuda:1"
    with pytest.raises(ValueError, match=r"^draft_device: needs a GPU; device is cpu"):
        replace(settings, device="cpu")
