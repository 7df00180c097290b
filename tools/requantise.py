"""The embedded model in every kind of GGUF file, for comparing kinds: python -m tools.requantise.

Its 576 inputs are no multiple of the 256 of a K-quant's block, so the model is widened with zeros to 768: three more
heads that compute nothing, and norms that count the zeros. It gives the same logits, up to rounding. Matrices are
rounded to nearest, with scales from the largest weight of a block. Not responsible for: the best quantisation of a
kind; llama.cpp searches for better scales.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize

from gpu_engine.model.embedded import weights_file
from tools.shapes import copy_tokenizer

_Floats = npt.NDArray[np.float32]
_Bytes = npt.NDArray[np.uint8]
_Numbers = npt.NDArray[Any]

_HEAD, _HEADS, _KV_HEADS, _WIDTH = 64, 12, 4, 768
"""Of the widened model; three heads share a key head, as in the embedded model."""
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def _half(x: _Floats) -> _Floats:
    return x.astype(np.float16).astype(np.float32)


def _ratio(x: _Numbers, by: _Numbers) -> _Floats:
    """Divide, and give 0 where the divisor is 0."""
    return np.divide(x, by, out=np.zeros(np.broadcast_shapes(x.shape, by.shape), np.float32), where=by != 0)


def _bytes_of(half: _Floats) -> _Bytes:
    return np.ascontiguousarray(half.astype(np.float16)).view(np.uint8)


def _with_minima(x_SBk: _Floats, most: int, levels: int) -> tuple[_Numbers, ...]:
    """Return integers from 0 to `most`, scales and minima of blocks in `levels` steps, and the steps, as floats."""
    least = np.maximum(-x_SBk.min(axis=2), 0)
    scales = (x_SBk.max(axis=2) + least).clip(0) / most
    d, dmin = (_half(each.max(axis=1, keepdims=True) / levels) for each in (scales, least))
    scales, least = (np.rint(_ratio(each, step)).clip(0, levels) for each, step in ((scales, d), (least, dmin)))
    quants = np.rint(_ratio(x_SBk + (dmin * least)[..., None], (d * scales)[..., None])).clip(0, most)
    return quants, scales, least, d, dmin


def _packed_six(scales: _Floats, least: _Floats) -> _Bytes:
    """Return the 12 bytes in which Q4_K and Q5_K have eight scales and eight minima of 6 bits."""
    s, m = scales.astype(np.uint8), least.astype(np.uint8)
    low = s[:, :4] | s[:, 4:] >> 4 << 6
    high = m[:, :4] | m[:, 4:] >> 4 << 6
    return np.concatenate([low, high, (s[:, 4:] & 15) | m[:, 4:] << 4], axis=1)


def _pairs(quants: _Numbers, bits: int, apart: int) -> _Bytes:
    """Join integers of `bits` bits of each run of blocks: the first in the lowest bits."""
    count = 8 // bits
    runs = quants.reshape(len(quants), -1, count, apart)
    joined: _Bytes = np.bitwise_or.reduce(runs << (bits * np.arange(count, dtype=np.uint8))[:, None], axis=2)
    return joined.reshape(len(quants), -1)


def _q2_k(x: _Floats) -> _Bytes:
    quants, scales, least, d, dmin = _with_minima(x.reshape(-1, 16, 16), 3, 15)
    packed = scales.astype(np.uint8) | least.astype(np.uint8) << 4
    return np.concatenate([packed, _pairs(quants.astype(np.uint8), 2, 32), _bytes_of(d), _bytes_of(dmin)], axis=1)


def _q4_k(x: _Floats) -> _Bytes:
    quants, scales, least, d, dmin = _with_minima(x.reshape(-1, 8, 32), 15, 63)
    packed = _packed_six(scales, least)
    return np.concatenate([_bytes_of(d), _bytes_of(dmin), packed, _pairs(quants.astype(np.uint8), 4, 32)], axis=1)


def _q5_k(x: _Floats) -> _Bytes:
    quants, scales, least, d, dmin = _with_minima(x.reshape(-1, 8, 32), 31, 63)
    q = quants.astype(np.uint8)
    high: _Bytes = np.bitwise_or.reduce((q >> 4) << np.arange(8, dtype=np.uint8)[:, None], axis=1)
    packed = _packed_six(scales, least)
    return np.concatenate([_bytes_of(d), _bytes_of(dmin), packed, high, _pairs(q & 15, 4, 32)], axis=1)


def _signed(x_SBk: _Floats, most: int, levels: int) -> tuple[_Numbers, ...]:
    """Return integers from -most to most - 1, the scales of blocks as integers, and their step, as floats."""
    largest = np.take_along_axis(x_SBk, np.abs(x_SBk).argmax(axis=2)[..., None], axis=2)[..., 0]
    scales = largest / -most
    d = _half(np.abs(scales).max(axis=1, keepdims=True) / levels)
    scales = np.rint(_ratio(scales, d)).clip(-levels, levels)
    return np.rint(_ratio(x_SBk, (d * scales)[..., None])).clip(-most, most - 1), scales, d


def _q3_k(x: _Floats) -> _Bytes:
    quants, scales, d = _signed(x.reshape(-1, 16, 16), 4, 31)
    q, s = (quants.reshape(len(quants), 8, 32) + 4).astype(np.uint8), (scales + 32).astype(np.uint8)
    mask: _Numbers = np.bitwise_or.reduce((q >> 2) << np.arange(8, dtype=np.uint8)[:, None], axis=1)
    low = (s[:, :8] & 15) | (s[:, 8:] & 15) << 4
    high: _Numbers = np.bitwise_or.reduce(
        (s >> 4).reshape(-1, 4, 4) << (2 * np.arange(4, dtype=np.uint8))[:, None], axis=1
    )
    return np.concatenate([mask, _pairs(q & 3, 2, 32), low, high, _bytes_of(d)], axis=1)


def _q6_k(x: _Floats) -> _Bytes:
    quants, scales, d = _signed(x.reshape(-1, 16, 16), 32, 127)
    q = (quants + 32).astype(np.uint8)
    # Of each 128 inputs: 64 bytes have the low bits of inputs i and i + 64.
    low = _pairs(q & 15, 4, 64)
    return np.concatenate([low, _pairs(q >> 4, 2, 32), scales.astype(np.int8).view(np.uint8), _bytes_of(d)], axis=1)


def _codes(x: _Floats, scales: _Floats) -> _Bytes:
    """Return the 4-bit codes of the nearest values of IQ4, two in a byte: input i, and i + 16."""
    between = (_IQ4[1:] + _IQ4[:-1]) / 2
    codes = np.searchsorted(between, _ratio(x, scales[..., None])).astype(np.uint8)
    return np.asarray(codes[..., :16] | codes[..., 16:] << 4, np.uint8)


def _iq4_nl(x: _Floats) -> _Bytes:
    x_Sk = x.reshape(-1, 32)
    largest = np.take_along_axis(x_Sk, np.abs(x_Sk).argmax(axis=1)[:, None], axis=1)
    d = _half(largest / _IQ4[0])
    return np.concatenate([_bytes_of(d), _codes(x_Sk, d[:, 0])], axis=1)


def _iq4_xs(x: _Floats) -> _Bytes:
    x_SBk = x.reshape(-1, 8, 32)
    largest = np.take_along_axis(x_SBk, np.abs(x_SBk).argmax(axis=2)[..., None], axis=2)[..., 0]
    scales = largest / _IQ4[0]
    d = _half(np.abs(scales).max(axis=1, keepdims=True) / 31)
    scales = np.rint(_ratio(scales, d)).clip(-32, 31)
    codes = _codes(x_SBk, d * scales).reshape(len(x_SBk), -1)
    s = (scales + 32).astype(np.uint16)
    high: _Numbers = np.bitwise_or.reduce((s >> 4) << (2 * np.arange(8, dtype=np.uint16)), axis=1).astype(np.uint16)
    low = (s[:, ::2] & 15 | (s[:, 1::2] & 15) << 4).astype(np.uint8)
    return np.concatenate([_bytes_of(d), high[:, None].view(np.uint8), low, codes], axis=1)


OWN: dict[str, Callable[[_Floats], _Bytes]] = {
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "iq4_nl": _iq4_nl,
    "iq4_xs": _iq4_xs,
}
"""Kind -> what rounds numbers, in whole blocks, to its bytes, [blocks, bytes]."""
MIXED = {"q4_k_m": ("q4_k", "q6_k")}
"""File -> the kind of most matrices, and the kind of the embedding and of some layers' values and outputs."""
KINDS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", *OWN, "mxfp4", "f16", "bf16", *MIXED)


