"""A draft model with the target's tokenizer and logits of another width drafts only real tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig

from gpu_engine.model.loader import LoadedModel
from tests.gpu_engine import tiny
from tests.gpu_engine.harness import answer_all, ask, config, tokens, unguided_engine


@pytest.mark.parametrize("width", [280, 320])
@pytest.mark.parametrize("drafter", ["model", "decoupled"])
def test_a_draft_model_may_pad_its_logits_otherwise(
    llama: LoadedModel, tmp_path: Path, width: int, drafter: str
) -> None:
    assert llama.vocab_size == tiny.VOCAB == 300
    tiny.save(LlamaConfig(**{**tiny.FAMILIES["llama"]().to_dict(), "vocab_size": width}), tmp_path)
    found = []
    for fields in ({"drafter": "none"}, {"drafter": drafter, "draft_model": str(tmp_path)}):
        with unguided_engine(llama, config(num_draft_tokens=3, **fields)) as engine:
            answers = [ask(tokens(12, seed), max_tokens=40, temperature=0.6, seed=seed) for seed in range(3)]
            found.append(answer_all(engine, answers))
            drafts = engine.stats().draft_tokens
    assert found[0] == found[1]
    assert drafts > 30
