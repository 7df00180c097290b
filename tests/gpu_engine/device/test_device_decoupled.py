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
from gpu_engine.core.draft_budget import DraftBudget
from gpu_engine.core.engine import Engine
from gpu_engine.drafters.decoupled_graphs import CapturedDecoupledDrafter
from gpu_engine.model.loader import LoadedModel, load_model
from gpu_engine.ops.memory import weight_bytes
from gpu_engine.step.device.graphs import StepGraphs, lane_buckets
from shared_mem.channel import Record
from tests.gpu_engine import tiny
from tests.gpu_engine.adapters.files import save_prompt
from tests.gpu_engine.device.adapter_stacks import over_stacks
from tests.gpu_engine.device.device_engine import RecordedDevice, device_engine, guided_device_engine
from tests.gpu_engine.device.device_requests import GUIDED, INTERPRETED, SMALL, UNGUIDED, ByChance, on_device
from tests.gpu_engine.device.recorded_stream import RecordedStream
from tests.gpu_engine.drafters.exchanges import exchanging
from tests.gpu_engine.harness import (
    PATIENCE_S,
    Answer,
    EveryDraft,
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
from tests.gpu_engine.toy_sidecar import guided_engine
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


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A draft model that sometimes agrees with the target."""
    family = tiny.FAMILIES["llama"]()
    family.num_hidden_layers, family.num_attention_heads, family.num_key_value_heads = 1, 2, 1
    family.head_dim = family.hidden_size // family.num_attention_heads
    return str(tiny.save(family, tmp_path_factory.mktemp("other"), rounds=True, seed=1))


@pytest.fixture(scope="module")
def unguided_tokens(llama: LoadedModel) -> list[list[int]]:
    with unguided_engine(llama, with_drafts(0, **SMALL)) as engine:
        return answer_each(engine, [make() for make in UNGUIDED])


@pytest.fixture(scope="module")
def guided_tokens(llama: LoadedModel) -> list[list[int]]:
    with guided_engine(llama, with_drafts(0, **SMALL)) as (engine, _):
        return answer_each(engine, [make() for make in GUIDED])


def every_draft(engine: Engine) -> None:
    executor_of(engine).runner.budget = EveryDraft()


def drafter_of(engine: Engine) -> CapturedDecoupledDrafter:
    drafter = executor_of(engine).decoupled
    assert isinstance(drafter, CapturedDecoupledDrafter)
    return drafter


def launcher_of(engine: Engine) -> StepGraphs:
    launcher = executor_of(engine).runner.launcher  # type: ignore[attr-defined]
    assert isinstance(launcher, StepGraphs)
    return launcher


def test_a_draft_graph_on_a_stream_of_its_own_is_right_as_the_target_is(llama: LoadedModel) -> None:
    """The target drafts for itself, with the noise of its own sampling. The second sequence has the slot of the
    first."""

    def asked() -> list[Answer]:
        return [ask(tokens(5, seed), max_tokens=7, temperature=0.8, ignore_eos=True) for seed in (2, 3)]

    with unguided_engine(llama, with_drafts(0, **SMALL)) as engine:
        expected = answer_each(engine, asked())
    with device_engine(llama, decoupled(llama.name, 2, max_batch_size=1)) as (engine, stream):
        every_draft(engine)
        launcher, drafter = launcher_of(engine), drafter_of(engine)
        (beside,) = stream._beside
        at_start, ran = len(beside.eager), beside.ran
        assert answer_each(engine, asked()) == expected
        stats, parts = engine.stats(), [graph.parts for graph in launcher.captured.values()]  # type: ignore[attr-defined]
        assert drafter.num_graphs == 2, "one for the only bucket, and one that reads"
    assert stats.draft_tokens == stats.accepted_draft_tokens > 4
    assert stats.steps <= 2 * (1 + 2 + 1)
    assert "_draw" not in {name for each in parts for name, _ in each}, "no launch of the drafts is in a step's graph"
    assert set(beside.eager[at_start:]) == {"copy"}
    assert launcher.stats.eager_steps == 0
    assert beside.ran > ran
    assert drafter.num_graphs == 0, "an engine that is closed has freed them"


@pytest.mark.slow
@pytest.mark.parametrize("late", ["steps", "drafts"])
def test_each_stream_waits_for_the_other(llama: LoadedModel, late: str) -> None:
    """A draft graph before its step drafts after an older text, and one after the next step is of no use to it,
    or writes over its tokens."""
    make = partial(ask, tokens(5, 2), max_tokens=17, temperature=0.8, ignore_eos=True)
    with unguided_engine(llama, with_drafts(0, **SMALL)) as engine:
        expected = answer_each(engine, [make()])
    with device_engine(llama, decoupled(llama.name, 2, max_batch_size=1)) as (engine, stream):
        every_draft(engine)
        (stream if late == "steps" else stream._beside[0]).before = lambda node: time.sleep(1e-3)
        assert answer_each(engine, [make()]) == expected
        stats = engine.stats()
    assert stats.draft_tokens == stats.accepted_draft_tokens > 9
    assert stats.steps <= 1 + 16 // 3 + 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_drafts", "fields"),
    [(0, {}), (3, {"overlap": False, "enforce_eager": True}), (7, {})],
    ids=["none", "eager", "graph"],
)
def test_tokens_do_not_depend_on_the_draft_model(
    llama: LoadedModel, other: str, unguided_tokens: list[list[int]], num_drafts: int, fields: dict[str, bool]
) -> None:
    with device_engine(llama, decoupled(other, num_drafts, **fields)) as (engine, _):
        if num_drafts:
            every_draft(engine)
        assert answer_all(engine, [make() for make in UNGUIDED]) == unguided_tokens
        stats = engine.stats()
    assert (stats.accepted_draft_tokens > 3) == (num_drafts > 0)
    assert stats.accepted_draft_tokens < stats.draft_tokens or not num_drafts


@pytest.mark.slow
@pytest.mark.parametrize("draft_device", ["", "cuda:1"], ids=["shared", "own"])
@pytest.mark.parametrize(("sync", "num_drafts"), [("host_callback", 3), ("device_flag", 7)])
def test_guided_tokens_do_not_depend_on_the_draft_model(
    llama: LoadedModel, other: str, guided_tokens: list[list[int]], sync: str, num_drafts: int, draft_device: str
) -> None:
    """With jump-forward drafts before the model's own. Three lanes are padded to four."""
    fields = {"sync": sync, "max_batch_size": 4, "jump_forward_tokens": num_drafts}
    settings = decoupled(other, num_drafts, draft_device=draft_device, **fields)
    with guided_device_engine(llama, settings) as (engine, grammar, _):
        every_draft(engine)
        grammar.sidecar.proposes = lambda automaton, emitted: next(
            (ids[len(emitted) :][:1] for ids in guided_tokens if ids[: len(emitted)] == emitted), []
        )
        assert answer_all(engine, [make() for make in GUIDED]) == guided_tokens
        stats = engine.stats()
    assert stats.deferred_rows == 0
    assert stats.accepted_jump_forward_tokens > 3
    assert stats.accepted_draft_tokens > stats.accepted_jump_forward_tokens


@pytest.mark.slow
def test_steps_without_drafts_or_proposals_have_the_same_tokens(
    llama: LoadedModel, guided_tokens: list[list[int]]
) -> None:
    """Then the model reads later what it missed."""
    with guided_device_engine(llama, decoupled(llama.name)) as (engine, _, _):
        budget = executor_of(engine).runner.budget = ByChance()
        for _ in range(2):  # some twelve steps each, of which every kind comes
            assert answer_all(engine, [make() for make in GUIDED]) == guided_tokens
    assert len(budget.steps) == 4


@pytest.mark.slow
def test_the_measured_choice_gives_the_same_tokens(llama: LoadedModel, unguided_tokens: list[list[int]]) -> None:
    with device_engine(llama, decoupled(llama.name)) as (engine, _):
        executor_of(engine).runner.budget = DraftBudget(by_length=False, computes=True)
        assert answer_all(engine, [make() for make in UNGUIDED]) == unguided_tokens


@pytest.mark.slow
def test_preemption_changes_no_token(llama: LoadedModel, other: str) -> None:
    def run(settings: EngineConfig, *, on_a_device: bool) -> tuple[list[list[int]], int]:
        answers = [ask(tokens(20, seed), max_tokens=40, temperature=0.5 * (seed % 2)) for seed in range(3)]
        if not on_a_device:
            with unguided_engine(llama, settings) as engine:
                return answer_all(engine, answers), engine.stats().preemptions
        with device_engine(llama, settings) as (engine, _):
            every_draft(engine)
            return answer_all(engine, answers), engine.stats().preemptions

    small = {"max_batch_size": 3, "max_model_len": 64}
    alone, never = run(with_drafts(0, **{**SMALL, **small}), on_a_device=False)
    tight, preemptions = run(decoupled(other, **small, kv_cache_tokens=64), on_a_device=True)
    assert tight == alone
    assert never == 0 < preemptions


@pytest.mark.slow
def test_a_lost_and_restored_grammar_process_changes_no_token(
    llama: LoadedModel, other: str, guided_tokens: list[list[int]]
) -> None:
    settings = decoupled(other, row_timeout_ms=300.0, draft_timeout_ms=300.0, max_batch_size=4)
    with guided_device_engine(llama, settings) as (engine, grammar, stream):
        every_draft(engine)
        first, answers = grammar.sidecar, [make() for make in GUIDED]

        def die(record: Record) -> None:
            first.stopping |= record.commit_pos + len(record.committed) >= 3

        first.before = die
        for answer in answers:
            answer.submit(engine)
        grammar._thread.join(PATIENCE_S)
        grammar.kill_sidecar()
        engine.grammar_lost()
        assert answers[1].wait().tokens == guided_tokens[1]
        assert not answers[0].over
        grammar.start_sidecar()
        engine.grammar_restored()
        assert [answer.wait().tokens for answer in answers] == guided_tokens
        assert stream.failure is None


@pytest.mark.slow
def test_a_text_is_read_beside_the_steps_and_drafted_behind_then(llama: LoadedModel) -> None:
    """`max_batched_tokens` is 32 for two lanes, so the model reads 60 tokens in parts of 16, which the prefix cache had
    for the target. It is right about every draft then."""
    prompt = tokens(60, 5)
    settings = decoupled(llama.name, max_model_len=160, page_size=16)
    with unguided_engine(llama, with_drafts(0, **{**SMALL, "max_model_len": 160})) as engine:
        expected = answer_each(engine, [ask(prompt, max_tokens=n, ignore_eos=True) for n in (4, 40)])
    with device_engine(llama, settings) as (engine, _):
        every_draft(engine)
        answer_each(engine, [ask(prompt, max_tokens=4, ignore_eos=True)])
        before, answers = engine.stats(), [ask(prompt, max_tokens=40, ignore_eos=True)]
        assert answer_each(engine, answers) == expected[1:]
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
        every_draft(engine)
        answers = asked(engine)
        assert answer_each(engine, answers) == expected
        assert [answer.telemetry.draft_tokens > 0 for answer in answers] == [False, True]


# -- exchange --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [3, 7])
def test_an_exchange_in_the_middle_of_answers_changes_no_token(llama: LoadedModel, other: str, num_drafts: int) -> None:
    """The graphs of the model before are freed, and the target drafts for itself from then on."""
    requests = [
        partial(ask, tokens(9, 1), max_tokens=30, ignore_eos=True),
        partial(ask, tokens(30, 2), max_tokens=26, temperature=0.8, seed=2, ignore_eos=True),
    ]
    with unguided_engine(llama, with_drafts(0, **SMALL)) as engine:
        expected = answer_each(engine, [make() for make in requests])
    dirs = (str(Path(llama.name).parent),)
    with device_engine(llama, decoupled(other, num_drafts, dirs=dirs)) as (engine, stream):
        every_draft(engine)
        answers, drafter = [make() for make in requests], drafter_of(engine)
        hold = Hold(engine, lambda: all(len(answer.tokens) >= 2 for answer in answers))
        for answer in answers:
            answer.submit(engine)
        with hold.reached():
            assert not any(answer.over for answer in answers)
            before, old = engine.stats(), drafter._now
            thread, results = exchanging(engine, llama.name)
        assert [answer.wait().tokens for answer in answers] == expected
        thread.join(PATIENCE_S)
        after, replays = engine.stats(), sum(graph.replays for graph in drafter._now._graphs.values())  # type: ignore[attr-defined]
        assert [info.name for info in results] == [engine.draft_models.name] == [llama.name]  # type: ignore[attr-defined]
        assert (old.num_graphs, drafter.num_graphs) == (0, 3)
        assert len(stream._beside) == 2
    drafts, accepted = (
        getattr(after, name) - getattr(before, name) for name in ("draft_tokens", "accepted_draft_tokens")
    )
    assert replays > 2 + 3, "each of the two graphs once at the start, and behind steps"
    # The drafts in the slots, and those of a step in flight, are of the former model.
    assert drafts - 4 * num_drafts <= accepted
    assert accepted > 0


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
    with unguided_engine(llama, with_drafts(0, **SMALL)) as engine:
        expected = answer_each(engine, [make()])
    settings, device = decoupled(llama.name, max_batch_size=1, dirs=dirs), RecordedDevice(LittleMemory())
    with device_engine(llama, settings, device) as (engine, stream):
        every_draft(engine)
        before = drafter_of(engine)._now
        with pytest.raises(LimitExceeded, match=r"^path: .* cannot draft here: CUDA out of memory"):
            engine.draft_models.exchange(other)
        assert drafter_of(engine)._now is before
        assert engine.draft_models.name == llama.name
        assert answer_each(engine, [make()]) == expected
        assert engine.stats().accepted_draft_tokens == engine.stats().draft_tokens > 4
        assert stream.failure is None


def test_its_memory_is_counted_and_planned(llama: LoadedModel, other: str) -> None:
    settings, device = decoupled(other, max_batch_size=3, page_size=32), RecordedDevice()
    model = replace(llama, max_model_len=settings.max_model_len)
    engine = Engine(settings, model, build_executor=device.build_executor)
    try:
        draft, stats = drafter_of(engine).draft, engine.stats()
    finally:
        engine.close()
        device.stream.close()
    pages = sum(layer.k.nbytes + layer.v.nbytes for layer in draft.pages)
    assert stats.memory.draft_bytes == weight_bytes(draft.model) + pages
    assert "MB of a draft model" in str(stats.memory)
    kinds = {"num_layers": 1, "hidden": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "intermediate": 96}
    shape = ModelShape(name="tiny", vocab=tiny.VOCAB, **kinds)
    plan = Serving(shape, FORMATS["float32"], settings, kv_bytes=4, draft=shape)
    assert plan.draft_memory() - 4 * shape.num_weights == pages
    graphs = plan.num_graphs() - replace(plan, config=replace(settings, drafter="grammar", draft_model="")).num_graphs()
    assert graphs == 2 * len(lane_buckets(3)) + 1


# -- its own device ---------------------------------------------------------------------------------------------

OWN = {"draft_device": "cuda:1"}


def over_there(engine: Engine) -> tuple[set[int], set[int]]:
    """Return the addresses that the steps and both ways use, and those that the draft graphs use."""
    drafter = drafter_of(engine)
    replica, now = drafter.replica, drafter._now
    assert replica is not None
    here = [*launcher_of(engine).captured.values(), *replica._packs.values(), *replica._takes.values()]  # type: ignore[attr-defined]
    there = [*now._graphs.values(), now._read]
    return tuple(set().union(*(graph.touched for graph in graphs)) for graphs in (here, there))  # type: ignore[attr-defined,return-value]


def test_a_draft_model_with_a_device_of_its_own_is_right_as_the_target_is(llama: LoadedModel) -> None:
    """No kernel of one device gets memory of the other one."""

    def asked() -> list[Answer]:
        return [ask(tokens(5, seed), max_tokens=7, temperature=0.8, ignore_eos=True) for seed in (2, 3)]

    with unguided_engine(llama, with_drafts(0, **SMALL)) as engine:
        expected = answer_each(engine, asked())
    with device_engine(llama, decoupled(llama.name, 2, max_batch_size=1, **OWN)) as (engine, stream):
        every_draft(engine)
        assert answer_each(engine, asked()) == expected
        stats, drafter = engine.stats(), drafter_of(engine)
        here, there = over_there(engine)
        assert here
        assert there
        assert here & there == set()
        assert drafter.num_graphs == 2 + 2, "and one for each way of the only bucket"
        carrier, beside = stream._beside
        at_start = len(beside.eager)
        answer_each(engine, asked()[:1])
        assert set(beside.eager[at_start:]) == {"copy"}, "of `lacking` alone"
        assert set(carrier.eager[-6:]) == {"copy"}, "each way is a graph and a copy"
    assert stats.draft_tokens == stats.accepted_draft_tokens > 4
    assert launcher_of(engine).stats.eager_steps == 0
    assert drafter.num_graphs == 0


@pytest.mark.slow
@pytest.mark.parametrize("late", ["steps", "carrier", "drafts"])
def test_each_way_waits_for_the_others(llama: LoadedModel, late: str) -> None:
    make = partial(ask, tokens(5, 2), max_tokens=17, temperature=0.8, ignore_eos=True)
    with unguided_engine(llama, with_drafts(0, **SMALL)) as engine:
        expected = answer_each(engine, [make()])
    with device_engine(llama, decoupled(llama.name, 2, max_batch_size=1, **OWN)) as (engine, stream):
        every_draft(engine)
        streams = dict(zip(("steps", "carrier", "drafts"), (stream, *stream._beside), strict=True))
        streams[late].before = lambda node: time.sleep(1e-3)
        assert answer_each(engine, [make()]) == expected
        stats = engine.stats()
    assert stats.draft_tokens == stats.accepted_draft_tokens > 9
    assert stats.steps <= 1 + 16 // 3 + 2


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"overlap": False, "enforce_eager": True}], ids=["graph", "eager"])
def test_what_crosses_is_all_that_drafting_reads(llama: LoadedModel, fields: dict[str, bool]) -> None:
    """Penalties, bans, biases, filters and seeds; the target is right about its own tokens only where each is there."""
    prompt = tokens(7, 1)
    with unguided_engine(llama, with_drafts(0, **SMALL)) as engine:
        (likely,) = answer_each(engine, [ask(prompt, max_tokens=9, ignore_eos=True)])

    def asked() -> list[Answer]:
        return [
            ask([*prompt, *likely], max_tokens=14, ignore_eos=True, presence_penalty=1.5, frequency_penalty=1.5),
            ask(prompt, max_tokens=14, ignore_eos=True, logit_bias=((9, 50.0),), bad_token_ids=(9,)),
            ask(prompt, max_tokens=14, ignore_eos=True, logit_bias=((likely[0] ^ 1, 50.0),)),
            ask(prompt, max_tokens=14, ignore_eos=True, temperature=1.1, top_k=9, top_p=0.8, min_p=0.02, seed=1 << 63),
        ]

    with unguided_engine(llama, with_drafts(0, **SMALL)) as engine:
        expected = answer_each(engine, asked())
    with device_engine(llama, decoupled(llama.name, **OWN, **fields)) as (engine, _):
        every_draft(engine)
        assert answer_all(engine, asked()) == expected
        stats = engine.stats()
    assert stats.draft_tokens == stats.accepted_draft_tokens > 24


