"""Engines that share their experts: each attends to its own batch, and has the tokens of the whole model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig

from gpu_engine.api.adapters import AdapterKind
from gpu_engine.api.config import EngineConfig
from gpu_engine.api.errors import InternalError, RankLost
from gpu_engine.api.output_tensors import LOGITS, WantedOutput
from gpu_engine.core.draft_budget import EveryDraft
from gpu_engine.core.engine import Engine
from gpu_engine.model.loader import LoadedModel, ModelNotSupported, load_model
from gpu_engine.model.parallel.peers import Peers
from gpu_engine.model.parallel.shared_experts import SharedExperts
from kernels.blocks import can_multiply_blocks
from tests.gpu_engine import tiny
from tests.gpu_engine.adapters.files import save_lora
from tests.gpu_engine.beams import search, search_all
from tests.gpu_engine.harness import (
    UNHURRIED_MS,
    Answer,
    Hold,
    answer_all,
    ask,
    config,
    executor_of,
    running,
    tokens,
    unguided_engine,
    until_false,
    with_drafts,
)
from tests.gpu_engine.model.parallel.shard_logits import logits
from tests.gpu_engine.toy_sidecar import guided_engine

FREE: list[Callable[[], Answer]] = [
    partial(ask, tokens(30, 1, repeat=10), max_tokens=40),
    partial(ask, tokens(12, 2), max_tokens=30, ignore_eos=True),
    partial(ask, tokens(20, 3), max_tokens=40, temperature=1.0, seed=3),
    partial(ask, tokens(33, 4), max_tokens=25, temperature=0.5, top_p=0.9),
    partial(ask, [*range(196, 203)] * 2, max_tokens=30),
]
GUIDED: list[Callable[[], Answer]] = [
    partial(ask, tokens(30, 1, repeat=10), grammar="40", max_tokens=50),
    partial(ask, tokens(20, 3), grammar="30", max_tokens=40, temperature=1.0, seed=3),
    partial(ask, tokens(9, 5), grammar="25", max_tokens=30, temperature=0.6, seed=5),
]


def mixtral(num_experts: int) -> MixtralConfig:
    return MixtralConfig(**tiny._SHAPE, num_local_experts=num_experts, num_experts_per_tok=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mixtral of five experts, which two engines do not divide evenly."""
    return tiny.save(mixtral(5), tmp_path_factory.mktemp("mixtral"), rounds=True)


def settings(folder: Path, directory: Path, rank: int, size: int = 2, **fields: Any) -> EngineConfig:
    group = {"data_parallel_attention": size, "data_parallel_rank": rank, "data_parallel_dir": str(directory)}
    return config(model=str(folder), **{**group, **fields})


