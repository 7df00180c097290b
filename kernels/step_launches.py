"""The CPU's launches around a step's forward as short native calls: inputs, posts, cached rows, drafts.

Invariant: a call writes the lanes of its batch and their slots alone, and allocates nothing. The structs hold addresses
of tensors that never move; they keep these tensors. Not responsible for: the rules (see
gpu_engine/step/launches.py, which has a launch for each function here), waiting for rows, sampling (see accept.py).

Shapes: S slots, the spare one included, B lanes, R rows a slot, P rows of this step, L tokens of a history, N pages,
W' words of a mask row.
"""

from __future__ import annotations

import ctypes
import operator
from typing import Any, Self

import torch

from kernels.library import address, native_short

_SIZES = ("history_stride", "table_stride", "num_slots", "num_rows", "mask_words")
_BYTES = ("done", "guided", "drafting", "kinds", "cached")
_OTHER = {torch.bool: torch.uint8}


class _Tensors(ctypes.Structure):
    """Addresses of tensors, by name; bytes for bool and uint8, int32 for the rest."""

    tensors: dict[str, torch.Tensor]

    @classmethod
    def of(cls, tensors: dict[str, torch.Tensor], **sizes: int) -> Self:
        """Return the struct; asserts that each tensor is contiguous and of the type that the native code reads."""
        for name, tensor in tensors.items():
            wanted = torch.uint8 if name in _BYTES else torch.int32
            assert _OTHER.get(tensor.dtype, tensor.dtype) is wanted, (name, tensor.dtype)
            assert tensor.is_contiguous(), name
        made = cls(**{name: address(tensor) for name, tensor in tensors.items()}, **sizes)
        made.tensors = tensors
        return made


def _layout(*names: str) -> Any:
    return [(name, ctypes.c_int64 if name in _SIZES else ctypes.c_void_p) for name in names]


class SlotArgs(_Tensors):
    """Mirror of `struct step_slots`."""

    _fields_ = _layout(
        "history",
        "length",
        "drafts",
        "num_drafts",
        "posted",
        "jump_forward_limit",
        "prompt_length",
        "max_length",
        "page_table",
        "done",
        "history_stride",
        "table_stride",
        "num_slots",
        "num_rows",
    )


class LaneArgs(_Tensors):
    """Mirror of `struct step_lanes`."""

    _fields_ = _layout(
        "slots",
        "draft_limit",
        "slot_gens",
        "guided",
        "drafting",
        "kinds",
        "drafts",
        "num_drafts",
        "forced",
        "num_jump_forward",
        "num_emitted",
        "finish",
        "blocked",
    )


class StoreArgs(_Tensors):
    """Mirror of `struct step_store`."""

    _fields_ = _layout("masks", "kinds", "forced", "cached", "mask_words")


class PostArgs(_Tensors):
    """Mirror of `struct step_post`."""

    _fields_ = _layout(
        "slots", "slot_gens", "commit_pos", "n_commit", "n_draft", "need_rows", "tokens", "kinds", "forced"
    )


class NativeStep:
    """The launches over the buffers of one engine. Used by one thread at a time."""

    def __init__(self, slots: SlotArgs, lanes: LaneArgs) -> None:
        self._slots, self._lanes = slots, lanes
        self._lib = native_short()
        self._where = ctypes.byref(slots), ctypes.byref(lanes)
        self._inputs: tuple[torch.Tensor, ...] = ()
        """Of the last `load`, held so that a tensor that is the same object has the same address."""
        self._input_args: tuple[Any, ...] = ()

    def load(
        self, num_lanes: int, ids_BP: torch.Tensor, positions_BP: torch.Tensor, page_table_BN: torch.Tensor
    ) -> None:
        """Cut the step's inputs from the slots. `ids_BP` int64, the others int32; all contiguous."""
        inputs = ids_BP, positions_BP, page_table_BN
        if not self._inputs or not all(map(operator.is_, inputs, self._inputs)):
            assert all(tensor.is_contiguous() for tensor in inputs)
            assert ids_BP.dtype == torch.int64
            assert page_table_BN.shape[1] == self._slots.table_stride, page_table_BN.shape
            places = [ctypes.c_void_p(address(tensor)) for tensor in inputs]
            self._inputs, self._input_args = inputs, (ctypes.c_int64(positions_BP.shape[1]), *places)
        self._lib.lockstep_step_load(*self._where, ctypes.c_int64(num_lanes), *self._input_args)

    def block_ended(self, num_lanes: int) -> None:
        """Before sampling: make every row of a slot that has ended DEFER."""
        self._lib.lockstep_step_block_ended(*self._where, ctypes.c_int64(num_lanes))

    def mark_ended(self, num_lanes: int) -> None:
        """After sampling: mark the slots that ended, or that were blocked for good."""
        self._lib.lockstep_step_mark_ended(*self._where, ctypes.c_int64(num_lanes))

    def advance(self, num_lanes: int, store: StoreArgs | None) -> None:
        """Say which lanes draft, and drop the cached rows of the lanes that emitted a token; None: none is guided."""
        self._lib.lockstep_step_advance(
            *self._where, ctypes.c_int64(num_lanes), None if store is None else ctypes.byref(store)
        )

    def pack(self, num_lanes: int, store: StoreArgs, post: PostArgs, k: int, max_rows: int) -> None:
        """Fill the inputs of a post."""
        rest = ctypes.byref(store), ctypes.byref(post), ctypes.c_int32(k), ctypes.c_int32(max_rows)
        self._lib.lockstep_step_pack(*self._where, ctypes.c_int64(num_lanes), *rest)

    def cache_rows(self, num_lanes: int, store: StoreArgs, post: PostArgs, k: int, masks: int) -> None:
        """Cache the rows that came; `masks` is the address of the mask rows [S - 1, R, W'], 0 where none came."""
        rest = ctypes.byref(store), ctypes.byref(post), ctypes.c_int32(k), ctypes.c_void_p(masks)
        self._lib.lockstep_step_cache_rows(*self._where, ctypes.c_int64(num_lanes), *rest)

    def take_jump_forward(self, num_lanes: int, post: PostArgs, vocab_size: int) -> None:
        """Take the legal tokens at the front of each proposal."""
        self._lib.lockstep_step_take_jump_forward(
            *self._where, ctypes.c_int64(num_lanes), ctypes.byref(post), ctypes.c_int32(vocab_size)
        )

    def drop_drafts(self, num_lanes: int) -> None:
        """Leave no drafts to the lanes that emitted a token."""
        self._lib.lockstep_step_drop_drafts(*self._where, ctypes.c_int64(num_lanes))

    def __repr__(self) -> str:
        return f"<NativeStep of {self._slots.num_slots - 1} slots>"
