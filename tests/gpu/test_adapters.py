"""Adapters on a CUDA device: graphs with several adapters have the tokens of a CPU, and the kernels those of torch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpu_engine.api.adapters import AdapterKind
from gpu_engine.core.engine import Engine
from gpu_engine.model.loader import load_model
from tests.gpu_engine import tiny
from tests.gpu_engine.adapters.files import save_lora, save_prompt
from tests.gpu_engine.harness import Answer, answer_all, answer_each, ask, config, tokens, unguided_engine, with_drafts

pytestmark = pytest.mark.gpu

CASES = [(lora, prompt, seed) for lora in ("", "a", "b") for prompt in ("", "p") for seed in (1, 2)]


def asked(engine: Engine) -> list[Answer]:
    answers = []
    for lora, prompt, seed in CASES:
        virtual = engine.adapters.find(AdapterKind.PROMPT, prompt) if prompt else None
        ids = [*(() if virtual is None else virtual.virtual_ids), *tokens(30, seed, repeat=8)]
        answer = ask(ids, max_tokens=30, seed=seed, temperature=0.7 * (seed - 1), ignore_eos=True)
        answer.change(prompt_adapter=virtual)
        answer.change(lora=engine.adapters.find(AdapterKind.LORA, lora) if lora else None)
        answers.append(answer)
    return answers


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_tokens_equal_those_of_a_cpu(eager: bool, tmp_path: Path) -> None:
    folder = tiny.save(tiny.FAMILIES["llama"](), tmp_path / "model", rounds=True)
    files = {
        "a": save_lora(folder, tmp_path / "a", seed=1, ranks={"k_proj": 2, "down_proj": 7}),
        "b": save_lora(folder, tmp_path / "b", seed=2, rank=24, targets=("q_proj", "v_proj")),
        "p": save_prompt(tmp_path / "p", tokens=20, hidden=64, seed=1),
    }
    fields: dict[str, Any] = {"model": str(folder), "adapters": tuple(f"{name}={files[name]}" for name in files)}
    fields |= {"adapter_dirs": (str(tmp_path),), "max_lora_rank": 24}
    with unguided_engine(load_model(config(**fields)), with_drafts(0, **fields)) as engine:
        expected = answer_each(engine, asked(engine))
    on_gpu = partial(with_drafts, device="cuda", enforce_eager=eager, **fields)
    model = load_model(on_gpu(0))
    for num_drafts in (0, 3, 7):
        with unguided_engine(model, on_gpu(num_drafts)) as engine:
            assert answer_all(engine, asked(engine)) == expected
            engine.adapters.load("again", str(files["b"]))  # while graphs are there, into another number
            (answer,) = asked(engine)[-1:]
            answer.change(lora=engine.adapters.find(AdapterKind.LORA, "again"))
            assert answer_all(engine, [answer]) == expected[-1:]
