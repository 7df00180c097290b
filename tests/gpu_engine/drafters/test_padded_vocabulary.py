"""A draft model with the target's tokenizer and logits of another width drafts only real tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import LlamaConfig

from gpu_engine.core.engine import Engine
from gpu_engine.model.loader import LoadedModel
from tests.gpu_engine import tiny
from tests.gpu_engine.harness import answer_all, ask, executor_of, tokens, unguided_engine, with_drafts


def drafter_of(engine: Engine) -> object:
    drafter = executor_of(engine).runner.launcher._program.drafter  # type: ignore[attr-defined]
    while not hasattr(drafter, "net"):
        drafter = drafter.next_drafter
    return drafter


@contextmanager
def drafting(llama: LoadedModel, folder: Path) -> Iterator[Engine]:
    with unguided_engine(llama, with_drafts(3, draft_model=str(folder))) as engine:
        yield engine


@pytest.mark.parametrize("width", [280, 320])
def test_a_draft_model_may_pad_its_logits_otherwise(llama: LoadedModel, tmp_path: Path, width: int) -> None:
    assert llama.vocab_size == tiny.VOCAB == 300
    shape = {**tiny.FAMILIES["llama"]().to_dict(), "vocab_size": width}
    tiny.save(LlamaConfig(**shape), tmp_path)
    made = [lambda seed=seed: ask(tokens(12, seed), max_tokens=40, temperature=0.6, seed=seed) for seed in range(3)]
    with unguided_engine(llama, with_drafts(0)) as engine:
        expected = answer_all(engine, [make() for make in made])
    with drafting(llama, tmp_path) as engine:
        answers = [make() for make in made]
        assert answer_all(engine, answers) == expected
        d2t_V = drafter_of(engine).net.d2t_V  # type: ignore[attr-defined]
        assert engine.stats().draft_tokens > 30
    real = max(llama.tokenizer.get_vocab().values()) + 1
    assert d2t_V.tolist() == [0] * real, "padding columns are no drafts"
