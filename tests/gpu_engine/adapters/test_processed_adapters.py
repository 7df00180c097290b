"""Logits processors of sequences with adapters: the tokens depend on neither drafts nor company."""

from __future__ import annotations

import itertools
from pathlib import Path

from gpu_engine.api.adapters import AdapterKind
from gpu_engine.core.engine import Engine
from gpu_engine.model.loader import load_model
from tests.gpu_engine import tiny
from tests.gpu_engine.adapters.files import save_lora, save_prompt
from tests.gpu_engine.harness import Answer, answer_all, answer_each, ask, running, tokens, with_drafts
from tests.gpu_engine.processor_cases import SETTING, processed

USES: list[tuple[tuple[str, str], ...]] = [
    (),
    (("waves", '{"strength": 9.0}'),),
    (("batch", '{"strength": 9.0}'),),
    (("captured", '{"strength": 9.0}'), ("waves", "")),
]


def made(engine: Engine) -> list[Answer]:
    """Return an answer of each adapter, both and none, with each kind of processor."""
    answers = []
    for lora, prompt, uses in itertools.product((False, True), (False, True), USES):
        adapter = engine.adapters.find(AdapterKind.PROMPT, "p") if prompt else None
        virtual = [] if adapter is None else list(adapter.virtual_ids)
        answer = ask([*virtual, *tokens(24, 5, repeat=8)], max_tokens=20, ignore_eos=True)
        answer.change(prompt_adapter=adapter)
        answer.change(lora=engine.adapters.find(AdapterKind.LORA, "l") if lora else None)
        answers.append(processed(engine.processors, answer, *uses))
    return answers


def test_processed_tokens_of_adapters_do_not_depend_on_drafts(tmp_path: Path) -> None:
    folder = tiny.save(tiny.FAMILIES["llama"](), tmp_path / "model", rounds=True)
    files = {"l": save_lora(folder, tmp_path / "l", seed=3), "p": save_prompt(tmp_path / "p", tokens=20, hidden=64)}
    fields = {"model": str(folder), "adapters": tuple(f"{name}={path}" for name, path in files.items())}
    model = load_model(with_drafts(0, **fields))
    with running(Engine(with_drafts(0, logits_processors=SETTING, **fields), model)) as engine:
        expected = answer_each(engine, made(engine))
    for first in range(0, len(expected), len(USES)):
        plain, *changed = expected[first : first + len(USES)]
        assert plain not in changed, "each processor changes the tokens of each adapter"
    assert len({tuple(ids) for ids in expected[:: len(USES)]}) == 4, "and so does each adapter"
    for drafts in (3, 7):
        with running(Engine(with_drafts(drafts, logits_processors=SETTING, **fields), model)) as engine:
            assert answer_all(engine, made(engine)) == expected
