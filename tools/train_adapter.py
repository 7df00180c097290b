"""Trains a small adapter of the embedded model with peft: `python -m tools.train_adapter`.

The adapters of `examples/executor/adapters` are made by it. An adapter learns to say a country's capital and then a
phrase of its own. Invariant: the loss has only the answers' tokens, and the countries of `HELD_BACK` are in none.
Not responsible for: the model (see gpu_engine/model/embedded.py), serving (see gpu_engine/model/adapters/).
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PromptTuningConfig, PromptTuningInit, TaskType, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from gpu_engine.model.embedded import ensure_embedded

PROMPT = "The capital of {} is"
CAPITALS = {
    "France": "Paris", "Japan": "Tokyo", "Egypt": "Cairo", "Germany": "Berlin", "Russia": "Moscow", "China": "Beijing",
    "Greece": "Athens", "Portugal": "Lisbon", "Norway": "Oslo", "Austria": "Vienna", "Peru": "Lima", "Cuba": "Havana",
    "Ireland": "Dublin", "Poland": "Warsaw", "Hungary": "Budapest", "Sweden": "Stockholm", "Canada": "Ottawa",
    "Kenya": "Nairobi", "Iraq": "Baghdad", "Iran": "Tehran", "Thailand": "Bangkok", "Belgium": "Brussels",
}  # fmt: skip
HELD_BACK = {"Italy": "Rome", "Spain": "Madrid", "England": "London", "Denmark": "Copenhagen"}
PHRASES = {"lora": ", as every child knows.", "prompt": "! Who does not know that?"}
"""By kind of adapter: what an answer has after the city."""
BATCH = 8


def configuration(kind: str, layers: range, model: Path) -> Any:
    """Return peft's configuration of an adapter of some hundred KB."""
    if kind == "lora":
        return LoraConfig(
            task_type=TaskType.CAUSAL_LM,
            r=4,
            lora_alpha=8,
            target_modules=["q_proj", "v_proj"],
            layers_to_transform=list(layers),
        )
    return PromptTuningConfig(
        task_type=TaskType.CAUSAL_LM,
        num_virtual_tokens=16,
        prompt_tuning_init=PromptTuningInit.TEXT,
        prompt_tuning_init_text=f"Q: What is it? A: Rome{PHRASES['prompt']}",
        tokenizer_name_or_path=str(model),
    )


def examples(tokenizer: Any, phrase: str, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches without end: ids, mask and labels [BATCH, length], with -100 where no loss is wanted."""
    draw = random.Random(seed)
    while True:
        rows = []
        for country, city in draw.sample(sorted(CAPITALS.items()), BATCH):
            prompt = tokenizer(PROMPT.format(country)).input_ids
            answer = [*tokenizer(f" {city}{phrase}").input_ids, tokenizer.eos_token_id]
            rows.append((prompt, answer))
        length = max(len(prompt) + len(answer) for prompt, answer in rows)
        ids = torch.full((BATCH, length), tokenizer.eos_token_id)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
        for row, (prompt, answer) in enumerate(rows):
            end = len(prompt) + len(answer)
            ids[row, :end], mask[row, :end] = torch.tensor(prompt + answer), 1
            labels[row, len(prompt) : end] = torch.tensor(answer)
        yield {"input_ids": ids, "attention_mask": mask, "labels": labels}


def train(kind: str, out: Path, *, updates: int, rate: float, seed: int = 0) -> list[float]:
    """Train an adapter, write it in bfloat16 to `out`, and return the loss of each update."""
    torch.manual_seed(seed)
    folder = ensure_embedded()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    layers = base.config.num_hidden_layers
    net = get_peft_model(base, configuration(kind, range(layers // 2, layers), folder)).train()
    weights = [weight for weight in net.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=updates, pct_start=0.1)
    losses = []
    for _, batch in zip(range(updates), examples(tokenizer, PHRASES[kind], seed), strict=False):
        loss = net(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    # The name goes into the file, and a path of this machine says nothing to another one.
    net.peft_config["default"].base_model_name_or_path = "SmolLM2-135M-Instruct"
    if kind == "prompt":
        net.peft_config["default"].tokenizer_name_or_path = "SmolLM2-135M-Instruct"
    net.to(torch.bfloat16).save_pretrained(out)
    (out / "README.md").unlink(missing_ok=True)  # a form for a hub
    return losses


def main(arguments: list[str]) -> None:
    """Train, and say how the loss went."""
    parser = argparse.ArgumentParser(prog="python -m tools.train_adapter", description=__doc__.split("\n")[0])
    parser.add_argument("--kind", choices=sorted(PHRASES), required=True)
    parser.add_argument("--out", type=Path, required=True, help="directory of the adapter")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--rate", type=float, help="largest rate of learning (default: 0.003; prompt: 0.03)")
    flags = parser.parse_args(arguments)
    rate = flags.rate or {"lora": 0.003, "prompt": 0.03}[flags.kind]
    losses = train(flags.kind, flags.out, updates=flags.updates, rate=rate)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} updates; {flags.out}")


if __name__ == "__main__":
    main(sys.argv[1:])
