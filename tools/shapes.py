"""Models with random weights in the shapes that people run, for measuring how they load: python -m tools.shapes.

The tokenizer is the embedded model's. Tensors are written one after another, so a model of any size takes the memory
of one. Their rows come from a pool that is drawn and quantised once, in another order for each tensor: drawing every
weight would take minutes. Not responsible for: weights that say anything.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import (
    GGML_QUANT_SIZES,
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
    LlamaFileType,
    RopeScalingType,
    TokenType,
)
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file

from gpu_engine.model.embedded import ensure_embedded, weights_file

KINDS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "bf16", "f16")
"""Kinds that the gguf package can quantise: their rows are drawn as numbers."""
SCALED = {
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
    "iq4_nl": (0,),
    "iq4_xs": (0,),
    "iq2_xxs": (0,),
    "iq2_xs": (0,),
    "iq2_s": (0,),
    "iq3_xxs": (0,),
    "iq3_s": (0,),
}
"""Other kinds -> offsets in a block of the half-precision numbers that scale it; an offset of the weights is the last.
Their rows are drawn as bytes."""
MIXED = {"q4_k_m": ("q4_k", "q6_k"), "q5_k_m": ("q5_k", "q6_k")}
"""File -> the kind of most matrices, and the kind of the head and of some layers' values and outputs of the MLP."""
SAFETENSORS = "safetensors"
"""bfloat16 in Hugging Face's format, in several files."""
ALL_KINDS = (*KINDS, *SCALED, *MIXED, SAFETENSORS)
_POOL_ROWS = 512
_SHARD = 1 << 30


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama; with experts, a mixture of Qwen 3's family; with a window, gpt-oss."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int = 49_152
    """More than the tokenizer's tokens: the others are padding."""
    experts: int = 0
    """A layer has so many, with `inner` channels each; 0: it has a gated block."""
    chosen: int = 0
    """Experts of a token."""
    window: int = 0
    """Tokens that every other layer sees, in gpt-oss; 0: it is another model."""

    @property
    def architecture(self) -> str:
        """Its name in a GGUF file."""
        return _GPT_OSS if self.window else "qwen3moe" if self.experts else "llama"


_GPT_OSS = "gpt-oss"
SHAPES = {
    "0.6b": Shape(1024, 28, 16, 8, 128, 3072),
    "1b": Shape(2048, 16, 32, 8, 64, 8192),
    "4b": Shape(2560, 36, 32, 8, 128, 9728),
    "8b": Shape(4096, 32, 32, 8, 128, 14336, 128_256),
    "4b-a0.8b": Shape(2048, 12, 32, 4, 128, 768, experts=64, chosen=8),
    "20b-a3.6b": Shape(2880, 24, 64, 8, 64, 2880, 201_088, experts=32, chosen=4, window=128),
    "30b-a3b": Shape(2048, 48, 32, 4, 128, 768, 151_936, experts=128, chosen=8),
}


_ROUTER = "ffn_gate_inp"
"""Its weights are float32 in every GGUF file."""
_EXPERTS, _OF_EXPERTS = "_exps.weight", "mxfp4"
"""The end of the names of experts' matrices, and their kind in a file of gpt-oss, of whatever kind the others are."""


