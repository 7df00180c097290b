"""Two ways to load a model: transformers' own loader, and the assertion that both ways gave one model."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from gpu_engine.api.config import EngineConfig
from gpu_engine.model import attention
from gpu_engine.model.loader import LoadedModel, prepare, resolve_dtype
from tests.gpu_engine.model.model_logits import logits, some_ids


def by_transformers(settings: EngineConfig) -> LoadedModel:
    """Return the model through transformers' loader, which holds every tensor in full."""
    path = Path(settings.model)
    source = {"gguf_file": path.name} if path.is_file() else {}
    folder = path.parent if source else path
    attention.register()
    options = {"dtype": resolve_dtype(settings.dtype, torch.device("cpu")), "attn_implementation": attention.NAME}
    net = AutoModelForCausalLM.from_pretrained(folder, **options, **source)
    return prepare(settings, net, AutoTokenizer.from_pretrained(folder, **source), path if source else None)


def assert_same_tokenizer(got: PreTrainedTokenizerFast, want: PreTrainedTokenizerFast) -> None:
    assert type(got) is type(want)
    assert got.backend_tokenizer.to_str() == want.backend_tokenizer.to_str()
    assert (got.special_tokens_map, got.chat_template) == (want.special_tokens_map, want.chat_template)


def assert_same(got: LoadedModel, want: LoadedModel) -> None:
    assert (got.quantised, got.forms, got.num_parameters) == (want.quantised, want.forms, want.num_parameters)
    assert (got.vocab_size, got.eos_token_ids, got.model_type) == (want.vocab_size, want.eos_token_ids, want.model_type)
    assert (got.dtype, repr(got.fused)) == (want.dtype, repr(want.fused))
    assert_same_tokenizer(got.tokenizer, want.tokenizer)
    buffers = [dict(model.net.named_buffers()) for model in (got, want)]
    assert buffers[0].keys() == buffers[1].keys()
    for name, buffer in buffers[1].items():
        assert torch.equal(buffers[0][name], buffer), name
    ids_BP = some_ids(2, 40)  # longer than a window
    assert torch.equal(logits(got, ids_BP), logits(want, ids_BP))
