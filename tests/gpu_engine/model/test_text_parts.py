"""Language models in checkpoints that also take images: only that part is read, and has the logits of the whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from gpu_engine.model.loader import load_model
from gpu_engine.model.recording import distance
from tests.fakes import byte_tokenizer
from tests.gpu_engine.harness import config
from tests.gpu_engine.model.model_logits import logits, some_ids

TEXT: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
GEMMA_4: dict[str, Any] = {**TEXT, "global_head_dim": 32, "sliding_window": 24, "final_logit_softcapping": 30.0}
SEEN: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_SEEN = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
ROPE = {"rope_type": "default", "rope_theta": 5e6}
WHOLE: dict[str, Callable[[], tuple[Any, PreTrainedConfig]]] = {
    "gemma3": lambda: (
        Gemma3ForConditionalGeneration,
        Gemma3Config(
            text_config={**TEXT, "sliding_window": 24},
            vision_config={**SEEN, "image_size": 28, "patch_size": 14},
            mm_tokens_per_image=4,
        ),
    ),
    "gemma4": lambda: (
        Gemma4ForConditionalGeneration,
        Gemma4Config(
            text_config={
                **GEMMA_4,
                "num_hidden_layers": 4,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "num_kv_shared_layers": 2,
                "hidden_size_per_layer_input": 32,
                "vocab_size_per_layer_input": 300,
            },
            vision_config={**SEEN, "num_key_value_heads": 2, "head_dim": 16},
            audio_config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 32},
        ),
    ),
    "gemma4 moe": lambda: (
        Gemma4ForConditionalGeneration,
        Gemma4Config(
            text_config={
                **GEMMA_4,
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 1,
                "hidden_size_per_layer_input": 0,
                "enable_moe_block": True,
                "num_experts": 4,
                "top_k_experts": 2,
                "moe_intermediate_size": 32,
            },
            vision_config={**SEEN, "num_key_value_heads": 2, "head_dim": 16},
            audio_config=None,
        ),
    ),
    "gemma4_unified": lambda: (
        Gemma4UnifiedForConditionalGeneration,
        Gemma4UnifiedConfig(
            text_config=GEMMA_4,
            vision_config={"mm_embed_dim": 32, "mm_posemb_size": 32, "output_proj_dims": 32},
            audio_config={"audio_embed_dim": 32},
        ),
    ),
    "mistral3": lambda: (
        Mistral3ForConditionalGeneration,
        Mistral3Config(
            text_config={**TEXT, "model_type": "mistral", "sliding_window": None},
            vision_config={**SEEN, "model_type": "pixtral", "image_size": 28, "patch_size": 14, "head_dim": 16},
        ),
    ),
    "qwen3_vl": lambda: (
        Qwen3VLForConditionalGeneration,
        Qwen3VLConfig(
            text_config={**TEXT, "rope_parameters": {**ROPE, "mrope_section": [4, 2, 2]}},
            vision_config={**QWEN_SEEN, "deepstack_visual_indexes": [0]},
        ),
    ),
    "qwen3_5": lambda: (
        Qwen3_5ForConditionalGeneration,
        Qwen3_5Config(
            text_config={
                **TEXT,
                "layer_types": ["linear_attention", "full_attention"],
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 16,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
            },
            vision_config=QWEN_SEEN,
            tie_word_embeddings=True,
        ),
    ),
}


@pytest.mark.parametrize("family", WHOLE)
def test_the_language_model_is_read_from_the_files_of_the_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str
) -> None:
    kind, shape = WHOLE[family]()
    torch.manual_seed(0)
    net = kind(shape).eval()
    with torch.no_grad():
        for weight in net.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 2.0 / weight.shape[-1] ** 0.5)
        for name, buffer in net.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    net.save_pretrained(tmp_path)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token="<|end|>", bos_token="<|start|>")
    tokenizer.save_pretrained(tmp_path)
    with caplog.at_level("INFO"):
        model = load_model(config(model=str(tmp_path), dtype="float32"))
    assert any("takes no images or audio here" in line for line in caplog.messages)
    assert not any("through transformers" in line for line in caplog.messages)
    ids_BP = some_ids(1, 40)
    with torch.inference_mode():
        want = net(input_ids=ids_BP).logits[0]
    assert distance(logits(model, ids_BP)[0], want) < 1e-4