def tensors_of(shape: Shape) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield the name in a GGUF file, the name in Hugging Face's format and the shape of every tensor.

    A tensor of three dimensions is one for each expert in Hugging Face's format, whose name has "{}" for the number. Of
    gpt-oss it has other tensors, and names are those of GGUF files.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    H, inner = shape.hidden, shape.inner
    yield "token_embd.weight", "model.embed_tokens.weight", (shape.vocabulary, H)
    for at in range(shape.layers):
        gguf, own = f"blk.{at}", f"model.layers.{at}"
        yield f"{gguf}.attn_norm.weight", f"{own}.input_layernorm.weight", (H,)
        yield f"{gguf}.attn_q.weight", f"{own}.self_attn.q_proj.weight", (queries, H)
        yield f"{gguf}.attn_k.weight", f"{own}.self_attn.k_proj.weight", (keys, H)
        yield f"{gguf}.attn_v.weight", f"{own}.self_attn.v_proj.weight", (keys, H)
        yield f"{gguf}.attn_output.weight", f"{own}.self_attn.o_proj.weight", (H, queries)
        parts = (("gate", (inner, H)), ("up", (inner, H)), ("down", (H, inner)))
        if shape.window:
            vectors = {"attn_q": queries, "attn_k": keys, "attn_v": keys, "attn_output": H, _ROUTER: shape.experts}
            named: list[tuple[str, tuple[int, ...]]] = [(f"{name}.bias", (size,)) for name, size in vectors.items()]
            named += [("attn_sinks.weight", (shape.heads,)), ("post_attention_norm.weight", (H,))]
            named += [(f"ffn_{part}_exps.bias", (shape.experts, dims[0])) for part, dims in parts]
            yield from ((f"{gguf}.{name}", "", dims) for name, dims in named)
        else:
            yield f"{gguf}.ffn_norm.weight", f"{own}.post_attention_layernorm.weight", (H,)
        if not shape.experts:
            yield from ((f"{gguf}.ffn_{part}.weight", f"{own}.mlp.{part}_proj.weight", dims) for part, dims in parts)
            continue
        if not shape.window:
            for part in "qk":
                yield f"{gguf}.attn_{part}_norm.weight", f"{own}.self_attn.{part}_norm.weight", (shape.head_dim,)
        yield f"{gguf}.{_ROUTER}.weight", f"{own}.mlp.gate.weight", (shape.experts, H)
        for part, dims in parts:
            stacked = shape.experts, *dims
            yield f"{gguf}.ffn_{part}{_EXPERTS}", f"{own}.mlp.experts.{{}}.{part}_proj.weight", stacked
    yield "output_norm.weight", "model.norm.weight", (H,)
    yield "output.weight", "lm_head.weight", (shape.vocabulary, H)


class Pool:
    """Rows of random weights, whose standard deviation is the one of a layer that keeps its input's size."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._rows: dict[tuple[str, int], npt.NDArray[np.uint8]] = {}

    def matrix(self, kind: str, shape: tuple[int, int]) -> npt.NDArray[np.uint8]:
        """Return the bytes of a matrix of a kind, [N, bytes of a row]."""
        N, K = shape
        if (kind, K) not in self._rows:
            self._rows[kind, K] = self._drawn(kind, K)
        rows: npt.NDArray[np.uint8] = self._rows[kind, K][self._rng.integers(0, _POOL_ROWS, N)]
        return rows

    def vector(self, name: str, size: int) -> npt.NDArray[np.float32]:
        """Return the numbers of a vector: ones for the weights of a norm."""
        drawn: npt.NDArray[np.float32] = self.matrix("f32", (1, size)).view(np.float32)[0]
        return np.ones_like(drawn) if "norm" in name else drawn

    def _drawn(self, kind: str, K: int) -> npt.NDArray[np.uint8]:
        of = GGMLQuantizationType[kind.upper()]
        if kind in SCALED:
            return _scaled(self._rng, of, SCALED[kind], K)
        drawn = self._rng.standard_normal((_POOL_ROWS, K), dtype=np.float32) * K**-0.5
        return np.ascontiguousarray(quantize(drawn, of)).view(np.uint8)


def _scaled(
    rng: np.random.Generator, kind: GGMLQuantizationType, places: tuple[int, ...], K: int
) -> npt.NDArray[np.uint8]:
    """Return rows of random bytes, scaled to a mean near 0 and a standard deviation of K ** -0.5."""
    in_block, size = GGML_QUANT_SIZES[kind]
    blocks_NBk = rng.integers(0, 256, (_POOL_ROWS, K // in_block, size), dtype=np.uint8)

    def scaled(*scales: float) -> npt.NDArray[np.uint8]:
        for place, scale in zip(places, scales, strict=True):
            blocks_NBk[..., place : place + 2] = np.array([scale], np.float16).view(np.uint8)
        return blocks_NBk.reshape(_POOL_ROWS, -1)

    def weights(*scales: float) -> npt.NDArray[np.float32]:
        return dequantize(scaled(*scales), kind)

    scales = [1.0]
    if len(places) == 2:  # as much offset as the integers have on average
        scales.append(float(weights(1.0, 0.0).mean() / -weights(0.0, 1.0).mean()))
    ratio = K**-0.5 / float(weights(*scales).std())
    return scaled(*(scale * ratio for scale in scales))


_FILE_TYPES = {name.removeprefix("MOSTLY_").lower(): number for name, number in LlamaFileType.__members__.items()}
_FILE_TYPES |= {"q5_k": _FILE_TYPES["q5_k_m"], "q4_k": _FILE_TYPES["q4_k_m"], "q3_k": _FILE_TYPES["q3_k_m"]}
"""Kind -> the number in a file's header that tells other programs its kind."""


