"""The trainer of the examples' adapters: what it writes is read, and is small."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_engine.model.adapters.peft_files import LoraFiles, PromptFiles, read_adapter
from tests.docs.pages import ROOT

MOST_BYTES = 2 << 20
SHIPPED = ROOT / "examples/executor/adapters"


@pytest.mark.parametrize(("name", "kind"), [("child", LoraFiles), ("who", PromptFiles)])
def test_the_shipped_adapters_are_small_and_read(name: str, kind: type) -> None:
    assert sum(path.stat().st_size for path in (SHIPPED / name).iterdir()) < MOST_BYTES
    assert isinstance(read_adapter(SHIPPED / name, MOST_BYTES), kind)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize(("kind", "files"), [("lora", LoraFiles), ("prompt", PromptFiles)])
@pytest.mark.filterwarnings("ignore")
def test_some_updates_lower_the_loss(kind: str, files: type, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from tools.train_adapter import train

    losses = train(kind, tmp_path, updates=4, rate=0.01)
    assert losses[-1] < losses[0]
    assert isinstance(read_adapter(tmp_path, MOST_BYTES), files)
