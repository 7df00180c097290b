"""Adapters that the package peft made, saved and merged: the engine's tokens are those of peft's models in float32.

Not responsible for: the same without peft, from a few lines of torch (see files.py, test_lora.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from gpu_engine.api.adapters import AdapterKind
from gpu_engine.core.engine import Engine
from gpu_engine.model.adapters.peft_files import AdapterNotSupported, LoraFiles, read_adapter
from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.loader import load_model
from kernels.blocks import can_multiply_blocks
from tests.gpu_engine.harness import answer_all, ask, config, running, tokens, with_drafts

# peft warns of what transformers deprecates, and of adapters that are refused here.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

Saved = Callable[[str], Path]
ALL = "all-linear"


@pytest.fixture(scope="module")
def peft() -> ModuleType:
    """Return the package; importing it takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: ModuleType = pytest.importorskip("peft")
    return found


def made(peft: ModuleType, model: Path, out: Path, **fields: Any) -> Any:
    """Return peft's model with random matrices of LoRA in float32, and save the adapter."""
    torch.manual_seed(7)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    defaults = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6, "init_lora_weights": False, "target_modules": ALL}
    net = peft.get_peft_model(base, peft.LoraConfig(**{**defaults, **fields}))
    net.save_pretrained(out)
    return net.eval()


def greedy(net: Any, prompt: list[int], count: int) -> list[int]:
    """Return the model's next tokens. An end of text ends nothing."""
    net.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    out = net.generate(input_ids=ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer


def served(model: Path, files: dict[str, Path], prompts: list[list[int]], kind: AdapterKind) -> list[list[int]]:
    """Return the engine's tokens: a request for each adapter and prompt, all in one batch, with drafts."""
    configured = with_drafts(3, model=str(model), adapters=tuple(f"{name}={path}" for name, path in files.items()))
    with running(Engine(configured, load_model(configured))) as engine:
        answers = []
        for name in files:
            adapter = engine.adapters.find(kind, name)
            for prompt in prompts:
                virtual = list(adapter.virtual_ids) if kind is AdapterKind.PROMPT else []
                answer = ask([*virtual, *prompt], max_tokens=16, ignore_eos=True)
                if kind is AdapterKind.PROMPT:
                    answer.change(prompt_adapter=adapter)
                else:
                    answer.change(lora=adapter)
                answers.append(answer)
        return answer_all(engine, answers)


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "gpt2", "gpt_neox"])
def test_tokens_are_those_of_pefts_merged_models(family: str, peft: ModuleType, saved: Saved, tmp_path: Path) -> None:
    """Joined products of ours (llama, qwen2) and of the checkpoint (phi3), transposed weights (gpt2)."""
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "root": {"use_rslora": True, "r": 8},
        "patterns": {
            "rank_pattern": {r".*\.0\..*": 2, "down_proj": 3, "c_fc": 3},
            "alpha_pattern": {r".*\.1\..*": 9},
        },
    }
    nets = {name: made(peft, saved(family), tmp_path / name, **fields) for name, fields in options.items()}
    merged = {name: net.merge_and_unload() for name, net in nets.items()}
    prompts = [tokens(20, seed) for seed in (1, 2)]
    want = [greedy(merged[name], prompt, 16) for name in options for prompt in prompts]
    files = {name: tmp_path / name for name in options}
    assert served(saved(family), files, prompts, AdapterKind.LORA) == want
    assert len({tuple(answer) for answer in want}) == len(want)


@pytest.mark.skipif(not can_multiply_blocks(), reason="products over blocks need AVX2")
def test_a_quantised_model_with_an_adapter_is_as_near_to_the_merged_model_as_without(
    peft: ModuleType, saved: Saved, tmp_path: Path
) -> None:
    net = made(peft, saved("llama"), tmp_path)
    ids = torch.tensor([tokens(24, 1)])
    with torch.no_grad():
        with net.disable_adapter():
            plain = net(input_ids=ids).logits[0]
        adapted = net.merge_and_unload()(input_ids=ids).logits[0]
    model = load_model(config(model=str(saved("llama")), quantization="int8", max_adapter_bytes=1 << 20))
    files = read_adapter(tmp_path, 1 << 20)
    assert isinstance(files, LoraFiles)
    assert model.adapters is not None
    model.adapters.put(1, files)

    def logits(number: int) -> torch.Tensor:
        table, at = torch.arange(2, dtype=torch.int32)[None], torch.arange(24, dtype=torch.int32)[None]
        ctx = AttentionContext(model.allocate_pages(2, 16), table, at)
        ctx.adapters_B = torch.tensor([number], dtype=torch.int32)
        with torch.inference_mode():
            return model.logits(ids, ctx).view(24, -1).float().clone()

    def error(got: torch.Tensor, want: torch.Tensor) -> float:
        return float((got - want).norm() / want.norm())

    rounding = error(logits(0), plain)
    assert rounding < 0.1
    assert error(logits(1), adapted) < 2 * rounding
    assert error(plain, adapted) > 5 * rounding


def test_tokens_are_those_behind_pefts_virtual_tokens(peft: ModuleType, saved: Saved, tmp_path: Path) -> None:
    prompts = [tokens(20, seed) for seed in (1, 2)]
    want, files = [], {}
    for number, count in enumerate((5, 19)):
        torch.manual_seed(number)
        base = AutoModelForCausalLM.from_pretrained(saved("llama"), dtype=torch.float32, attn_implementation="eager")
        net = peft.get_peft_model(base, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=count)).eval()
        files[f"p{number}"] = tmp_path / f"p{number}"
        net.save_pretrained(files[f"p{number}"])
        for prompt in prompts:
            ids = list(prompt)
            for _ in range(16):
                with torch.no_grad():
                    ids.append(int(net(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
            want.append(ids[len(prompt) :])
    assert served(saved("llama"), files, prompts, AdapterKind.PROMPT) == want


def test_what_peft_computes_otherwise_is_refused_by_name(peft: ModuleType, saved: Saved, tmp_path: Path) -> None:
    """The configurations are peft's own; test_peft_files.py has every refusal."""
    for fields, message in (
        ({"use_dora": True}, "use_dora: DoRA is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: "),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: 'pissa' changes the model's own weights"),
        ({"target_modules": ["embed_tokens"]}, "embeddings and the output head are not adapted"),
    ):
        made(peft, saved("llama"), tmp_path, **{"target_modules": ["q_proj", "v_proj"], **fields})
        with pytest.raises(AdapterNotSupported, match=message):
            read_adapter(tmp_path, 1 << 24)
