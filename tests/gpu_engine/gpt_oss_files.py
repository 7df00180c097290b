"""Tiny models of gpt-oss as files: GGUF as llama.cpp's converter writes it, and folders whose experts are in MXFP4.

Not responsible for: comparing models (see model/test_gpt_oss_files.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.gpu_engine import tiny
from tests.gpu_engine.gguf_files import write_vocabulary

_Array = npt.NDArray[np.float32]
KEYS = {
    "attention.sliding_window": "sliding_window",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "expert_feed_forward_length": "intermediate_size",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
}
"""Keys of a header, and what they are in a configuration."""


def model(seed: int = 0, **options: Any) -> Any:
    """Return a model whose weights, biases and sinks all differ, and whose experts are numbers of MXFP4."""
    torch.manual_seed(seed)
    given = tiny.gpt_oss()
    net: Any = AutoModelForCausalLM.from_config(type(given)(**{**given.to_dict(), **options}), dtype=torch.float32)
    for name, weight in net.named_parameters():
        size = 1.0 if weight.dim() == 1 or name.endswith("bias") else 2 * net.config.hidden_size**-0.5
        weight.data = size * torch.randn_like(weight)
        if name.endswith(("gate_up_proj", "down_proj")):
            weight.data = packed_mxfp4(weight.data)[2]
    return net.eval()


def packed_mxfp4(weight_EKN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return blocks [E, N, K / 32, 16], scales [E, N, K / 32] and the dequantised weight of a matrix of gpt-oss."""
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([values, -values])
    E, K, N = weight_EKN.shape
    groups = weight_EKN.transpose(1, 2).reshape(E, N, K // 32, 32)
    exponents = torch.floor(torch.log2(groups.abs().amax(-1).clamp(min=1e-20))) - 2
    scaled = groups / torch.exp2(exponents)[..., None]
    codes = (scaled[..., None] - values).abs().argmin(-1)
    packed = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    plain = (values[codes] * torch.exp2(exponents)[..., None]).reshape(E, N, K).transpose(1, 2).contiguous()
    return packed, (exponents + 127).to(torch.uint8), plain


def write_gguf(
    net: Any,
    file: Path,
    kind: str = "F32",
    experts: str = "MXFP4",
    *,
    without: str = "",
    apart: Mapping[str, tuple[int, ...]] = {},
    pre: str = "",
) -> Path:
    """Write a model.

    `kind`: of the matrices but for the experts'; `without`: the name of a tensor that is left out; `apart`: tensors of
    zeros in place of the model's; `pre`: how the vocabulary splits a text.
    """
    config, kinds = net.config, gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(file, "gpt-oss")
    for key, name in KEYS.items():
        writer.add_uint32(f"gpt-oss.{key}", getattr(config, name))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] != "default":
        writer.add_string("gpt-oss.rope.scaling.type", rope["rope_type"])
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    write_vocabulary(writer, config.vocab_size)
    if pre:
        writer.add_tokenizer_pre(pre)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT_OSS, config.num_hidden_layers)
    for own, tensor in net.named_parameters():
        for name, values in _converted(names, own, tensor.detach().numpy()):
            values = np.zeros(apart[name], np.float32) if name in apart else values
            is_float = values.ndim == 1 or "ffn_gate_inp" in name or name.endswith("bias")
            of = kinds["F32" if is_float else experts if "_exps" in name else kind]
            if name != without:
                writer.add_tensor(name, gguf.quants.quantize(values, of), raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _converted(names: gguf.TensorNameMap, own: str, values: _Array) -> Iterator[tuple[str, _Array]]:
    """Yield the names and the values of a parameter in a file."""
    stem, _, end = own.rpartition(".")
    if end == "sinks":
        yield f"{names.get_name(own)}.weight", values
    elif end in ("weight", "bias"):
        yield f"{names.get_name(stem)}.{end}", values
    else:
        of = "bias" if end.endswith("_bias") else "weight"
        rows = values if of == "bias" else values.swapaxes(1, 2)
        parts = {"down_proj": rows}
        if end.startswith("gate_up"):
            parts = {"gate_proj": rows[:, 0::2], "up_proj": rows[:, 1::2]}
        for part, given in parts.items():
            yield f"{names.get_name(f'{stem}.{part}')}.{of}", np.ascontiguousarray(given)


def write_folders(net: Any, folder: Path) -> tuple[Path, Path]:
    """Write a model in Hugging Face's format; return the folder of floats, and the one with experts in MXFP4."""
    plain, packed = (tiny.save(net.config, folder / name) for name in ("plain", "packed"))
    tensors, stored = {name: tensor.detach() for name, tensor in net.named_parameters()}, {}
    assert tensors.keys() == load_file(plain / "model.safetensors").keys()
    for name, tensor in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            stored[f"{name}_blocks"], stored[f"{name}_scales"], same = packed_mxfp4(tensor)
            assert torch.equal(same, tensor)
        else:
            stored[name] = tensor
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (packed / "config.json").write_text(json.dumps(config))
    return plain, packed