def kind_of(kind: str, name: str, shape: Shape) -> str:
    """Return the kind of a matrix in a file of a kind, by its name there."""
    if _ROUTER in name or name.endswith(".bias"):
        return "f32"
    if shape.architecture == _GPT_OSS and name.endswith(_EXPERTS):
        return _OF_EXPERTS
    if kind not in MIXED:
        return kind
    few, many = MIXED[kind]
    if name == "output.weight":
        return many
    at, eighth = int(name.split(".")[1]) if name.startswith("blk.") else 0, shape.layers // 8
    # llama.cpp's rule: the first and the last eighth of the layers, and every third one between.
    more = at < eighth or at >= 7 * shape.layers // 8 or (at - eighth) % 3 == 2
    return many if more and ("attn_v" in name or "ffn_down" in name) else few


def write_gguf(shape: Shape, name: str, kind: str, file: Path, seed: int = 0) -> None:
    """Write a GGUF file."""
    pool, writer = Pool(seed), GGUFWriter(file, shape.architecture)
    is_gpt_oss = writer.arch == _GPT_OSS
    for key, value in {"context_length": 131_072 if is_gpt_oss else 8192, "vocab_size": shape.vocabulary}.items():
        writer.add_uint32(f"{writer.arch}.{key}", value)
    if is_gpt_oss:
        writer.add_sliding_window(shape.window)
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(32.0)
        writer.add_rope_scaling_orig_ctx_len(4096)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.chosen)
        writer.add_expert_feed_forward_length(shape.inner)
    writer.add_name(f"random {name}")
    writer.add_file_type(_FILE_TYPES[f"{_OF_EXPERTS}_moe" if is_gpt_oss else kind])
    writer.add_block_count(shape.layers)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(150_000.0 if is_gpt_oss else 10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    copy_tokenizer(writer, shape.vocabulary)
    places = [(gguf, dims) for gguf, _, dims in tensors_of(shape)]
    for tensor, dims in places:
        if len(dims) == 1:
            writer.add_tensor_info(tensor, dims, np.dtype(np.float32), 4 * dims[0])
        else:
            own = kind_of(kind, tensor, shape)
            row = pool.matrix(own, (1, dims[-1]))
            packed, of = (*dims[:-1], row.shape[1]), GGMLQuantizationType[own.upper()]
            writer.add_tensor_info(tensor, packed, row.dtype, math.prod(packed), of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, dims in places:
        own = kind_of(kind, tensor, shape)
        num_rows = math.prod(dims[:-1])
        writer.write_tensor_data(
            pool.vector(tensor, dims[0]) if len(dims) == 1 else pool.matrix(own, (num_rows, dims[-1]))
        )
    writer.close()


def copy_tokenizer(writer: GGUFWriter, size: int = 0) -> None:
    """Give a file the tokenizer of the embedded model.

    A model of `size` rows has unused tokens up to it, which llama.cpp demands and its converter writes.
    """
    for key, (value, kind, of) in _tokenizer().items():
        if key == "tokenizer.ggml.tokens":
            value = [*value, *(f"[PAD{token}]" for token in range(len(value), size))]
        elif key == "tokenizer.ggml.token_type":
            value = [*value, *[TokenType.UNUSED] * (size - len(value))]
        writer.add_key_value(key, value, kind, of)


@cache
def _tokenizer() -> dict[str, tuple[Any, GGUFValueType, GGUFValueType | None]]:
    """Return the fields of the embedded model's tokenizer: value, kind, and the kind of a list's items. Reading them
    takes seconds."""
    fields = GGUFReader(weights_file()).fields.items()
    found = {key: field for key, field in fields if key.startswith("tokenizer.")}
    is_list = {key: field.types[0] is GGUFValueType.ARRAY for key, field in found.items()}
    return {key: (f.contents(), f.types[0], f.types[-1] if is_list[key] else None) for key, f in found.items()}


def write_folder(shape: Shape, folder: Path, seed: int = 0) -> None:
    """Write a folder in Hugging Face's format."""
    folder.mkdir(parents=True)
    source, pool = ensure_embedded(), Pool(seed)
    for path in source.glob("*token*"):
        shutil.copy(path, folder)
    for path in source.glob("*.jinja"):
        shutil.copy(path, folder)
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    config |= {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.inner,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": False,
        "max_position_embeddings": 8192,
        "dtype": "bfloat16",
    }
    if shape.experts:
        config |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True}
        config |= {"num_experts": shape.experts, "num_experts_per_tok": shape.chosen}
        config |= {"moe_intermediate_size": shape.inner, "decoder_sparse_step": 1, "mlp_only_layers": []}
    (folder / "config.json").write_text(json.dumps(config))
    shards: list[dict[str, torch.Tensor]] = [{}]
    weight_map: dict[str, str] = {}

    def write() -> None:
        save_file(shards[-1], folder / f"model-{len(shards):05}.safetensors", metadata={"format": "pt"})
        shards[-1] = {}

    held = 0
    matrices = (
        (own.format(number), dims[-2:])
        for _, own, dims in tensors_of(shape)
        for number in range(dims[0] if len(dims) > 2 else 1)
    )
    for own, dims in matrices:
        if held > _SHARD:
            write()
            shards.append({})
            held = 0
        tensor = torch.ones(dims, dtype=torch.bfloat16)
        if len(dims) == 2:
            tensor = torch.from_numpy(pool.matrix("bf16", (dims[0], dims[1]))).view(torch.bfloat16)
        shards[-1][own] = tensor
        weight_map[own] = f"model-{len(shards):05}.safetensors"
        held += tensor.nbytes
    write()
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write(name: str, kind: str, path: Path, seed: int = 0) -> None:
    """Write a model of a shape and a kind to a file or a folder that does not exist."""
    if kind == SAFETENSORS:
        write_folder(SHAPES[name], path, seed)
    else:
        write_gguf(SHAPES[name], name, kind, path, seed)


def main() -> None:
    """Write one model."""
    parser = argparse.ArgumentParser(prog="python -m tools.shapes", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--kind", choices=ALL_KINDS, required=True)
    parser.add_argument("--out", type=Path, required=True, help="a file that does not exist; a folder for safetensors")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.kind == SAFETENSORS and SHAPES[options.shape].architecture == _GPT_OSS:
        parser.error(f"--kind: {options.shape} is written as a GGUF file")
    if options.out.exists():
        parser.error(f"--out: {options.out} exists")
    write(options.shape, options.kind, options.out, options.seed)


if __name__ == "__main__":
    main()
