"""Tensors of sequences with adapters: those of the merged model, and of the embeddings before the prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gpu_engine.api.adapters import AdapterKind
from gpu_engine.api.output_tensors import WantedOutput
from gpu_engine.core.engine import Engine
from gpu_engine.model.loader import load_model
from tests.gpu_engine import tiny
from tests.gpu_engine.adapters.files import merge, save_lora, save_prompt
from tests.gpu_engine.harness import Answer, answer_all, ask, running, tokens, with_drafts

NAMES = ("logits", "hidden_states.1", "hidden_states.2", "model.layers.1.mlp")


def reference(folder: Path, lora: Path | None, prompt: Path | None, ids: list[int]) -> dict[str, torch.Tensor]:
    """Return what transformers has in float32 for these tokens, after the embeddings of a prompt adapter."""
    net: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    if lora is not None:
        merge(net, lora)
    found = {}
    net.get_submodule(NAMES[-1]).register_forward_hook(lambda _, args, output: found.update({NAMES[-1]: output[0]}))
    embeds = net.get_input_embeddings()(torch.tensor(ids))
    if prompt is not None:
        embeds = torch.cat([load_file(prompt / "adapter_model.safetensors")["prompt_embeddings"], embeds])
    with torch.no_grad():
        out = net(inputs_embeds=embeds[None], output_hidden_states=True)
    found |= {f"hidden_states.{layer}": states[0] for layer, states in enumerate(out.hidden_states)}
    return found | {"logits": out.logits[0]}


@pytest.mark.parametrize("drafts", [0, 7])
def test_tensors_are_those_of_each_sequences_own_adapters(tmp_path: Path, drafts: int) -> None:
    folder = tiny.save(tiny.FAMILIES["llama"](), tmp_path / "model")
    files = {"l": save_lora(folder, tmp_path / "l", seed=3), "p": save_prompt(tmp_path / "p", tokens=20, hidden=64)}
    named = tuple(f"{name}={path}" for name, path in files.items())
    settings = with_drafts(drafts, model=str(folder), adapters=named)
    model = load_model(settings)
    asked: list[tuple[Answer, bool, bool]] = []
    with running(Engine(settings, model)) as engine:
        for lora, prompt in ((False, False), (True, False), (False, True), (True, True)):
            adapter = engine.adapters.find(AdapterKind.PROMPT, "p") if prompt else None
            virtual = [] if adapter is None else list(adapter.virtual_ids)
            answer = ask([*virtual, *tokens(40, 5)], max_tokens=20, ignore_eos=True)
            answer.change(prompt_adapter=adapter)
            answer.change(lora=engine.adapters.find(AdapterKind.LORA, "l") if lora else None)
            answer.change(
                tensors=tuple(
                    WantedOutput(name, name, model.outputs[name], context=True, answer=True) for name in NAMES
                )
            )
            asked.append((answer, lora, prompt))
        answer_all(engine, [answer for answer, _, _ in asked])
    for answer, lora, prompt in asked:
        ids = [*tokens(40, 5), *answer.tokens[:-1]]
        want = reference(folder, files["l"] if lora else None, files["p"] if prompt else None, ids)
        for name in NAMES:
            parts = [each for event in answer.events for each in event.outputs if each.name == name]
            got = np.concatenate([part.data for part in parts]).view(np.float32)
            torch.testing.assert_close(torch.from_numpy(got), want[name], rtol=1e-4, atol=3e-4)