def rounded(x_NK: _Floats, kind: str) -> _Bytes:
    """Return the bytes of a matrix of a kind, [N, bytes of a row]."""
    if kind in OWN:
        return np.ascontiguousarray(OWN[kind](x_NK).reshape(len(x_NK), -1))
    return np.ascontiguousarray(quantize(x_NK, GGMLQuantizationType[kind.upper()])).view(np.uint8)


def widened() -> tuple[dict[str, _Floats], dict[str, Any]]:
    """Return the tensors of the widened model by their names in a GGUF file, and the header's numbers."""
    reader = GGUFReader(weights_file())
    tensors = {t.name: dequantize(t.data, t.tensor_type).reshape(t.shape[::-1].tolist()) for t in reader.tensors}
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("tokenizer.")}
    return {name: wide(name, tensor) for name, tensor in tensors.items()}, fields


def wide(name: str, tensor: _Floats) -> _Floats:
    """Return a tensor of the embedded model with zeros up to the width; a norm's weights make up for them."""
    if tensor.ndim == 1:
        made = np.zeros(_WIDTH, np.float32)
        made[: len(tensor)] = tensor * (len(tensor) / _WIDTH) ** 0.5
        return made
    rows, columns = tensor.shape
    outputs = {"attn_q": _HEADS * _HEAD, "attn_k": _KV_HEADS * _HEAD, "attn_v": _KV_HEADS * _HEAD}
    part = name.split(".")[-2]
    outputs |= dict.fromkeys(("attn_output", "ffn_down"), _WIDTH)
    made_NK = np.zeros((outputs.get(part, int(rows)), max(columns, _WIDTH)), np.float32)
    made_NK[:rows, :columns] = tensor
    return made_NK