def load_all(configs: Sequence[EngineConfig]) -> list[Any]:
    """Load models that wait for each other; an error is returned in its place."""
    found: list[Any] = [None] * len(configs)

    def load(at: int) -> None:
        try:
            found[at] = load_model(configs[at])
        except (ModelNotSupported, RankLost) as error:
            found[at] = error

    threads = [threading.Thread(target=load, args=(at,)) for at in range(len(configs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def peers_of(model: LoadedModel) -> Peers:
    assert isinstance(model.ranks, Peers)
    return model.ranks


@contextmanager
def group(folder: Path, directory: Path, size: int = 2, num_drafts: int = 7, **fields: Any) -> Iterator[list[Engine]]:
    """Run the engines of a group, each in its own thread."""
    loading = {name: value for name, value in fields.items() if name in ("adapters", "quantization")}
    models = load_all([settings(folder, directory, rank, size, **loading) for rank in range(size)])
    engines = [Engine(with_drafts(num_drafts, **fields), model) for model in models]
    for engine in engines:
        executor_of(engine).runner.budget = EveryDraft()
    together([engine.start for engine in engines])
    try:
        yield engines
    finally:
        together([engine.close for engine in engines])
        for engine in engines:
            assert not engine._thread.is_alive()
            peers_of(engine.model).close()


def together(calls: Sequence[Callable[[], Any]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def submit(engine: Engine, answers: list[Answer]) -> list[Answer]:
    for answer in answers:
        answer.submit(engine)
    return answers


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[int]]:
    """The answers of the whole model, without drafts: those of FREE and of GUIDED."""
    with guided_engine(load_model(config(model=str(folder))), with_drafts(0, row_timeout_ms=UNHURRIED_MS)) as (
        engine,
        _,
    ):
        return answer_all(engine, [make() for make in (*FREE, *GUIDED)])


@pytest.mark.parametrize(
    ("size", "num_drafts"),
    [(2, 7), pytest.param(2, 0, marks=pytest.mark.slow), pytest.param(3, 7, marks=pytest.mark.slow)],
)
def test_tokens_of_each_engine_are_those_of_the_whole_model_alone(
    folder: Path, tmp_path: Path, alone: list[list[int]], size: int, num_drafts: int
) -> None:
    models = load_all([settings(folder, tmp_path, rank, size) for rank in range(size)])
    found, accepted, over = [[[0]]] * size, [0] * size, threading.Barrier(size)

    def run(rank: int) -> None:
        """Answer another part of the requests than other ranks, guided and free."""
        with guided_engine(models[rank], with_drafts(num_drafts, row_timeout_ms=UNHURRIED_MS)) as (engine, _):
            found[rank] = answer_all(engine, [make() for make in (*FREE, *GUIDED)[rank:]])
            accepted[rank] = engine.stats().accepted_draft_tokens
            over.wait(60)

    together([partial(run, rank) for rank in range(size)])
    assert found == [alone[rank:] for rank in range(size)]
    assert all((count > 5) == bool(num_drafts) for count in accepted)
    held = [module.inner for model in models for module in model.net.modules() if isinstance(module, SharedExperts)]
    per_layer = [sum(hasattr(expert, "in_features") for expert in each.down) for each in held]
    assert sum(per_layer) == 5 * 2  # two layers: each expert is in one engine
    assert max(per_layer) == {2: 3, 3: 2}[size]


def test_an_idle_engine_steps_along_and_a_late_one_joins(folder: Path, tmp_path: Path, alone: list[list[int]]) -> None:
    with group(folder, tmp_path) as (first, second):
        idle = peers_of(second.model).num_idle_forwards
        assert answer_all(first, [make() for make in FREE]) == alone[: len(FREE)]
        assert second.stats().steps == 0
        assert peers_of(second.model).num_idle_forwards > idle + 20
        begun, late = submit(first, [FREE[1]()]), FREE[2]()
        until_false(lambda: not begun[0].tokens)
        assert answer_all(second, [late]) == [alone[2]]
        assert begun[0].wait().tokens == alone[1]


@pytest.mark.slow
def test_preempted_sequences_beams_and_hidden_states(folder: Path, tmp_path: Path, alone: list[list[int]]) -> None:
    whole = load_model(config(model=str(folder)))
    with unguided_engine(whole, with_drafts(0)) as engine:
        beams = search_all(engine, [search(tokens(21, 3), max_tokens=12)])[0].tokens
    small = {"max_model_len": 112, "kv_cache_tokens": 128}
    with group(folder, tmp_path, **small) as (first, second):
        begun = submit(first, [make() for make in FREE])
        assert search_all(second, [search(tokens(21, 3), max_tokens=12)])[0].tokens == beams
        assert [answer.wait().tokens for answer in begun] == alone[: len(FREE)]
        assert first.stats().preemptions > 0
        assert set(first.model.outputs) == {n for n in whole.outputs if ".experts." not in n}
        names = (LOGITS, "hidden_states.1", "model.layers.1.mlp")
        answer = ask(tokens(20, 2), max_tokens=4)
        answer.change(
            tensors=tuple(WantedOutput(name, name, whole.outputs[name], context=True, answer=True) for name in names)
        )
        answer_all(second, [answer])
        assert {part.name for event in answer.events for part in event.outputs} == set(names)


def test_a_rank_that_is_gone_ends_the_group_with_one_line(folder: Path, tmp_path: Path) -> None:
    with group(folder, tmp_path) as (first, second):
        failed: list[Exception] = []
        over = threading.Event()
        first.watch(lambda error: (failed.append(error), over.set()))  # type: ignore[func-returns-value]
        begun = ask(tokens(9, 5), max_tokens=200, ignore_eos=True)
        hold = Hold(first, lambda: bool(begun.tokens))
        submit(first, [begun])
        with hold.reached():
            for peer in peers_of(second.model)._peers:
                peer.met.socket.shutdown(2)
        assert over.wait(30)
        assert str(failed[0]).startswith("rank 1 of 2 (process ")
        assert str(failed[0]).endswith(") has ended")
        assert isinstance(begun.wait().error, InternalError)
        with pytest.raises(InternalError):
            first.submit(ask([1]).request)


@pytest.mark.slow
def test_engines_that_do_not_belong_together_are_refused(
    folder: Path, tmp_path: Path, saved: Callable[[str], Path]
) -> None:
    """Of other weights, without experts that can be shared, and a second one of a rank."""
    other = tiny.save(mixtral(5), tmp_path / "other", seed=1)
    found = load_all([settings(folder, tmp_path / "d", 0), settings(other, tmp_path / "d", 1)])
    assert all(isinstance(error, ModelNotSupported) for error in found)
    assert "has about mixtral float32 whole" in str(found[0])
    for family, problem in (
        ("llama", "llama has no experts"),
        ("llama4", "the experts WeightedExperts of llama4_text"),
    ):
        with pytest.raises(ModelNotSupported, match=f"^data_parallel_attention: {problem}"):
            load_model(settings(saved(family), tmp_path, 0))
    with group(folder, tmp_path), pytest.raises(ModelNotSupported, match=r"^data_parallel_rank: another engine has"):
        load_model(settings(folder, tmp_path, 1))


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_adapters_and_rounded_products_are_those_of_the_whole_model(
    saved: Callable[[str], Path], tmp_path: Path, quantization: str
) -> None:
    folder = saved("mixtral")
    if quantization != "none" and not can_multiply_blocks():
        pytest.skip("products over blocks need AVX2")
    adapter = save_lora(folder, tmp_path / "a", seed=1, targets=("q_proj", "v_proj", "o_proj"))
    fields: dict[str, Any] = {"adapters": (f"a={adapter}",), "quantization": quantization}

    def asked(engine: Engine, name: str) -> Answer:
        answer = ask(tokens(30, 5), max_tokens=20, ignore_eos=True)
        answer.change(lora=engine.adapters.find(AdapterKind.LORA, name) if name else None)
        return answer

    with running(Engine(with_drafts(0, **fields), load_model(config(model=str(folder), **fields)))) as engine:
        expected = answer_all(engine, [asked(engine, name) for name in ("", "a")])
    assert expected[0] != expected[1]
    with group(folder, tmp_path / "d", **fields) as engines:
        found = [submit(engine, [asked(engine, name) for name in ("", "a")]) for engine in engines]
        assert [[answer.wait().tokens for answer in answers] for answers in found] == [expected] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["mixtral", "qwen3_moe", "minimax_m2", "deepseek_v2", "deepseek_v3", "gpt_oss", "gemma4 moe"]
)
def test_logits_of_every_family_have_the_bits_of_the_whole_model(
    saved: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    whole = load_model(config(model=str(saved(family))))
    models = load_all([settings(saved(family), tmp_path, rank) for rank in range(2)])
    ids_BP = torch.arange(3 * 9).view(3, 9) * 29 % 250
    found: list[Any] = [None, None]

    def run(rank: int) -> None:
        found[rank] = logits(models[rank], ids_BP[rank:].contiguous())
        peers_of(models[rank]).close()

    together([partial(run, rank) for rank in range(2)])
    for rank in range(2):
        assert torch.equal(found[rank], logits(whole, ids_BP[rank:].contiguous()))
