"""The tensors of the wire: from a request's inputs to plain values, and from values to a response's outputs.

Invariant: values that `read_inputs` returns have the datatype and the number of elements that their description says;
otherwise InvalidRequest names the tensor and what it must have.

Not responsible for: what a tensor means (see infer_requests.py and infer_responses.py).
"""

from __future__ import annotations

import difflib
import math
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_engine.api.errors import InvalidRequest, NotSupported
from protos.kserve.v2 import inference_pb2 as pb

BOOL, BYTES, FP32, INT32, UINT64 = "BOOL", "BYTES", "FP32", "INT32", "UINT64"

_DTYPES: dict[str, np.dtype[Any]] = {
    BOOL: np.dtype("?"),
    FP32: np.dtype("<f4"),
    INT32: np.dtype("<i4"),
    UINT64: np.dtype("<u8"),
}
_CONTENTS = {
    BOOL: "bool_contents",
    BYTES: "bytes_contents",
    FP32: "fp32_contents",
    INT32: "int_contents",
    UINT64: "uint64_contents",
}
"""Datatype -> the field of InferTensorContents that has its elements."""
_LENGTH = struct.Struct("<I")
"""The length that precedes each element of BYTES in raw contents."""

ANY = -1
"""A dimension of any length."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """The description of a tensor. `shape` is without the dimension of a batch."""

    datatype: str
    shape: tuple[int, ...]


SCALAR, LIST, ROWS = (1,), (ANY,), (ANY, ANY)


@dataclass(frozen=True, slots=True)
class Values:
    """The elements of an input: bool, int, float or str."""

    items: list[Any]
    batched: bool
    """The shape has a first dimension of 1, for a batch of one request."""


def read_inputs(request: pb.ModelInferRequest, known: Mapping[str, Tensor]) -> dict[str, Values]:
    """Return the inputs by name.

    Raises InvalidRequest for a name that is not in `known` or is given twice, and for a wrong datatype, shape or number
    of elements. Raises NotSupported for any parameter of a tensor, such as shared memory.
    """
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidRequest("raw_input_contents", f"has {len(raw)} entries for {len(request.inputs)} inputs")
    found: dict[str, Values] = {}
    for i, tensor in enumerate(request.inputs):
        if tensor.name not in known:
            raise InvalidRequest("inputs", unknown("tensor", tensor.name, known))
        if tensor.name in found:
            raise InvalidRequest(tensor.name, "is given twice")
        refuse_parameters(tensor.name, tensor.parameters)
        found[tensor.name] = _values(tensor, known[tensor.name], raw[i] if raw else None)
    return found


def unknown(what: str, name: str, known: Collection[str]) -> str:
    """Return the problem of a name that is not known, with the nearest known one or all of them."""
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
    return f"the {what} {name!r} is not known; {hint}"


def refuse_parameters(name: str, parameters: Mapping[str, pb.InferParameter]) -> None:
    """Raise NotSupported for the first parameter of a tensor; none is known."""
    for parameter in sorted(parameters):
        if parameter.startswith("shared_memory"):
            raise NotSupported(f"{name}: {parameter}: this server does not read or write shared memory of clients")
        raise NotSupported(f"{name}: {parameter}: this server knows no parameters of tensors")


def _values(tensor: pb.ModelInferRequest.InferInputTensor, described: Tensor, raw: bytes | None) -> Values:
    if tensor.datatype != described.datatype:
        raise InvalidRequest(tensor.name, f"has the datatype {tensor.datatype!r}, must be {described.datatype}")
    shape, rank = tuple(tensor.shape), len(described.shape)
    batched = len(shape) == rank + 1
    if batched and shape[0] != 1:
        raise InvalidRequest(
            tensor.name, f"has a batch of {shape[0]}; send each request by itself, the server batches them"
        )
    inner = shape[1:] if batched else shape
    fits = len(inner) == rank and all(
        size >= 0 if must == ANY else size == must for size, must in zip(inner, described.shape, strict=True)
    )
    if not fits:
        wanted = list(described.shape)
        raise InvalidRequest(tensor.name, f"has the shape {list(shape)}, must be {wanted} or {[1, *wanted]}")
    items = _of_contents(tensor) if raw is None else _of_raw(tensor, raw)
    if len(items) != math.prod(shape):
        raise InvalidRequest(tensor.name, f"has {len(items)} elements, the shape {list(shape)} says {math.prod(shape)}")
    return Values(_texts(tensor.name, items) if tensor.datatype == BYTES else items, batched)


def _of_contents(tensor: pb.ModelInferRequest.InferInputTensor) -> list[Any]:
    field = _CONTENTS[tensor.datatype]
    for other, _ in tensor.contents.ListFields():
        if other.name != field:
            raise InvalidRequest(
                tensor.name, f"contents: elements of {tensor.datatype} are in {field}, not {other.name}"
            )
    return list(getattr(tensor.contents, field))


def _of_raw(tensor: pb.ModelInferRequest.InferInputTensor, raw: bytes) -> list[Any]:
    if tensor.HasField("contents"):
        raise InvalidRequest(tensor.name, "has contents and an entry of raw_input_contents")
    if tensor.datatype == BYTES:
        return _split(tensor.name, raw)
    dtype = _DTYPES[tensor.datatype]
    if len(raw) % dtype.itemsize:
        raise InvalidRequest(tensor.name, f"has {len(raw)} bytes, an element of {tensor.datatype} has {dtype.itemsize}")
    items: list[Any] = np.frombuffer(raw, dtype).tolist()
    return items


def _split(name: str, raw: bytes) -> list[bytes]:
    items, at = [], 0
    while at < len(raw):
        begin = at + _LENGTH.size
        end = begin + _LENGTH.unpack_from(raw, at)[0] if begin <= len(raw) else len(raw) + 1
        if end > len(raw):
            raise InvalidRequest(name, f"has an element that goes beyond the {len(raw)} bytes of the tensor")
        items.append(raw[begin:end])
        at = end
    return items


def _texts(name: str, items: Sequence[bytes]) -> list[str]:
    try:
        return [item.decode() for item in items]
    except UnicodeDecodeError as error:
        raise InvalidRequest(name, f"is not UTF-8 at byte {error.start}") from None


def add_output(
    response: pb.ModelInferResponse, name: str, datatype: str, shape: Sequence[int], items: Sequence[Any]
) -> None:
    """Append an output with `items`, row by row: str for BYTES."""
    response.outputs.add(name=name, datatype=datatype, shape=shape)
    if datatype == BYTES:
        texts = [item.encode() for item in items]
        response.raw_output_contents.append(b"".join(_LENGTH.pack(len(text)) + text for text in texts))
    else:
        response.raw_output_contents.append(np.asarray(items, _DTYPES[datatype]).tobytes())
