"""The EAGLE3 head in the package fits the embedded model and stays below a size limit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gpu_engine.api.config import EngineConfig
from gpu_engine.drafters.build import SHIPPED_HEAD
from gpu_engine.drafters.eagle3_files import load_head

SMOLLM2_135M = SimpleNamespace(
    vocab_size=49152, hidden_size=576, num_hidden_layers=30, max_position_embeddings=8192, rope_theta=100000.0
)


def test_the_shipped_head_fits_the_embedded_model_and_16_mb() -> None:
    head = load_head(SHIPPED_HEAD, SMOLLM2_135M, torch.bfloat16)
    assert all(bool(tensor.isfinite().all()) for tensor in head.state_dict().values() if tensor.is_floating_point())
    assert sum(path.stat().st_size for path in SHIPPED_HEAD.iterdir()) <= 16_000_000
    assert (SHIPPED_HEAD / "README.md").is_file()


def test_only_the_embedded_model_has_a_shipped_head() -> None:
    assert EngineConfig(drafter="eagle3").drafts_with_shipped_head
    assert not EngineConfig(drafter="eagle3", draft_model="/heads/mine").drafts_with_shipped_head
    with pytest.raises(ValueError, match="draft_model: drafter=eagle3 needs one; only the embedded model comes with"):
        EngineConfig(drafter="eagle3", model="/models/other")
    with pytest.raises(ValueError, match="draft_model: drafter=model needs one"):
        EngineConfig(drafter="model")
    with pytest.raises(ValueError, match="draft_model: is for drafter=model and drafter=eagle3 alone"):
        EngineConfig(draft_model="/heads/mine")
