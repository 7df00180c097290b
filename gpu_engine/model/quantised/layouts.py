"""The layouts in which published checkpoints store quantised matrices: compressed-tensors, GPTQ, AWQ, FP8.

A layout is chosen by the checkpoint's `quantization_config`; bits and groups are taken from the shapes of the tensors,
because a checkpoint may have different ones in different layers. Invariant: a layout that is not read, or a tensor that
does not fit it, raises UnsupportedCheckpoint, which names it. Not responsible for: files (see checkpoint.py), what a
matrix is good for (see matrices.py).

Sources: github.com/vllm-project/compressed-tensors (compressors/pack_quantized, naive_quantized),
github.com/AutoGPTQ/AutoGPTQ (nn_modules/qlinear), github.com/ModelCloud/GPTQModel (utils/model.py: the zero points of
both formats), github.com/casper-hansen/AutoAWQ (modules/linear/gemm.py), transformers
(integrations/finegrained_fp8.py).

Shapes: N outputs, K inputs, G groups of inputs, W words of 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpu_engine.model.quantised.matrices import GroupedIntegers, Matrix, ScaledFloats, tiles

FLOATS8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_BITS = (4, 8)
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""By output of eight: the place of its 4 bits in the word. AutoAWQ writes the outputs 0, 2, 4, 6, 1, 3, 5, 7."""
_ONES = {4: 0x11111111, 8: 0x01010101}
"""One in each integer of a word."""

STATISTICS = frozenset(
    f"{whose}_{what}" for whose in ("input", "output", "q", "k", "v") for what in ("scale", "scale_ub", "zero_point")
) | {"activation_scale"}
"""Ends of the names of tensors that describe activations and caches; nothing here quantises these by them."""


class UnsupportedCheckpoint(ValueError):
    """A checkpoint's kind of quantisation is not read, or a tensor does not fit it; the message names it."""


