"""Models with random weights, made on the device, for figures that depend on shapes and not on what is said.

    random:llama-8b    Llama 3.1 8B's shapes, 128256 tokens, bfloat16: 16 GB, so on a GPU only
    random:llama-tiny  the same family, small enough for a CPU

Invariant: the tokenizer has as many real tokens as the model has columns, so that a grammar's mask costs what it costs
there. Its text is the embedded model's, filled up with pairs of its tokens.

Not responsible for: measuring (see sections.py).
"""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from gpu_engine.api.config import EngineConfig
from gpu_engine.model import attention
from gpu_engine.model.embedded import ensure_embedded
from gpu_engine.model.loader import LoadedModel, load_kernels_eagerly, prepare, resolve_dtype

PREFIX = "random:"
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "llama-tiny": {
        "vocab_size": 49_152,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


def widened(tokenizer: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return a byte-level BPE `tokenizer.json` with tokens added up to `vocab_size`; no text is encoded differently.

    New tokens are a word-like token followed by another, as a larger vocabulary would have merged them.
    """
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    taken = {*vocab, *(token["content"] for token in tokenizer["added_tokens"])}
    number = 1 + max(*vocab.values(), *(token["id"] for token in tokenizer["added_tokens"]))
    words = [token for token in vocab if token.isalpha() and token.isascii() and len(token) > 2]
    starts = [token for token in vocab if token[:1] == "\u0120" and token[1:].isalpha() and token.isprintable()]
    for start, word in itertools.product(starts, words[::97]):
        if number >= vocab_size:
            break
        if start + word not in taken:
            vocab[start + word] = number
            taken.add(start + word)
            number += 1
    if number >= vocab_size:
        return tokenizer
    raise ValueError(f"vocab_size: {vocab_size} is more than pairs of tokens can fill")


def random_model(config: EngineConfig) -> LoadedModel:
    """Return the model that `config.model` names, with weights drawn on `config.device`."""
    name = config.model.removeprefix(PREFIX)
    shape, device = SHAPES[name], torch.device(config.device)
    if device.type == "cuda":
        load_kernels_eagerly()
    elif config.num_threads:
        torch.set_num_threads(config.num_threads)
    attention.register()
    dtype = resolve_dtype(config.dtype, device)
    text = LlamaConfig(
        **shape,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=False,
        dtype=dtype,
    )
    torch.manual_seed(0)
    with torch.device(device):
        previous = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            net: Any = LlamaForCausalLM._from_config(text, attn_implementation=attention.NAME)
        finally:
            torch.set_default_dtype(previous)
    return prepare(config, net, _tokenizer(shape["vocab_size"]))


def _tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    folder = ensure_embedded()
    source = json.loads((folder / "tokenizer.json").read_text())
    template = AutoTokenizer.from_pretrained(folder).chat_template
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "tokenizer.json"
        path.write_text(json.dumps(widened(source, vocab_size)))
        return PreTrainedTokenizerFast(tokenizer_file=str(path), chat_template=template)


def streamed_bytes(model: LoadedModel) -> int:
    """Return the bytes of weights that one decode step reads: everything but the table of embeddings, unless shared."""
    text: Any = model.net.config.get_text_config()
    count = model.num_parameters - (0 if text.tie_word_embeddings else model.vocab_size * int(text.hidden_size))
    return int(count * model.dtype.itemsize)