def kind_of(kind: str, name: str, layers: int) -> str:
    """Return the kind of a matrix in a file of a kind, by its name there."""
    if kind not in MIXED:
        return kind
    few, many = MIXED[kind]
    if not name.startswith("blk."):
        return many
    at = int(name.split(".")[1])
    more = at < layers // 8 or at >= 7 * layers // 8 or (at - layers // 8) % 3 == 2
    return many if more and ("attn_v" in name or "ffn_down" in name) else few


def write(kind: str, file: Path, plain: Path | None = None) -> None:
    """Write the widened model in a kind; to `plain` its numbers as the gguf package reads them, in float32."""
    tensors, fields = widened()
    writers = [GGUFWriter(path, "llama") for path in (file, plain) if path is not None]
    layers = int(fields["llama.block_count"])
    for writer in writers:
        writer.add_name("widened")
        writer.add_block_count(layers)
        writer.add_context_length(int(fields["llama.context_length"]))
        writer.add_embedding_length(_WIDTH)
        writer.add_feed_forward_length(int(fields["llama.feed_forward_length"]))
        writer.add_head_count(_HEADS)
        writer.add_head_count_kv(_KV_HEADS)
        writer.add_rope_dimension_count(_HEAD)
        writer.add_rope_freq_base(float(fields["llama.rope.freq_base"]))
        # The zeros lower the mean square, and so would the number that is added to it.
        writer.add_layer_norm_rms_eps(float(fields["llama.attention.layer_norm_rms_epsilon"]) * 576 / _WIDTH)
        writer.add_vocab_size(int(fields["llama.vocab_size"]))
        copy_tokenizer(writer)
    for name, tensor in tensors.items():
        own = kind_of(kind, name, layers)
        if tensor.ndim == 1:
            raw: npt.NDArray[Any] = tensor
            of = GGMLQuantizationType.F32
        else:
            raw, of = rounded(tensor, own), GGMLQuantizationType[own.upper()]
        writers[0].add_tensor(name, raw, raw_dtype=of)
        if plain is not None:
            writers[1].add_tensor(name, tensor if tensor.ndim == 1 else dequantize(raw, of).astype(np.float32))
    for writer in writers:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def main() -> None:
    """Write one model."""
    parser = argparse.ArgumentParser(prog="python -m tools.requantise", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--out", type=Path, required=True, help="a file that does not exist")
    options = parser.parse_args()
    if options.out.exists():
        parser.error(f"--out: {options.out} exists")
    write(options.kind, options.out)


if __name__ == "__main__":
    main()
