"""Prompt adapters over a tiny model: equal to PEFT's embeddings before the prompt, and to each adapter their own pages.

Not responsible for: drafts and events that change no token (see tests/gpu_engine/test_lossless.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GraniteConfig

from gpu_engine.api.adapters import AdapterKind
from gpu_engine.api.output_tensors import WantedOutput
from gpu_engine.core.engine import Engine
from gpu_engine.model.adapters.peft_files import AdapterNotSupported, PromptFiles
from gpu_engine.model.fused_forward import FusedForward
from gpu_engine.model.loader import load_model
from gpu_engine.model.quantised.native import NativeForward
from tests.gpu_engine import tiny
from tests.gpu_engine.adapters.files import merge, save_lora, save_prompt
from tests.gpu_engine.harness import Answer, answer_all, answer_each, ask, config, running, tokens, with_drafts

TENSORS = ("logits", "hidden_states.1", "hidden_states.2", "model.layers.1.mlp")


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
        "l": save_lora(folder, root / "l", seed=3, gain=2.0),
    }


@pytest.fixture
def engine(folder: Path, files: dict[str, Path]) -> Iterator[Engine]:
    fields = {"model": str(folder), "adapters": tuple(f"{name}={path}" for name, path in files.items())}
    settings = with_drafts(3, **fields)
    with running(Engine(settings, load_model(settings))) as made:
        yield made


def asked(engine: Engine, name: str, prompt: list[int], lora: str = "", **fields: Any) -> Answer:
    adapter = engine.adapters.find(AdapterKind.PROMPT, name) if name else None
    virtual = [] if adapter is None else list(adapter.virtual_ids)
    return ask(
        [*virtual, *prompt],
        **{"max_tokens": 16, "ignore_eos": True, **fields},
        prompt_adapter=adapter,
        lora=engine.adapters.find(AdapterKind.LORA, lora) if lora else None,
    )


def reference(folder: Path, files: dict[str, Path], name: str, lora: str, ids: list[int]) -> dict[str, torch.Tensor]:
    """Return transformers' tensors for these tokens after the adapter's embeddings, in float32."""
    net: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    if lora:
        merge(net, files[lora])
    found = {}
    net.get_submodule(TENSORS[-1]).register_forward_hook(lambda _, args, output: found.update({TENSORS[-1]: output[0]}))
    embeds = net.get_input_embeddings()(torch.tensor(ids))
    if name:
        embeds = torch.cat([load_file(files[name] / "adapter_model.safetensors")["prompt_embeddings"], embeds])
    with torch.no_grad():
        out = net(inputs_embeds=embeds[None], output_hidden_states=True)
    found |= {f"hidden_states.{layer}": states[0] for layer, states in enumerate(out.hidden_states)}
    return found | {"logits": out.logits[0]}


def test_answers_and_tensors_are_those_after_the_embeddings(
    engine: Engine, folder: Path, files: dict[str, Path]
) -> None:
    """With and without a LoRA adapter; greedy tokens are the best of the logits at each place."""
    prompt, cases = tokens(21, 5), [("p", ""), ("q", ""), ("", ""), ("p", "l"), ("", "l")]
    specs = engine.model.outputs
    wanted = tuple(WantedOutput(name, name, specs[name], context=True, answer=True) for name in TENSORS)
    answers = [asked(engine, name, prompt, lora, tensors=wanted) for name, lora in cases]
    answer_all(engine, answers)
    assert [use.in_use for use in engine.adapters.listed()] == [0, 0, 0]
    assert len({tuple(answer.tokens) for answer in answers}) >= 4
    for answer, (name, lora) in zip(answers, cases, strict=True):
        want = reference(folder, files, name, lora, [*prompt, *answer.tokens[:-1]])
        for tensor in TENSORS:
            parts = [each.data for event in answer.events for each in event.outputs if each.name == tensor]
            got = torch.from_numpy(np.concatenate(parts).view(np.float32))
            torch.testing.assert_close(got, want[tensor], rtol=1e-4, atol=3e-4)
        assert want["logits"][-16:].argmax(-1).tolist() == answer.tokens


@pytest.mark.parametrize(("quantization", "tolerance"), [("none", 3e-4), ("int8", 0.3)])
def test_a_model_that_scales_its_input_scales_the_embeddings_of_an_adapter(
    tmp_path: Path, quantization: str, tolerance: float
) -> None:
    """Granite, whose scale of 12 would be seen in every logit; natively with blocks of 8 bits."""
    granite = GraniteConfig(**tiny._SHAPE, embedding_multiplier=12.0, residual_multiplier=0.5)
    folder = tiny.save(granite, tmp_path / "model")
    files = {"p": save_prompt(tmp_path / "p", tokens=20, hidden=64, seed=1)}
    prompt, tensor = tokens(21, 5), "logits"
    settings = with_drafts(0, model=str(folder), adapters=(f"p={files['p']}",), quantization=quantization)
    model = load_model(settings)
    assert isinstance(model.fused.forward, FusedForward if quantization == "none" else NativeForward)
    wanted = (WantedOutput(tensor, tensor, model.outputs[tensor], context=True, answer=True),)
    with running(Engine(settings, model)) as engine:
        answer = asked(engine, "p", prompt, tensors=wanted)
        answer_all(engine, [answer])
    want = reference(folder, files, "p", "", [*prompt, *answer.tokens[:-1]])[tensor]
    parts = [each.data for event in answer.events for each in event.outputs if each.name == tensor]
    got = torch.from_numpy(np.concatenate(parts).view(np.float32))
    assert float(want.abs().max()) > 5.0
    torch.testing.assert_close(got, want, rtol=1e-4, atol=tolerance)


def test_pages_after_virtual_tokens_are_shared_only_by_their_adapter(engine: Engine) -> None:
    answers = [asked(engine, name, tokens(40, 1)) for name in ("p", "q", "p", "")]
    answer_each(engine, answers)
    assert [answer.telemetry.cached_tokens for answer in answers] == [0, 0, 48, 0]
    assert answers[0].tokens == answers[2].tokens


@pytest.mark.parametrize(("name", "lora"), [("p", ""), ("", "l"), ("p", "l")])
def test_log_probabilities_of_the_prompt_are_those_with_the_adapters(
    engine: Engine, folder: Path, files: dict[str, Path], name: str, lora: str
) -> None:
    prompt, virtual = tokens(25, 1), 20 if name else 0
    answer = asked(engine, name, prompt, lora, max_tokens=1, prompt_logprobs=1)
    answer_all(engine, [answer])
    scores = next(event.prompt_logprobs for event in answer.events if event.prompt_logprobs is not None)
    logprobs = reference(folder, files, name, lora, prompt)["logits"].log_softmax(-1)
    expected = logprobs[torch.arange(virtual, virtual + 24), torch.tensor(prompt[1:])]
    torch.testing.assert_close(torch.from_numpy(scores.logprob_N)[virtual:], expected, rtol=1e-4, atol=1e-4)


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
    problem = r"prompt_embeddings: has the shape \[2, 32\], and the model needs \[2, 64\]"
    with pytest.raises(AdapterNotSupported, match=problem):
        pool.check(PromptFiles(torch.zeros(2, 32)))


def test_embeddings_by_layer_take_no_prompt_adapter(saved: Callable[[str], Path]) -> None:
    model = load_model(config(model=str(saved("gemma4 small")), max_adapter_bytes=1 << 20))
    assert model.adapters is not None
    with pytest.raises(
        AdapterNotSupported, match="PROMPT_TUNING is not taken: gemma4_text also embeds tokens by layer"
    ):
        model.adapters.check(PromptFiles(torch.zeros(2, 64)))


def test_a_drafting_network_takes_no_prompt_adapter(folder: Path, draft_models: dict[str, str]) -> None:
    fields = {"drafter": "model", "draft_model": draft_models["same"], "max_adapter_bytes": 1 << 20}
    model = load_model(config(model=str(folder), **fields))
    assert model.adapters is not None
    with pytest.raises(AdapterNotSupported, match="PROMPT_TUNING is not taken: drafter=model reads the tokens"):
        model.adapters.check(PromptFiles(torch.zeros(2, 64)))
