"""Prompt adapters over a tiny model: equal to PEFT's embeddings before the prompt, and lossless."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gpu_engine.api.adapters import AdapterKind
from gpu_engine.core.engine import Engine
from gpu_engine.model.adapters.peft_files import AdapterNotSupported, PromptFiles
from gpu_engine.model.loader import LoadedModel, load_model
from tests.gpu_engine import tiny
from tests.gpu_engine.adapters.files import merge, save_lora, save_prompt
from tests.gpu_engine.harness import Answer, answer_all, answer_each, ask, config, running, tokens, with_drafts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny Llama that repeats itself, so that drafts are accepted."""
    return tiny.save(tiny.FAMILIES["llama"](), tmp_path_factory.mktemp("model"), rounds=True)


@pytest.fixture(scope="module")
def files(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the directories of two prompt adapters and a LoRA adapter."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        "p": save_prompt(root / "p", tokens=20, hidden=64, seed=1),
        "q": save_prompt(root / "q", tokens=3, hidden=64, seed=2),
        "l": save_lora(folder, root / "l", seed=3),
    }


def fields(folder: Path, files: dict[str, Path], **more: object) -> dict[str, Any]:
    return {"model": str(folder), "adapters": tuple(f"{name}={path}" for name, path in files.items()), **more}


def asked(engine: Engine, name: str, prompt: list[int], lora: str = "", **sampling: Any) -> Answer:
    adapter = engine.adapters.find(AdapterKind.PROMPT, name) if name else None
    virtual = [] if adapter is None else list(adapter.virtual_ids)
    answer = ask([*virtual, *prompt], **{"max_tokens": 16, "ignore_eos": True, **sampling})
    answer.change(prompt_adapter=adapter)
    answer.change(lora=engine.adapters.find(AdapterKind.LORA, lora) if lora else None)
    return answer


def want(folder: Path, files: dict[str, Path], name: str, prompt: list[int], count: int, lora: str = "") -> list[int]:
    """Return transformers' greedy answer after the adapter's embeddings."""
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    if lora:
        merge(net, files[lora])
    virtual = load_file(files[name] / "adapter_model.safetensors")["prompt_embeddings"]
    ids = list(prompt)
    for _ in range(count):
        embeds = torch.cat([virtual, net.get_input_embeddings()(torch.tensor(ids))])[None]
        with torch.no_grad():
            ids.append(int(net(inputs_embeds=embeds).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_answers_are_those_behind_the_embeddings(folder: Path, files: dict[str, Path]) -> None:
    configured = with_drafts(3, **fields(folder, files))
    with running(Engine(configured, load_model(configured))) as engine:
        prompt = tokens(21, 5)
        cases = [("p", ""), ("q", ""), ("", ""), ("p", "l")]
        got = answer_all(engine, [asked(engine, name, prompt, lora) for name, lora in cases])
        assert [use.in_use for use in engine.adapters.listed()] == [0, 0, 0]
    assert got[2] == tiny.generate(folder, prompt, 16)
    assert [got[at] for at in (0, 1, 3)] == [
        want(folder, files, *case[:1], prompt, 16, case[1]) for case in cases if case[0]
    ]


def test_pages_behind_virtual_tokens_are_shared_by_one_adapter_alone(folder: Path, files: dict[str, Path]) -> None:
    configured = with_drafts(3, **fields(folder, files))
    with running(Engine(configured, load_model(configured))) as engine:
        answers = [asked(engine, name, tokens(40, 1)) for name in ("p", "q", "p", "")]
        answer_each(engine, answers)
    assert [answer.telemetry.cached_tokens for answer in answers] == [0, 0, 48, 0]
    assert answers[0].tokens == answers[2].tokens


def test_log_probabilities_of_the_prompt_follow_the_virtual_tokens(folder: Path, files: dict[str, Path]) -> None:
    configured = with_drafts(0, **fields(folder, files))
    prompt = tokens(25, 1)
    with running(Engine(configured, load_model(configured))) as engine:
        answer = asked(engine, "p", prompt, max_tokens=1)
        answer.change(prompt_logprobs=1)
        answer_all(engine, [answer])
    scores = next(event.prompt_logprobs for event in answer.events if event.prompt_logprobs is not None)
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    virtual = load_file(files["p"] / "adapter_model.safetensors")["prompt_embeddings"]
    with torch.no_grad():
        embeds = torch.cat([virtual, net.get_input_embeddings()(torch.tensor(prompt))])[None]
        logprobs = net(inputs_embeds=embeds).logits[0].log_softmax(-1)
    expected = logprobs[torch.arange(20, 44), torch.tensor(prompt[1:])]
    torch.testing.assert_close(torch.from_numpy(scores.logprob_N)[20:], expected, rtol=1e-4, atol=1e-4)


def test_places_of_unloaded_adapters_are_used_again(folder: Path) -> None:
    model = load_model(config(model=str(folder), max_adapter_bytes=1 << 20))
    pool = model.adapters
    assert pool is not None
    rows = [torch.full((count, 64), float(count)) for count in (4, 6, 3, 5)]
    firsts = [pool.put_prompt(number, PromptFiles(part)) for number, part in enumerate(rows[:3], start=1)]
    assert [first - firsts[0] for first in firsts] == [0, 4, 10]
    pool.remove_prompt(2)
    assert pool.put_prompt(4, PromptFiles(rows[3])) == firsts[1]
    embedding: Any = model.net.get_input_embeddings()
    ids = torch.tensor([[1, firsts[0], firsts[1] + 4, firsts[2] + 2]])
    assert embedding(ids)[0, 1:, 0].tolist() == [4.0, 5.0, 3.0]
    for number in (1, 3, 4):
        pool.remove_prompt(number)
    with pytest.raises(
        AdapterNotSupported, match=r"prompt_embeddings: has the shape \[2, 32\], and the model needs \[2, 64\]"
    ):
        pool.check(PromptFiles(torch.zeros(2, 32)))


def test_a_drafting_network_takes_no_prompt_adapter(
    folder: Path, files: dict[str, Path], draft_models: dict[str, str]
) -> None:
    configured = config(model=str(folder), drafter="model", draft_model=draft_models["same"], max_adapter_bytes=1 << 20)
    model: LoadedModel = load_model(configured)
    assert model.adapters is not None
    with pytest.raises(AdapterNotSupported, match="PROMPT_TUNING is not taken: drafter=model reads the tokens"):
        model.adapters.check(PromptFiles(torch.zeros(2, 64)))