@pytest.mark.slow
def test_steps_without_drafts_have_the_same_tokens_over_there(
    llama: LoadedModel, guided_tokens: list[list[int]]
) -> None:
    with guided_device_engine(llama, decoupled(llama.name, **OWN)) as (engine, _, _):
        executor_of(engine).runner.budget = ByChance()
        assert answer_all(engine, [make() for make in GUIDED]) == guided_tokens


@pytest.mark.slow
def test_an_exchange_over_there_changes_no_token(llama: LoadedModel, other: str) -> None:
    make, dirs = partial(ask, tokens(9, 1), max_tokens=30, ignore_eos=True), (str(Path(llama.name).parent),)
    with unguided_engine(llama, with_drafts(0, **SMALL)) as engine:
        expected = answer_each(engine, [make()])
    with device_engine(llama, decoupled(other, max_batch_size=1, dirs=dirs, **OWN)) as (engine, _):
        every_draft(engine)
        answer = make()
        hold = Hold(engine, lambda: len(answer.tokens) >= 2)
        answer.submit(engine)
        with hold.reached():
            thread, results = exchanging(engine, llama.name)
        assert [answer.wait().tokens] == expected
        thread.join(PATIENCE_S)
        assert [info.name for info in results] == [llama.name]  # type: ignore[attr-defined]
        before = engine.stats()
        assert answer_each(engine, [make()]) == expected
        after = engine.stats()
    drafts = after.draft_tokens - before.draft_tokens
    assert after.accepted_draft_tokens - before.accepted_draft_tokens == drafts > 9