class Parts:
    """The tensors of one quantised matrix, by the ends of their names. Owns them.

    Args:
        name: the matrix's name in the checkpoint, such as `model.layers.0.mlp.up_proj`.
    """

    def __init__(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self.name, self._tensors = name, tensors

    def __getitem__(self, end: str) -> torch.Tensor:
        if end not in self._tensors:
            raise UnsupportedCheckpoint(f"{self.name}.{end} is missing")
        return self._tensors[end]

    def get(self, end: str) -> torch.Tensor | None:
        """Return a tensor that a matrix need not have."""
        return self._tensors.get(end)

    def words(self, end: str) -> torch.Tensor:
        """Return a matrix of packed integers."""
        words = self[end]
        if words.dtype is not torch.int32 or words.dim() != 2:
            raise self.broken(end, "a matrix of int32")
        return words

    def broken(self, end: str, wanted: str) -> UnsupportedCheckpoint:
        """Return the error of a tensor with a wrong type or shape."""
        tensor = self[end]
        dtype = str(tensor.dtype).removeprefix("torch.")
        return UnsupportedCheckpoint(f"{self.name}.{end} is {dtype} {list(tensor.shape)}, which is not {wanted}")

    def __repr__(self) -> str:
        return f"<Parts {self.name}: {', '.join(self._tensors)}>"


@dataclass(frozen=True, slots=True)
class Layout:
    """How a checkpoint stores a quantised matrix."""

    kind: str
    """For the log, such as "gptq"."""
    marks: tuple[str, ...]
    """Ends of the names of tensors that only a quantised matrix has."""
    parts: frozenset[str]
    """Ends of the names of all its tensors."""
    read: Callable[[Parts], Matrix]
    """Raises UnsupportedCheckpoint."""
    unused: tuple[str, ...] = ()
    """Parts of the configuration that have no effect here, such as the quantisation of activations."""
    short_inputs: bool = False
    """The checkpoint was made for inputs of 8 bits as well."""


def layout_of(config: Mapping[str, Any]) -> Layout:
    """Return the layout that a `quantization_config` names. Raises UnsupportedCheckpoint."""
    method = str(config.get("quant_method"))
    makers = {
        "compressed-tensors": _compressed_tensors,
        "gptq": _gptq,
        "awq": _awq,
        "fp8": _fp8,
        "fbgemm_fp8": _fp8,
    }
    if method not in makers:
        raise UnsupportedCheckpoint(f"quantization_config.quant_method is {method}; read are {', '.join(makers)}")
    return makers[method](config)


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the integers of each row of words, lowest bits first: int32 [R, W] -> uint8 [R, W * 32 / bits]."""
    bytes_ = words.contiguous().view(torch.uint8)
    if bits == 8:
        return bytes_
    # The halves of a byte in the two bytes of 16 bits, the lower one first as in memory.
    wide = bytes_.to(torch.int16)
    halves = wide << 4
    halves |= wide
    halves &= 0x0F0F
    return halves.view(torch.uint8)


def _grouped(
    parts: Parts, unsigned_NK: torch.Tensor, bits: int, scales_NG: torch.Tensor, zeros_NG: torch.Tensor, order: str = ""
) -> GroupedIntegers:
    """Return a matrix of unsigned integers. `order` is the name of the tensor with the group of each input, if any."""
    K, G = unsigned_NK.shape[1], scales_NG.shape[1]
    groups_K = None if parts.get(order) is None else _groups(parts, order, K, G)
    if groups_K is None and (G == 0 or K % G):
        raise UnsupportedCheckpoint(f"{parts.name}: {K} inputs in {G} groups, and no tensor with the group of each")
    zeros_NG = zeros_NG.to(torch.int16)
    if bits == 4:
        return GroupedIntegers(4, unsigned_NK.contiguous(), scales_NG, zeros_NG, groups_K)
    return GroupedIntegers(8, (unsigned_NK ^ 128).contiguous().view(torch.int8), scales_NG, zeros_NG - 128, groups_K)


def _groups(parts: Parts, end: str, K: int, G: int) -> torch.Tensor | None:
    """Return the group of each input, or None where K / G neighbours are a group."""
    groups_K = parts[end].long()
    if groups_K.shape != (K,):
        raise parts.broken(end, f"the group of each of {K} inputs")
    if K % G == 0 and torch.equal(groups_K, torch.arange(K) // (K // G)):
        return None
    if bool((groups_K == -1).all()):  # compressed-tensors: not set
        return None
    if int(groups_K.min()) < 0 or int(groups_K.max()) >= G:
        raise UnsupportedCheckpoint(f"{parts.name}.{end} has groups outside 0 to {G - 1}")
    return groups_K


def _by_group(parts: Parts, end: str, N: int) -> torch.Tensor:
    """Return scales or zero points [N, G]: one for all, one for each output, or one for each output and group."""
    values = parts[end]
    if values.numel() == 1:
        return values.reshape(1, 1).expand(N, 1)
    if values.dim() == 1 and len(values) == N:
        return values[:, None]
    if values.dim() != 2 or len(values) != N:
        raise parts.broken(end, f"one, or [{N}, groups]")
    return values


def _compressed_tensors(config: Mapping[str, Any]) -> Layout:
    groups = list((config.get("config_groups") or {}).values())
    known = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision")
    for name in (config.get("format"), *(group.get("format") for group in groups)):
        if name is not None and name not in known:
            raise UnsupportedCheckpoint(f"quantization_config.format is {name}; read are {', '.join(known)}")
    sparsity = (config.get("sparsity_config") or {}).get("format") or "dense"
    if sparsity != "dense":
        raise UnsupportedCheckpoint(f"quantization_config.sparsity_config.format is {sparsity}; read is dense")
    if (config.get("transform_config") or {}).get("config_groups"):
        raise UnsupportedCheckpoint("quantization_config.transform_config: rotations of activations are not computed")
    unused = [
        what
        for what in ("input_activations", "output_activations")
        if any(group.get(what) is not None for group in groups)
    ]
    unused += ["kv_cache_scheme"] if config.get("kv_cache_scheme") else []
    blocks = [(group.get("weights") or {}).get("block_structure") for group in groups]
    tile = next((block for block in blocks if block), None)

    def read(parts: Parts) -> Matrix:
        return _pack_quantized(parts) if parts.get("weight_packed") is not None else _plain(parts, "weight_scale", tile)

    ends = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
    kind = f"compressed-tensors {config.get('format') or ''}".rstrip()
    inputs = [group.get("input_activations") for group in groups]
    short = bool(inputs) and all(item is not None and item.get("num_bits", 8) == 8 for item in inputs)
    return Layout(kind, ("weight_packed", "weight_scale"), frozenset(ends), read, tuple(unused), short)


def _pack_quantized(parts: Parts) -> Matrix:
    """Integers of a row side by side, plus 2 ^ (bits - 1); zero points side by side along the outputs."""
    words_NW = parts.words("weight_packed")
    N, K = (int(size) for size in parts["weight_shape"])
    bits = next((bits for bits in _BITS if words_NW.shape == (N, -(-K * bits // 32))), None)
    if bits is None:
        raise parts.broken("weight_packed", f"[{N}, {K}] of 4 or 8 bits")
    scales_NG = _by_group(parts, "weight_scale", N)
    G, middle = scales_NG.shape[1], 1 << (bits - 1)
    zeros_NG = torch.full((N, G), middle)
    zeros = parts.get("weight_zero_point")
    if zeros is not None and zeros.dtype is torch.int32:
        if zeros.shape != (-(-N * bits // 32), G):
            raise parts.broken("weight_zero_point", f"[{N}, {G}] of {bits} bits, packed along the outputs")
        zeros_NG = unpacked(zeros.T, bits).T[:N]
    elif zeros is not None:
        zeros_NG = _by_group(parts, "weight_zero_point", N).to(torch.int16) + middle
    return _grouped(parts, unpacked(words_NW, bits)[:, :K], bits, scales_NG, zeros_NG.expand(N, G), "weight_g_idx")


def _plain(parts: Parts, scale: str, tile: list[int] | None) -> Matrix:
    """A matrix [N, K] of signed bytes or of 8-bit floats, and its scales."""
    weight_NK = parts["weight"]
    if weight_NK.dim() != 2 or weight_NK.dtype not in (torch.int8, *FLOATS8):
        raise parts.broken("weight", "a matrix of int8 or of FP8")
    N = len(weight_NK)
    if weight_NK.dtype is not torch.int8:
        return _floats(parts, scale, tile)
    scales_NG = _by_group(parts, scale, N)
    zeros_NG = torch.zeros(1, 1, dtype=torch.int16)
    if parts.get("weight_zero_point") is not None:
        zeros_NG = _by_group(parts, "weight_zero_point", N).to(torch.int16)
    zeros_NG = zeros_NG.expand(scales_NG.shape) + 128
    return _grouped(parts, weight_NK.view(torch.uint8) ^ 128, 8, scales_NG, zeros_NG, "weight_g_idx")


def _floats(parts: Parts, scale: str, tile: list[int] | None) -> Matrix:
    """Tiles of a stated size, or one scale for each output and group, for each output, or for all."""
    weight_NK, scales = parts["weight"], parts[scale]
    N, K = weight_NK.shape
    if tile is not None and scales.numel() > 1:
        size = (int(tile[0]), int(tile[1]))
        if scales.shape != tiles((N, K), size):
            raise parts.broken(scale, f"a scale for each {size[0]} x {size[1]} of [{N}, {K}]")
        return ScaledFloats(weight_NK, scales, size)
    scales_NG = _by_group(parts, scale, N)
    if K % scales_NG.shape[1]:
        raise parts.broken(scale, f"groups of {K} inputs")
    return ScaledFloats(weight_NK, scales_NG, (1, K // scales_NG.shape[1]))


def _fp8(config: Mapping[str, Any]) -> Layout:
    tile = config.get("weight_block_size")
    unused = ("activation_scheme",) if config.get("activation_scheme") == "static" else ()

    def read(parts: Parts) -> Matrix:
        inverse = parts.get("weight_scale_inv") is not None  # transformers' name; it is a factor, too
        return _plain(parts, "weight_scale_inv" if inverse else "weight_scale", tile)

    marks = ("weight_scale_inv", "weight_scale")
    return Layout(str(config["quant_method"]), marks, frozenset({"weight", *marks}), read, unused, short_inputs=True)


def _gptq(config: Mapping[str, Any]) -> Layout:
    name = config.get("checkpoint_format") or config.get("format") or "gptq"
    if name not in ("gptq", "gptq_v2"):
        raise UnsupportedCheckpoint(f"quantization_config.checkpoint_format is {name}; read are gptq, gptq_v2")
    if config.get("bits", 4) not in _BITS:
        raise UnsupportedCheckpoint(f"quantization_config.bits is {config['bits']}; read are 4, 8")

    likely = sorted(_BITS, key=lambda bits: bits != config.get("bits"))

    def read(parts: Parts) -> Matrix:
        return _gptq_matrix(parts, likely, adds_one=name == "gptq", symmetric=bool(config.get("sym")))

    return Layout(name, ("qweight",), frozenset({"qweight", "qzeros", "scales", "g_idx"}), read)


def _gptq_matrix(parts: Parts, likely: Sequence[int], *, adds_one: bool, symmetric: bool) -> Matrix:
    """Inputs of an output side by side along the rows; zero points side by side along the outputs.

    The first format stores zero points less one, subtracted from the packed words: they are added there as well, so
    that a borrow of a neighbour is given back.
    """
    words_WN, zeros_GW, scales_GN = parts.words("qweight"), parts.words("qzeros"), parts["scales"]
    N = words_WN.shape[1]
    if scales_GN.dim() != 2 or scales_GN.shape[1] != N:
        raise parts.broken("scales", f"[groups, {N}]")
    bits = next((bits for bits in likely if zeros_GW.shape == (len(scales_GN), -(-N * bits // 32))), None)
    if bits is None:
        raise parts.broken("qzeros", f"[{len(scales_GN)}, {N}] of 4 or 8 bits")
    stored_GN = unpacked(zeros_GW, bits)[:, :N]
    # Some writers name the first format and store the second: the middle is a symmetric matrix's only zero point.
    right = symmetric and bool((stored_GN == 1 << (bits - 1)).all())
    zeros_GN = unpacked(zeros_GW + _ONES[bits], bits)[:, :N] if adds_one and not right else stored_GN
    return _grouped(parts, unpacked(words_WN.T, bits), bits, scales_GN.T, zeros_GN.T, "g_idx")


def _awq(config: Mapping[str, Any]) -> Layout:
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if version != "gemm":
        raise UnsupportedCheckpoint(f"quantization_config.version is {version}; read is gemm")
    bits = config.get("bits", config.get("w_bit", 4))
    if bits != 4:
        raise UnsupportedCheckpoint(f"quantization_config.bits is {bits}; read is 4")
    return Layout("awq", ("qweight",), frozenset({"qweight", "qzeros", "scales"}), _awq_matrix)


def _awq_matrix(parts: Parts) -> Matrix:
    """Eight outputs of an input in a word, in AutoAWQ's order; so are the zero points."""
    words_KW, zeros_GW, scales_GN = parts.words("qweight"), parts.words("qzeros"), parts["scales"]
    N = words_KW.shape[1] * 8
    if scales_GN.dim() != 2 or scales_GN.shape[1] != N:
        raise parts.broken("scales", f"[groups, {N}]")
    if zeros_GW.shape != (len(scales_GN), N // 8):
        raise parts.broken("qzeros", f"[{len(scales_GN)}, {N}] of 4 bits")
    quants_NK, zeros_NG = (
        unpacked(words, 4).view(len(words), N // 8, 8)[..., _AWQ_PLACES].flatten(1).T.contiguous()
        for words in (words_KW, zeros_GW)
    )
    return _grouped(parts, quants_NK, 4, scales_GN.T, zeros_NG)
