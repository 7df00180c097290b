"""LoRA adapters over real tiny models: equal to the merged model, lossless, and invisible to sequences without one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2MoeConfig

from gpu_engine.api.adapters import AdapterKind
from gpu_engine.api.config import EngineConfig
from gpu_engine.api.errors import InvalidRequest
from gpu_engine.core.engine import Engine
from gpu_engine.model.adapters.peft_files import LoraFiles, read_adapter
from gpu_engine.model.adapters.places import Place, Places
from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.experts import replace_experts
from gpu_engine.model.loader import LoadedModel, ModelNotSupported, load_model
from kernels.blocks import can_multiply_blocks
from tests.gpu_engine import tiny
from tests.gpu_engine.adapters.files import merge, merged_answer, save_lora
from tests.gpu_engine.harness import (
    UNHURRIED_MS,
    Answer,
    Hold,
    answer_all,
    answer_each,
    ask,
    config,
    running,
    tokens,
    until_false,
    with_drafts,
)
from tests.gpu_engine.toy_sidecar import guided_engine

NAMES = ("", "a", "b")
"""The adapters of the fixture `files`: none, one of every product, and one of rank 8 of two of them."""

needs_blocks = pytest.mark.skipif(not can_multiply_blocks(), reason="products over blocks need AVX2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny Llama that repeats itself, so that drafts are accepted."""
    return tiny.save(tiny.FAMILIES["llama"](), tmp_path_factory.mktemp("model"), rounds=True)


@pytest.fixture(scope="module")
def files(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the directories of two adapters of that model, in float32 and in bfloat16."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        "a": save_lora(folder, root / "a", seed=1, ranks={"k_proj": 2, "down_proj": 7}),
        "b": save_lora(
            folder, root / "b", seed=2, rank=8, targets=("q_proj", "v_proj"), use_rslora=True, dtype=torch.bfloat16
        ),
    }


def settings(drafts: int, folder: Path, files: dict[str, Path], **fields: object) -> EngineConfig:
    named = tuple(f"{name}={path}" for name, path in files.items())
    return with_drafts(drafts, model=str(folder), adapters=named, **fields)


@pytest.fixture(scope="module")
def load(folder: Path, files: dict[str, Path]) -> Callable[[str], LoadedModel]:
    """Return the model by its quantisation, loaded once for all engines, which run one after another."""
    models: dict[str, LoadedModel] = {}

    def of(quantization: str) -> LoadedModel:
        if quantization not in models:
            models[quantization] = load_model(settings(0, folder, files, quantization=quantization))
        return models[quantization]

    return of


@pytest.fixture
def engine(folder: Path, files: dict[str, Path], load: Callable[[str], LoadedModel]) -> Iterator[Engine]:
    """Run an engine with the two adapters and three drafts a step."""
    with adapted(settings(3, folder, files), load("none")) as made:
        yield made


def adapted(configured: EngineConfig, model: LoadedModel) -> AbstractContextManager[Engine]:
    """Run an engine over `model`."""
    return running(Engine(configured, model))


def named(engine: Engine, name: str, prompt: list[int], **sampling: Any) -> Answer:
    answer = ask(prompt, **{"max_tokens": 20, "ignore_eos": True, **sampling})
    answer.change(lora=engine.adapters.find(AdapterKind.LORA, name) if name else None)
    return answer


def users(engine: Engine) -> list[int]:
    return [use.in_use for use in engine.adapters.listed()]


def test_answers_are_those_of_the_merged_models(engine: Engine, folder: Path, files: dict[str, Path]) -> None:
    prompt = tokens(30, 5)
    got = answer_all(engine, [named(engine, name, prompt) for name in NAMES])
    assert got[0] == tiny.generate(folder, prompt, 20)
    assert got[1:] == [merged_answer(folder, files[name], prompt, 20) for name in NAMES[1:]]
    assert len({tuple(answer) for answer in got}) == 3


