"""Whole forwards in one piece of memory, which a program without Python runs (see forward_image.c).

Invariant: each pointer leads to a copy of what it leads to here, of at most LEAF bytes. Not responsible for:
adapters, whose tables no structure here describes.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from kernels.forward import Forward
from kernels.recurrent_layer import RecurrentLayerArgs

LEAF = 1 << 19
"""Bytes that are copied of a tensor, whose size a pointer does not tell. No tensor of a tiny model has more."""


class ForwardImage:
    """The memory of one forward, whose last call's arguments it gets once more.

    Args:
        forward: after a call with the tensors that are wanted, which still exist.
    """

    def __init__(self, forward: Forward) -> None:
        self._args = args = forward._args
        self._memory = bytearray()
        self._places: dict[int, int] = {}
        self._pointers: list[tuple[int, int]] = []
        self._mapped = list(_mappings())
        self._counts = {"layers": args.num_layers, "gate_up": args.experts, "down": args.experts, "latent": 1}
        self._counts |= {"keys": args.num_heads, "values": args.num_heads}
        assert not args.adapters, "an image has no adapters"
        self._at = self._copied(ctypes.addressof(args), ctypes.sizeof(args))
        self._follow(args, self._at)

    def message(self) -> bytes:
        """Return the forward as forward_image.c reads it."""
        args = self._args
        logits, bytes_ = self._places[args.logits], 4 * args.num_logits * args.logits_stride
        assert bytes_ <= LEAF, bytes_
        scratch = self._at + type(args).scratch.offset
        head = (len(self._memory), len(self._pointers), self._at, scratch, logits, bytes_)
        pointers = b"".join(struct.pack("<2q", *pointer) for pointer in self._pointers)
        return struct.pack("<6q", *head) + bytes(self._memory) + pointers

    def _follow(self, part: ctypes.Structure, at: int) -> None:
        """Copy what the pointers of a structure point to, which itself lies at `at`."""
        for name, kind in part._fields_:  # type: ignore[misc]
            value, here = getattr(part, name), at + getattr(type(part), name).offset
            if isinstance(value, ctypes.Structure):
                self._follow(value, here)
            elif name == "recurrent" and value:
                self._point(here, RecurrentLayerArgs.from_address(value), 1)
            elif issubclass(kind, ctypes._Pointer):
                if value:
                    self._point(here, value.contents, self._counts[name])
            elif kind is ctypes.c_void_p and value and name != "scratch":
                self._pointers.append((here, self._copied(value, LEAF)))

    def _point(self, here: int, first: ctypes.Structure, count: int) -> None:
        """Copy an array of structures, to which the pointer at `here` points."""
        kind, address = type(first), ctypes.addressof(first)
        begin = self._copied(address, count * ctypes.sizeof(kind))
        self._pointers.append((here, begin))
        for number in range(count):
            offset = number * ctypes.sizeof(kind)
            self._follow(kind.from_address(address + offset), begin + offset)

    def _copied(self, address: int, size: int) -> int:
        """Return the place of a copy, with the alignment of what it is of. Equal addresses have one copy."""
        if address not in self._places:
            end = next((end for begin, end in self._mapped if begin <= address < end), 0)
            assert end, f"a pointer leads to no memory: {address:#x}"
            self._memory += bytes((address - len(self._memory)) % 64)
            self._places[address] = len(self._memory)
            self._memory += ctypes.string_at(address, min(size, end - address))
        return self._places[address]


def _mappings() -> Iterator[tuple[int, int]]:
    """Return this process's readable memory, as spans without a gap."""
    spans: list[list[int]] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, rights = line.split()[:2]
        begin, end = (int(edge, 16) for edge in where.split("-"))
        if rights[0] != "r":
            continue
        if spans and spans[-1][1] == begin:
            spans[-1][1] = end
        else:
            spans.append([begin, end])
    assert all(a[1] < b[0] for a, b in pairwise(spans))
    return ((begin, end) for begin, end in spans)
