"""Adapters over a recorded device: one graph for every adapter, loads between replays, the tokens of a CPU.

Not responsible for: what an adapter computes (see tests/gpu_engine/adapters/), the kernels (see
tests/kernels/cuda/test_low_rank.py).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpu_engine.api.adapters import AdapterKind, AdapterLimits
from gpu_engine.api.config import EngineConfig
from gpu_engine.api.errors import LimitExceeded, ShuttingDown
from gpu_engine.core.engine import Engine
from gpu_engine.model.adapters.device_pool import DeviceAdapterPool
from gpu_engine.model.adapters.peft_files import AdapterNotSupported
from gpu_engine.model.loaded_model import ModelNotSupported
from gpu_engine.model.loader import LoadedModel, load_model
from gpu_engine.ops.memory import weight_bytes
from tests.gpu_engine.adapters.files import save_lora, save_prompt
from tests.gpu_engine.device.adapter_stacks import over_stacks
from tests.gpu_engine.device.device_engine import (
    RecordedDevice,
    answer_over_a_loss,
    device_engine,
    guided_device_engine,
)
from tests.gpu_engine.device.device_requests import INTERPRETED, SMALL
from tests.gpu_engine.harness import (
    PATIENCE_S,
    Answer,
    answer_all,
    answer_each,
    ask,
    config,
    executor_of,
    tokens,
    unguided_engine,
    until_false,
    with_drafts,
)
from tests.gpu_engine.toy_sidecar import guided_engine

pytestmark = INTERPRETED

LIMITS = AdapterLimits(1 << 20, max_adapters=2, max_lora_rank=8, max_virtual_tokens=6)
GAIN = 4.0
"""Of the adapters: the model counts upwards, and goes on with that next to a weak one."""
ROUND = partial(ask, [*range(196, 203)] * 2, max_tokens=4)
Case = tuple[partial[Answer], str, str]
"""(request, LoRA, prompt adapter)."""
FREE: list[Case] = [
    (ROUND, "a", ""),
    (ROUND, "", ""),
    (partial(ask, tokens(9, 2), max_tokens=3, temperature=0.8, seed=3), "b", ""),
    (ROUND, "b", ""),
    (partial(ask, tokens(9, 2), max_tokens=3, repetition_penalty=1.3), "", "p"),
    (ROUND, "a", "p"),
]
"""More than there are slots, so that slots are assigned again."""


@dataclass
class Made:
    """One tiny model, twice: with adapters on a CPU, and over stacks."""

    files: dict[str, Path]
    cpu: LoadedModel
    device: LoadedModel

    @property
    def named(self) -> dict[str, Any]:
        return {"adapters": tuple(f"{name}={self.files[name]}" for name in ("a", "b", "p"))}


@pytest.fixture(scope="module")
def made(llama: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder, root = Path(llama.name), tmp_path_factory.mktemp("adapters")
    hidden = llama.net.config.hidden_size
    files = {
        "a": save_lora(folder, root / "a", seed=1, ranks={"k_proj": 2, "down_proj": 7}, gain=GAIN),
        "b": save_lora(folder, root / "b", seed=2, rank=8, targets=("q_proj", "v_proj"), use_rslora=True, gain=GAIN),
        "c": save_lora(folder, root / "c", seed=3, targets=("o_proj", "up_proj"), gain=GAIN),
        "p": save_prompt(root / "p", tokens=5, hidden=hidden, seed=1),
    }
    cpu = load_model(config(model=str(folder), fuse_parts=False, max_adapter_bytes=1 << 20))
    return Made(files, cpu, over_stacks(load_model(config(model=str(folder), fuse_parts=False)), LIMITS))


def on_device(num_drafts: int, **fields: object) -> EngineConfig:
    sizes = {"max_adapter_bytes": 1 << 20, "max_adapters": 2, "max_lora_rank": 8, "max_virtual_tokens": 6}
    base = {"device": "cuda", "draft_timeout_ms": 20_000.0, "fuse_parts": False, **SMALL, **sizes}
    return with_drafts(num_drafts, **{**base, **fields})


def asked(engine: Engine, cases: list[Case]) -> list[Answer]:
    answers = []
    for make, lora, prompt in cases:
        answer = make()
        if prompt:
            virtual = engine.adapters.find(AdapterKind.PROMPT, prompt)
            answer.change(prompt_adapter=virtual)
            answer.change(prompt_ids=[*virtual.virtual_ids, *answer.request.prompt_ids])
        answer.change(lora=engine.adapters.find(AdapterKind.LORA, lora) if lora else None)
        answers.append(answer)
    return answers


def counts(engine: Engine) -> tuple[int, int]:
    stats = executor_of(engine).runner.launcher.stats  # type: ignore[attr-defined]
    return stats.replays, stats.eager_steps


@pytest.fixture(scope="module")
def free(made: Made) -> list[list[int]]:
    with unguided_engine(made.cpu, with_drafts(0, **SMALL, **made.named)) as engine:
        found = answer_each(engine, asked(engine, FREE))
    assert len({tuple(answer) for answer in found}) == len(FREE)
    return found


@pytest.mark.parametrize("num_drafts", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_tokens_equal_those_of_a_cpu(made: Made, free: list[list[int]], num_drafts: int) -> None:
    with device_engine(made.device, on_device(num_drafts, **made.named)) as (engine, stream):
        assert answer_all(engine, asked(engine, FREE)) == free
        replays, eager = counts(engine)
        assert eager == 0 < replays
        assert num_drafts == 0 or engine.stats().accepted_draft_tokens > 0
        assert stream.failure is None
        until_false(lambda: any(use.in_use for use in engine.adapters.listed()))


def test_a_step_without_adapters_has_the_nodes_of_a_server_that_takes_none(made: Made, llama: LoadedModel) -> None:
    def parts(model: LoadedModel, **fields: object) -> tuple[list[list[tuple[str, int]]], list[int]]:
        """Return the nodes of each step's graph without adapters, and the number of nodes of the others."""
        with device_engine(model, on_device(3, **fields)) as (engine, _):
            graphs = executor_of(engine).runner.launcher  # type: ignore[attr-defined]
            others = [len(graph.nodes) for shape, graph in graphs._graphs.items() if shape.adapted]
            found = [graph.parts for graph in graphs.captured.values()]
            if model.adapters is not None:  # prompts of requests that name no adapter
                answer_all(engine, asked(engine, [FREE[1]]))
                replayed = {shape for shape, graph in graphs._graphs.items() if graph.replays > 1}
                assert replayed
                assert not any(shape.adapted for shape in replayed)
        return found, others

    plain, none = parts(llama, max_adapter_bytes=0)
    with_adapters, adapted = parts(made.device, **made.named)
    assert with_adapters == plain
    assert none == []
    assert len(adapted) == len(plain)
    assert min(adapted) > min(sum(count for _, count in nodes) for nodes in plain)