def test_the_memory_of_both_ways_is_counted_and_planned(llama: LoadedModel, other: str) -> None:
    settings = decoupled(other, max_batch_size=3, page_size=32, **OWN)
    model, found = replace(llama, max_model_len=settings.max_model_len), {}
    for each in (settings, replace(settings, draft_device="")):
        device = RecordedDevice()
        engine = Engine(each, model, build_executor=device.build_executor)
        try:
            found[each.draft_device] = engine.stats().memory.draft_bytes
        finally:
            engine.close()
            device.stream.close()
    kinds = {"num_layers": 1, "hidden": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "intermediate": 96}
    shape = ModelShape(name="tiny", vocab=tiny.VOCAB, **kinds)
    plan = Serving(shape, FORMATS["float32"], settings, kv_bytes=4, draft=shape)
    on_a_cpu = 3 * 8 * -(-tiny.VOCAB // 64) * 64  # acceptance's scratch, which a GPU has not
    buffers = found["cuda:1"] - found[""] - on_a_cpu
    assert plan.draft_buffers() == pytest.approx(buffers, rel=0.02)
    assert [part.where for part in plan.parts() if part.name == "drafter"] == ["cuda:1"]
    shared = replace(plan, config=replace(settings, draft_device=""))
    assert plan.num_graphs() - shared.num_graphs() == 2 * len(lane_buckets(3))


# -- refusals --------------------------------------------------------------------------------------------------------


def test_the_automatic_device_may_turn_out_to_be_a_gpu() -> None:
    settings = config(drafter="decoupled", draft_model="m", device="auto", draft_device="cuda:1")
    assert replace(settings, device="cuda").draft_device == "cuda:1"
    with pytest.raises(ValueError, match=r"^draft_device: needs a GPU; device is cpu"):
        replace(settings, device="cpu")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"draft_masks": "on"}, "draft_masks: cannot be combined with drafter=decoupled"),
        ({"draft_tree": "on"}, "draft_tree: .*drafter is decoupled"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: "),
        ({"draft_quantization": "q4"}, "draft_quantization: q4 runs on a CPU only; device is cuda"),
        ({"draft_device": "cuda:0"}, "draft_device: cuda:0 is the target's device; leave it empty"),
        ({"draft_device": "cpu"}, "draft_device: 'cpu' is not empty or cuda:N"),
        ({"draft_device": "cuda:1", "device": "cpu"}, "draft_device: needs a GPU; device is cpu"),
        ({"draft_device": "cuda:1", "drafter": "model"}, "draft_device: needs drafter=decoupled; drafter is model"),
    ],
)
def test_what_does_not_work_with_it_on_a_gpu_is_refused_by_name(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^{message}"):
        config(**{"drafter": "decoupled", "draft_model": "m", "device": "cuda", **fields})