@pytest.mark.parametrize(
    "family", ["qwen2", "phi3", "gemma2", "granite", "cohere2", "gpt2", "gpt_neox", "qwen3_moe", "gemma4 small"]
)
def test_logits_are_those_of_the_merged_model(family: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Joined and single products with biases, one loop and a forward of transformers' own; experts stay."""
    targets = {
        "phi3": ("qkv_proj", "gate_up_proj", "o_proj"),
        "gpt2": ("c_attn", "c_fc"),
        "gpt_neox": ("query_key_value",),
    }
    adapter = save_lora(saved(family), tmp_path, targets=targets.get(family, ("q_proj", "v_proj", "o_proj")), seed=3)
    model = load_model(config(model=str(saved(family)), max_adapter_bytes=1 << 20))
    files = read_adapter(adapter, 1 << 20)
    assert isinstance(files, LoraFiles)
    assert model.adapters is not None
    model.adapters.put(1, files)
    ids = torch.tensor([tokens(12, seed) for seed in (1, 2, 3)])
    positions = torch.arange(12, dtype=torch.int32).expand(3, -1).contiguous()
    table = torch.arange(3, dtype=torch.int32)[:, None].contiguous()
    ctx = AttentionContext(model.allocate_pages(3, 16), table, positions)
    ctx.adapters_B = torch.tensor([1, 0, 1], dtype=torch.int32)
    with torch.no_grad():
        got = model.logits(ids, ctx).view(3, 12, -1).clone()
        for rows, merged in (([1], False), ([0, 2], True)):
            net = AutoModelForCausalLM.from_pretrained(saved(family), dtype=torch.float32).eval()
            want = (merge(net, adapter) if merged else net)(input_ids=ids[rows]).logits
            torch.testing.assert_close(got[rows], want, rtol=1e-4, atol=2e-4)


def test_the_gate_of_a_shared_expert_has_the_name_that_files_have() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32, "num_experts": 4}
    net = AutoModelForCausalLM.from_config(Qwen2MoeConfig(num_hidden_layers=1, vocab_size=32, **sizes))
    replace_experts(net)
    places = Places(net)
    place = places.by_path["model.layers.0.mlp.shared_expert_gate"]
    assert place == Place(place.product, begin=0, outputs=1, inputs=64)


@needs_blocks
def test_rows_without_an_adapter_have_the_bits_of_a_model_that_takes_none(
    folder: Path, files: dict[str, Path], load: Callable[[str], LoadedModel]
) -> None:
    plain, model = load_model(config(model=str(folder), quantization="int8")), load("int8")
    engine = Engine(settings(0, folder, files, quantization="int8"), model)
    with contextlib.closing(engine):
        ids = torch.tensor([tokens(40, seed) for seed in range(6)])
        positions = torch.arange(40, dtype=torch.int32).expand(6, -1).contiguous()
        table = torch.arange(18, dtype=torch.int32).view(6, 3)
        numbers = torch.tensor([0, 1, 2, 0, 1, 0], dtype=torch.int32)

        def logits(of: LoadedModel, rows: list[int], numbers_B: torch.Tensor | None) -> torch.Tensor:
            ctx = AttentionContext(
                of.allocate_pages(18, 16), table[rows], positions[rows].contiguous(), adapters_B=numbers_B
            )
            return of.logits(ids[rows], ctx).view(len(rows), 40, -1).clone()

        together = logits(model, list(range(6)), numbers)
        assert torch.equal(together[[0, 3, 5]], logits(plain, [0, 3, 5], None))
        for row in range(6):
            assert torch.equal(together[row : row + 1], logits(model, [row], numbers[row : row + 1]))
        assert not torch.equal(together[1], logits(plain, [1], None)[0])


def test_an_adapter_never_meets_pages_of_another(engine: Engine) -> None:
    prompt = tokens(60, 9)
    answers = [named(engine, name, prompt) for name in ("a", "a", "b", "", "a")]
    first = answer_each(engine, answers)
    assert [answer.telemetry.cached_tokens for answer in answers] == [0, 48, 0, 0, 48]
    assert first[0] == first[1] == first[4]