def answer_of(made: Made, name: str) -> list[int]:
    """Return the tokens of a request with an adapter on a CPU."""
    named = (f"x={made.files[name]}",)
    with unguided_engine(made.cpu, with_drafts(0, **SMALL, adapters=named)) as engine:
        return answer_all(engine, asked(engine, [(ROUND, "x", "")]))[0]


@pytest.mark.slow
def test_adapters_are_loaded_and_unloaded_between_replays(made: Made, free: list[list[int]]) -> None:
    """The second number is written again and again while a sequence with the first one runs."""
    expected = {"b": free[3], "c": answer_of(made, "c")}
    dirs = (str(made.files["b"].parent),)
    with device_engine(made.device, on_device(3, adapters=made.named["adapters"][:1], adapter_dirs=dirs)) as (
        engine,
        _,
    ):
        running = partial(ask, [*range(196, 203)] * 2, max_tokens=40, ignore_eos=True)
        alone = answer_all(engine, asked(engine, [(running, "a", "")]))[0]
        (long,) = asked(engine, [(running, "a", "")])
        long.submit(engine)
        until_false(lambda: not long.tokens)
        for name in ("b", "c", "b"):
            engine.adapters.load("x", str(made.files[name]))
            assert answer_all(engine, asked(engine, [(ROUND, "x", "")])) == [expected[name]]
            engine.adapters.unload("x").result(PATIENCE_S)
        assert long.wait().tokens == alone
        assert counts(engine)[1] == 0
        # Without a free number, the one that was unused for the longest time goes; one of the settings stays.
        engine.adapters.load("b", str(made.files["b"]))
        engine.adapters.load("c", str(made.files["c"]))
        assert [use.adapter.name for use in engine.adapters.listed()] == ["a", "c"]
        engine.adapters.acquire([engine.adapters.find(AdapterKind.LORA, "c")])
        with pytest.raises(LimitExceeded, match="max_adapters: 2 LoRA adapters are loaded"):
            engine.adapters.load("b", str(made.files["b"]))
        engine.adapters.release([engine.adapters.find(AdapterKind.LORA, "c")])


GUIDED: list[Case] = [
    (partial(ask, tokens(20, 1, repeat=8), grammar="6", max_tokens=30), "a", ""),
    (partial(ask, tokens(9, 4), grammar="5", max_tokens=30, temperature=0.8, seed=4), "b", "p"),
    (partial(ask, tokens(12, 5), grammar="5", max_tokens=30), "", ""),
    (ROUND, "b", ""),
]


