"""The weights of a GGUF file by the names that transformers gives them, in the order and the form that it gives them.

Invariant: a weight has the bits that transformers' loader gives it. Not responsible for: the header (see
gguf_header.py), what a converter has done (see architectures.py), which weights become quantised products (see
quantised/choice.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map
from gguf.quants import dequantize

from gpu_engine.model.files.architectures import architecture_of
from gpu_engine.model.files.gguf_header import GGUFHeader, GGUFTensor
from gpu_engine.model.files.latent_heads import LatentHeads
from gpu_engine.model.files.pieces import EXPERT, FileBytes, check_parts
from gpu_engine.model.quantised.gguf_kinds import BLOCKS, numbers_of, raw_blocks
from gpu_engine.model.quantised.linear import BlockLinear, check_product, some_rows
from kernels.blocks import BLOCK, BlockKind, PackedBlocks

_FLOATS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)


class GGUFWeights:
    """The weights of one file, or of its parts.

    Args:
        header: of a file with an `architecture_of`.
    """

    def __init__(self, header: GGUFHeader) -> None:
        family = architecture_of(header)
        assert family is not None, header
        self.header, self._family = header, family
        known = {name: key for key, name in MODEL_ARCH_NAMES.items()}
        self._names = get_tensor_name_map(known[header.architecture], int(header.get("{arch}.block_count", 0)))
        self._bytes = {path: FileBytes(path) for path in dict.fromkeys(t.file for t in header.tensors.values())}
        heads = header.get("{arch}.attention.head_count", 0)
        self._heads = {"attn_q": _most(heads), "attn_k": _most(header.get("{arch}.attention.head_count_kv", heads))}
        self._values_of = _ValueHeads.of(header) if self._family.tiled_values else None

    def __enter__(self) -> GGUFWeights:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._bytes.values():
            file.close()

    @property
    def quantised(self) -> bool:
        """True: most matrices of the file are quantised. Each expert has its own."""
        count = Counter[bool]()
        for name, tensor in self.header.tensors.items():
            if len(tensor.shape) > 1 and not name.endswith(".bias"):
                count[tensor.kind in _FLOATS] += math.prod(tensor.shape[:-2])
        return count[True] < count[False]

    @property
    def path(self) -> Path:
        """The file."""
        return self.header.path

    def find(self, name: str) -> tuple[GGUFTensor, ...]:
        """Return the tensors of a parameter: none if the file lacks one, and two whose rows it has one after the
        other."""
        if (expert := EXPERT.fullmatch(name)) is not None and name.startswith("model.layers."):
            layer = int(expert[1].split(".")[2])
            return self._of_expert(layer, expert[2], int(expert[3]), expert[4])
        if (tensor := self._find(name)) is not None:
            return (tensor,)
        for part, others in self._family.joined.items():
            if part in name:
                found = tuple(self._find(name.replace(part, other)) for other in others)
                return tuple(tensor for tensor in found if tensor is not None) if None not in found else ()
        return ()

    def _of_expert(self, layer: int, product: str, number: int, of: str) -> tuple[GGUFTensor, ...]:
        """Return the parts of the layer's tensors that one expert has. `of`: weight or bias."""
        parts = self._parts_of_first(layer) if product == "gate_up" else ("down",)
        whole = [self.header.tensors.get(f"blk.{layer}.ffn_{part}_exps.{of}") for part in parts]
        if None in whole:
            return ()
        dims, name = (3, product) if of == "weight" else (2, f"{product}.bias")
        found = check_parts(f"{name} of layer {layer}", dims, [tensor for tensor in whole if tensor is not None])
        return tuple(tensor.part(number) for tensor in found if number < tensor.shape[0])

    def _parts_of_first(self, layer: int) -> tuple[str, ...]:
        """Return the parts of an expert's first product by their tensors in the file: some have both parts in one."""
        if f"blk.{layer}.ffn_gate_up_exps.weight" in self.header.tensors:
            return ("gate_up",)
        return ("gate", "up") if self._family.gated else ("up",)

    def _find(self, name: str) -> GGUFTensor | None:
        for part, other in self._family.renamed.items():
            name = name.replace(part, other)
        stem, dot, suffix = name.replace(".dt_bias", ".dt_proj.bias").rpartition(".")
        whole = self._names.get_name(name)  # the table has some names of parameters, and their tensors have no suffix
        if suffix not in ("weight", "bias", "scale"):
            stem, dot, suffix = name, "", ""
        found = self.header.tensors.get(f"{self._names.get_name(stem)}{dot}{suffix}")
        return self.header.tensors.get(str(whole)) if found is None else found

    def unread(self, names: Iterable[str]) -> list[str]:
        """Return the tensors of the file that none of the parameters `names` is.

        Without the ones of layers after the model's own, which draft several tokens, and without the keys and values of
        layers that have another one's.
        """
        read = {tensor.name for name in names for tensor in self.find(name)}
        layers, drafting, sharing = (
            int(self.header.get(f"{{arch}}.{key}", 0))
            for key in ("block_count", "nextn_predict_layers", "attention.shared_kv_layers")
        )
        others = tuple(f"blk.{layer}." for layer in range(layers - drafting, layers))
        others += tuple(f"blk.{layer}.attn_{part}" for layer in range(layers - sharing, layers) for part in "kv")
        return sorted(name for name in self.header.tensors.keys() - read if not name.startswith(others))

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a parameter; None: the file has none of that name."""
        tensors = self.find(name)
        if not tensors:
            return None
        shape = tensors[0].shape
        if (heads := LatentHeads.of(tensors)) is not None:
            return heads.shape
        if len(tensors) > 1:
            if any(tensor.shape[1:] != shape[1:] for tensor in tensors):
                raise ValueError(f"{name} is made of {' and '.join(map(str, tensors))}, whose rows differ in length")
            return (sum(tensor.shape[0] for tensor in tensors), *shape[1:])
        if tensors[0].name.endswith(_CONVOLUTIONS):
            return shape[0], 1, shape[1]
        if len(shape) == 1 and any(f".{part}." in tensors[0].name for part in self._family.one_row):
            return 1, *shape
        is_flat = any(f".{part}" in tensors[0].name for part in self._family.flat)
        return (math.prod(shape),) if is_flat else shape

    def blocks_kind(self, name: str) -> BlockKind | None:
        """Return the kind of the product over a matrix's own blocks; None: it has no such product."""
        tensors = self.find(name)
        if LatentHeads.of(tensors) is not None:
            return None
        forms = [BLOCKS.get(tensor.kind) for tensor in tensors]
        order = self._column_order(tensors[0])
        apart = order is not None and _blocks_of(order) is None
        groups = self._groups(name)
        if apart or (len(groups) > 1 and tensors[0].shape[0] % BLOCK):
            return None
        if len({tensor.kind for tensor in tensors}) > len(groups) == 1:  # their rows are read as one tensor's
            return None
        kinds = {None if form is None else form.kind for form in forms}
        return kinds.pop() if len(kinds) == 1 else None  # a part without offsets gets them where another has some

    def has_offsets(self, name: str) -> bool:
        """Return whether a matrix's own blocks have offsets next to their scales."""
        return self.blocks_kind(name) is not None and any(BLOCKS[part.kind].has_offsets for part in self.find(name))

    def kind_name(self, name: str) -> str:
        """Return the name of a parameter's type in the file."""
        return str(self.find(name)[0].kind.name)

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a parameter."""
        shape = self.shape(name)
        assert shape is not None, name
        made = torch.empty(shape, dtype=dtype)
        tensors = self.find(name)
        rows = made.view(-1, shape[-1] if LatentHeads.of(tensors) else tensors[0].shape[-1])
        for first, part in self.rows(name, dtype):
            rows[first : first + len(part)] = part
        return made

    def rows(self, name: str, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the number of a row of a parameter, a multiple of 32, and the next rows from it on, [n, K]."""
        tensors, groups, begin = self.find(name), self._groups(name), 0
        if (heads := LatentHeads.of(tensors)) is not None:
            yield 0, heads.rows(*(self._values(tensor, self._whole(tensor), dtype) for tensor in tensors))
            return
        if len(groups) > 1 and tensors[0].shape[0] % BLOCK:
            yield 0, torch.cat([self._values(tensor, self._whole(tensor), dtype) for tensor in tensors])
            return
        for tensor, *others in groups:
            order, columns = self._order(tensor, *others), self._column_order(tensor)
            num_rows = sum(math.prod(part.shape[:-1]) for part in (tensor, *others))
            if order is not None:
                values = torch.cat([self._values(part, self._whole(part), dtype) for part in (tensor, *others)])
                yield begin, values.view(len(order), -1)[order].view(num_rows, -1)
            else:
                for first, raw in self._slabs(tensor):
                    values = self._values(tensor, raw, dtype)
                    yield begin + first, values if columns is None else values[:, columns]
            begin += num_rows

    def _values(self, tensor: GGUFTensor, raw: npt.NDArray[np.uint8], dtype: torch.dtype) -> torch.Tensor:
        if tensor.name.endswith(".ssm_a"):  # the file has -exp(A_log)
            return torch.log(-numbers_of(raw, tensor.kind, torch.float32)).to(dtype)
        if self._family.norm_offset and "norm.weight" in tensor.name and "ssm_norm" not in tensor.name:
            return (numbers_of(raw, tensor.kind, torch.float32) - self._family.norm_offset).to(dtype)
        return numbers_of(raw, tensor.kind, dtype)

    def product(self, name: str, bias: torch.Tensor | None) -> BlockLinear:
        """Return the product by the own blocks of a matrix that has a `blocks_kind`. Raises RuntimeError where it
        differs from the matrix."""
        tensors, shape = self.find(name), self.shape(name)
        assert shape is not None, name
        (N, K), kind = shape, BLOCKS[tensors[0].kind].kind
        packed = PackedBlocks.unfilled(kind, (N, K), offsets=self.has_offsets(name), bias=bias)
        begin, checked, wanted = 0, list[torch.Tensor](), list[torch.Tensor]()
        for tensor, *others in self._groups(name):
            order, columns = self._order(tensor, *others), self._column_order(tensor)
            blocks = None if columns is None else _blocks_of(columns)
            num_rows = sum(part.shape[0] for part in (tensor, *others))
            rows_n = some_rows(num_rows)
            from_n = rows_n if order is None else order[rows_n]  # of the file
            some = list[npt.NDArray[np.uint8]]()
            for first, raw in self._slabs(tensor) if order is None else [(0, self._whole(tensor, *others))]:
                packed.put(begin + first, len(raw), raw_blocks(raw, tensor.kind, blocks), order)
                some.append(raw[from_n[(from_n >= first) & (from_n < first + len(raw))].numpy() - first])
            checked.append(begin + rows_n)
            values = torch.from_numpy(dequantize(np.concatenate(some), tensor.kind))
            wanted.append(values if columns is None else values[:, columns])
            begin += num_rows
        product = BlockLinear(packed, bias)
        check_product(name, product, torch.cat(checked), torch.cat(wanted))
        return product

    def _groups(self, name: str) -> list[tuple[GGUFTensor, ...]]:
        """Return the tensors of a parameter: together those whose rows alternate."""
        tensors = self.find(name)
        mixed = any(part in name for part in self._family.by_key_head)
        return [tensors] if mixed and len(tensors) > 1 else [(tensor,) for tensor in tensors]

    def _whole(self, *tensors: GGUFTensor) -> npt.NDArray[np.uint8]:
        """Return the rows of tensors with rows of one length, one tensor's after another's."""
        read = [self._bytes[each.file].read(each.start, each.num_bytes).reshape(-1, each.row_bytes) for each in tensors]
        return read[0] if len(read) == 1 else np.concatenate(read)

    def _slabs(self, tensor: GGUFTensor) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
        return self._bytes[tensor.file].slabs(tensor.start, math.prod(tensor.shape[:-1]), tensor.num_bytes)

    def _order(self, tensor: GGUFTensor, *others: GGUFTensor) -> torch.Tensor | None:
        """Return the file's row of each row of the model's weight; None: the same. `others`: of a group."""
        if others:
            return _ValueHeads.of(self.header).by_key_head()
        if self._values_of is not None:
            return self._values_of.rows(tensor)
        if not self._family.interleaved:
            return None
        heads = next((count for part, count in self._heads.items() if f".{part}." in tensor.name), 0)
        if not heads:
            return None
        N = math.prod(tensor.shape[:-1]) if len(tensor.shape) > 1 else tensor.shape[0]
        return torch.arange(N).view(heads, N // heads // 2, 2).transpose(1, 2).reshape(N)

    def _column_order(self, tensor: GGUFTensor) -> torch.Tensor | None:
        """Return the file's column of each column of the model's weight; None: the same."""
        return None if self._values_of is None else self._values_of.columns(tensor)

    def __repr__(self) -> str:
        return f"<GGUFWeights {self.header!r}>"


_CONVOLUTIONS = (".ssm_conv1d.weight", ".shortconv.conv.weight")
"""Tensors without the dimension of 1 that their parameters have in the middle."""


def _most(count: int | list[int]) -> int:
    """Return a number that the header may have for each layer: 0 for layers without attention."""
    return max(count) if isinstance(count, list) else count


def _blocks_of(columns: torch.Tensor) -> torch.Tensor | None:
    """Return an order of columns as one of whole blocks; None: it takes blocks apart."""
    if len(columns) % BLOCK:
        return None
    by_block = columns.view(-1, BLOCK)
    whole = torch.equal(by_block, by_block[:, :1] + torch.arange(BLOCK)) and not bool((by_block[:, 0] % BLOCK).any())
    return by_block[:, 0] // BLOCK if whole else None


@dataclass(frozen=True, slots=True)
class _ValueHeads:
    """The value heads of a delta net, which a file may have in the order (value of a key head, key head)."""

    key_heads: int
    each: int
    """Value heads of a key head."""
    width: int
    """Values of a head."""
    first: int
    """Rows of queries and keys, which come first in their product and in the convolution."""

    @classmethod
    def of(cls, header: GGUFHeader) -> _ValueHeads:
        """Return the heads that a header describes."""
        keys, key_heads, heads, inner = (
            int(header.get(f"{{arch}}.ssm.{key}", 1))
            for key in ("state_size", "group_count", "time_step_rank", "inner_size")
        )
        return cls(key_heads, heads // key_heads, inner // heads, 2 * key_heads * keys)

    def by_key_head(self) -> torch.Tensor:
        """Return the file's row of each row of a product by key heads, where the file has the rows by queries, keys,
        values and gates."""
        values = self.key_heads * self.each * self.width
        parts = torch.arange(self.first + 2 * values).split([self.first // 2, self.first // 2, values, values])
        return torch.cat([part.view(self.key_heads, -1) for part in parts], dim=1).flatten()

    def _order(self, width: int, first: int = 0) -> torch.Tensor:
        count = self.key_heads * self.each * width
        tiled = torch.arange(count).view(self.each, self.key_heads, width).transpose(0, 1).reshape(count)
        return torch.cat([torch.arange(first), first + tiled])

    def rows(self, tensor: GGUFTensor) -> torch.Tensor | None:
        """Return the file's row of each row of the model's weight; None: the same."""
        part = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        if self.each == 1:
            return None
        if part in ("attn_qkv", "ssm_conv1d"):
            return self._order(self.width, self.first)
        if part == "attn_gate":
            return self._order(self.width)
        return self._order(1) if part in ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt") else None

    def columns(self, tensor: GGUFTensor) -> torch.Tensor | None:
        """Return the same of the columns."""
        return self._order(self.width) if self.each > 1 and tensor.name.endswith(".ssm_out.weight") else None