def test_a_reloaded_adapter_starts_without_pages(
    folder: Path, tmp_path: Path, load: Callable[[str], LoadedModel]
) -> None:
    one, other = (save_lora(folder, tmp_path / name, seed=seed) for name, seed in (("one", 4), ("other", 5)))
    prompt = tokens(60, 9)
    with adapted(with_drafts(3, model=str(folder), adapter_dirs=(str(tmp_path),)), load("none")) as engine:
        engine.adapters.load("x", str(one))
        before = answer_all(engine, [named(engine, "x", prompt)])[0]
        old = engine.adapters.find(AdapterKind.LORA, "x")
        engine.adapters.load("x", str(other))
        after = named(engine, "x", prompt)
        assert answer_all(engine, [after])[0] == merged_answer(folder, other, prompt, 20) != before
        assert after.telemetry.cached_tokens == 0
        stale = ask(prompt)
        stale.change(lora=old)
        with pytest.raises(InvalidRequest, match="lora: the LoRA adapter 'x' was unloaded meanwhile"):
            stale.submit(engine)
        engine.adapters.unload("x")


def test_an_unload_waits_for_the_sequences_that_use_the_adapter(
    folder: Path, tmp_path: Path, load: Callable[[str], LoadedModel]
) -> None:
    path = save_lora(folder, tmp_path / "one", seed=4)
    with adapted(with_drafts(3, model=str(folder), adapter_dirs=(str(tmp_path),)), load("none")) as engine:
        engine.adapters.load("x", str(path))
        long = named(engine, "x", tokens(20, 1), max_tokens=200)
        long.submit(engine)
        until_false(lambda: not long.tokens)
        gone = engine.adapters.unload("x")
        assert engine.adapters.listed() == []
        with pytest.raises(InvalidRequest, match="lora: there is no LoRA adapter 'x'; there are: none"):
            engine.adapters.find(AdapterKind.LORA, "x")
        waits = not gone.done() or long.over
        assert len(long.wait().tokens) == 200
        gone.result(timeout=10)
        assert waits
        assert long.tokens == merged_answer(folder, path, tokens(20, 1), 200)


def test_cancelled_sequences_release_their_adapters_even_without_a_grammar_process(
    folder: Path, files: dict[str, Path], load: Callable[[str], LoadedModel]
) -> None:
    with guided_engine(load("none"), settings(3, folder, files, row_timeout_ms=UNHURRIED_MS)) as (engine, grammar):
        dropped, aborted, guided = (
            named(engine, name, tokens(30, seed), max_tokens=150, grammar="140", ignore_eos=False)
            for seed, name in enumerate(("a", "a", "b"))
        )
        hold = Hold(engine, lambda: all(answer.tokens for answer in (dropped, aborted, guided)))
        for answer in (dropped, aborted, guided):
            answer.submit(engine)
        with hold.reached():
            assert users(engine) == [2, 1]
        grammar.lose_sidecar(engine)
        engine.drop(dropped.request)
        engine.abort(aborted.request.request_id)
        aborted.wait()
        until_false(lambda: users(engine) != [0, 1])  # paused sequences keep their adapters
        grammar.restore_sidecar(engine)
        assert guided.wait().finish is not None
        until_false(lambda: users(engine) != [0, 0])


def test_adapters_that_do_not_fit_the_model_end_the_start(
    folder: Path, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    model = load_model(config(model=str(folder), max_adapter_bytes=1 << 20))
    wide = save_lora(saved("gpt2"), tmp_path / "gpt2", targets=("c_attn",))
    with pytest.raises(
        ModelNotSupported, match=r"adapters: x: path: .*c_attn: the model has no such product; it has q_proj"
    ):
        Engine(config(model=str(folder), adapters=(f"x={wide}",)), model)
    with pytest.raises(ModelNotSupported, match=r"adapters: x: path: .* has no adapter_config.json"):
        Engine(config(model=str(folder), adapters=(f"x={tmp_path}",)), model)