@pytest.fixture(scope="module")
def guided(made: Made) -> list[list[int]]:
    with guided_engine(made.cpu, with_drafts(0, **SMALL, **made.named)) as (engine, _):
        return answer_each(engine, asked(engine, GUIDED))


@pytest.mark.parametrize(("num_drafts", "sync"), [(0, "host_callback"), (3, "device_flag")])
@pytest.mark.slow
def test_guided_tokens_equal_those_of_a_cpu(made: Made, guided: list[list[int]], num_drafts: int, sync: str) -> None:
    with guided_device_engine(made.device, on_device(num_drafts, sync=sync, **made.named)) as (engine, _, _):
        assert answer_all(engine, asked(engine, GUIDED)) == guided
        replays, eager = counts(engine)
        assert eager == 0 < replays


@pytest.mark.slow
def test_a_killed_grammar_process_and_few_pages_change_no_token(made: Made, guided: list[list[int]]) -> None:
    patient = {"row_timeout_ms": 300.0, "draft_timeout_ms": 300.0, "kv_cache_tokens": 64}
    with guided_device_engine(made.device, on_device(3, **made.named, **patient)) as (engine, grammar, stream):
        assert answer_over_a_loss(engine, grammar, asked(engine, GUIDED)) == guided
        until_false(lambda: any(use.in_use for use in engine.adapters.listed()))
        assert stream.failure is None


@pytest.mark.slow
def test_the_prompts_log_probabilities_and_cached_pages_are_those_of_a_cpu(made: Made) -> None:
    case: Case = (partial(ask, tokens(40, 6), max_tokens=2), "a", "p")

    def scored(engine: Engine) -> list[float]:
        (answer,) = asked(engine, [case])
        answer.change(prompt_logprobs=0)
        answer_all(engine, [answer])
        found = next(event.prompt_logprobs for event in answer.events if event.prompt_logprobs is not None)
        return [float(value) for value in found.logprob_N]

    def cached(engine: Engine) -> list[int]:
        answers = [asked(engine, [(case[0], lora, prompt)])[0] for lora, prompt in (("a", "p"), ("a", ""), ("a", "p"))]
        answer_each(engine, answers)
        return [answer.telemetry.cached_tokens for answer in answers]

    with unguided_engine(made.cpu, with_drafts(0, **SMALL, **made.named)) as engine:
        expected = scored(engine)
    with device_engine(made.device, on_device(3, **made.named)) as (engine, _):
        assert scored(engine) == pytest.approx(expected, abs=1e-4)
        first, other, again = cached(engine)
        assert other == 0 < again
        assert first in (0, again)  # a prompt that was scored leaves its pages


def test_the_stacks_are_counted_and_bounded(made: Made, llama: LoadedModel) -> None:
    pool = made.device.adapters
    assert isinstance(pool, DeviceAdapterPool)
    stacks = LIMITS.max_adapters * (pool.lora_bytes + pool.prompt_bytes)
    assert weight_bytes(made.device) - weight_bytes(llama) == stacks
    few = replace(LIMITS, max_adapter_bytes=5000)
    with pytest.raises(
        AdapterNotSupported, match=r"max_adapter_bytes: is 5000, .* 2 adapters .* of rank 8 .* take \d+"
    ):
        DeviceAdapterPool(llama.net, llama.vocab_size, few, lambda *_: None)
    for fields, problem in (
        ({"max_lora_rank": 6}, "adapters: a: path: rank: is 7, and max_lora_rank is 6"),
        ({"max_virtual_tokens": 4}, "adapters: p: path: num_virtual_tokens: is 5, and max_virtual_tokens is 4"),
        ({"max_adapters": 1}, "adapters: b: max_adapters: 1 LoRA adapters are loaded, and none of them can be evicted"),
    ):
        with pytest.raises(ModelNotSupported, match=problem):
            Engine(on_device(0, **made.named, **fields), made.device)


def test_a_load_ends_when_the_engine_closes(made: Made) -> None:
    device = RecordedDevice()
    engine = Engine(
        on_device(0, adapter_dirs=(str(made.files["a"].parent),)), made.device, build_executor=device.build_executor
    )
    found: list[BaseException] = []

    def load() -> None:
        try:
            engine.adapters.load("x", str(made.files["a"]))
        except ShuttingDown as error:
            found.append(error)

    waiting = threading.Thread(target=load)
    try:
        waiting.start()  # the engine's thread was not started, so no thread takes the message
        until_false(lambda: engine._inbox.empty() and waiting.is_alive())
        engine.close()
        waiting.join(PATIENCE_S)
        assert not waiting.is_alive()
        assert len(found) == 1
        assert engine.adapters.listed() == []
    finally:
        device.stream.close()
