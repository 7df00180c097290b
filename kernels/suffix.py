"""Drafts by votes: the tokens that followed the end of a sequence before, in its own text and in a ring of answers.

The rule is at the top of native/suffix.c. Invariant: a call reads and writes the arrays that it is given, and allocates
nothing; `SuffixRing` owns its arrays. Not responsible for: which ring a sequence has (see
gpu_engine/drafters/suffix_index.py). CPU only.

Shapes: B lanes, S slots, R rows a slot, L tokens of a history.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from kernels.library import address, native

SEPARATOR = -1
"""Between two texts of a ring; it equals no token."""
BYTES_PER_TOKEN = 12
"""Of a ring: the token, the distance to the same pair before, and half a head of a chain."""
MIN_CAPACITY = 256
MAX_CAPACITY = 1 << 30

_POINTERS = (
    *("slots", "num_emitted", "num_jump_forward", "history", "length", "prompt_length", "draft_limit", "max_length"),
    *("rings", "drafts", "num_drafts", "from_ring"),
)


class _Ring(ctypes.Structure):
    """Mirror of `struct suffix_ring`."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("tokens", "distance", "head")],
        *[(name, ctypes.c_int64) for name in ("end", "mask", "head_mask")],
    ]


class _Args(ctypes.Structure):
    """Mirror of `struct suffix_args`."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in (*_POINTERS, "words")],
        *[(name, ctypes.c_int64) for name in ("history_stride", "row_stride")],
        *[(name, ctypes.c_int32) for name in ("num_lanes", "max_drafts", "min_run", "max_run")],
    ]


class _Words(ctypes.Structure):
    """Mirror of `struct bare_words`."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("start", "tokens", "quotes")],
        ("num_tokens", ctypes.c_int64),
    ]


class _CountArgs(ctypes.Structure):
    """Mirror of `struct count_args`."""

    _fields_ = [
        *[
            (name, ctypes.c_void_p)
            for name in ("slots", "num_emitted", "num_verified", "num_accepted", "from_ring", "counts")
        ],
        ("num_lanes", ctypes.c_int32),
    ]


class SuffixRing:
    """The newest tokens of some texts, `capacity` of them at most, a power of two from `MIN_CAPACITY` on."""

    def __init__(self, capacity: int) -> None:
        assert MIN_CAPACITY <= capacity <= MAX_CAPACITY, capacity
        assert capacity & (capacity - 1) == 0, capacity
        self.capacity = capacity
        self._tokens = torch.zeros(capacity, dtype=torch.int32)
        self._distance = torch.zeros(capacity, dtype=torch.int32)
        self._head = torch.zeros(capacity // 2, dtype=torch.int64)
        arrays = (address(self._tokens), address(self._distance), address(self._head))
        self._ring = _Ring(*arrays, 0, capacity - 1, capacity // 2 - 1)

    @property
    def num_tokens(self) -> int:
        """Tokens ever written, separators included; more than `capacity` once the oldest are overwritten."""
        return int(self._ring.end)

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays."""
        return self.capacity * BYTES_PER_TOKEN

    @property
    def address(self) -> int:
        """Address of the native ring, for `SuffixArguments.rings_S`; valid as long as this object lives."""
        return ctypes.addressof(self._ring)

    def add(self, token_ids: Sequence[int]) -> None:
        """Append a text and a separator. Of a text longer than the ring, the end is left."""
        text = torch.tensor(token_ids, dtype=torch.int32)
        native().lockstep_suffix_add(
            ctypes.byref(self._ring), ctypes.c_void_p(address(text)), ctypes.c_int64(len(token_ids))
        )

    def grown(self, capacity: int) -> SuffixRing:
        """Return a larger ring with the same texts."""
        larger = SuffixRing(capacity)
        native().lockstep_suffix_copy(ctypes.byref(larger._ring), ctypes.byref(self._ring))
        return larger

    def __repr__(self) -> str:
        return f"<SuffixRing {min(self.num_tokens, self.capacity)} of {self.capacity} tokens>"


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixLanes:
    """What a step says of its lanes, int32 [B], contiguous."""

    slots_B: torch.Tensor
    """Negative: an idle lane, whose slot is unchanged."""
    num_emitted_B: torch.Tensor
    """0: the slot's drafts are unchanged, since mask rows are cached for them."""
    num_jump_forward_B: torch.Tensor
    """Drafts that the lane has already, in `drafts_SR` and after its history; negative: its drafts are unchanged."""
    num_verified_B: torch.Tensor
    """Drafts that the step has verified."""
    num_accepted_B: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixSlots:
    """What the slots hold, int32 and contiguous unless said otherwise."""

    history_SL: torch.Tensor
    """Prompt and answer. Drafts are written after them as well; the next tokens overwrite these."""
    length_S: torch.Tensor
    """Without the drafts."""
    prompt_length_S: torch.Tensor
    draft_limit_S: torch.Tensor
    """Drafts of a step up to which a lane may get more than its jump-forward tokens."""
    max_length_S: torch.Tensor
    """Drafts end one token below it."""
    rings_S: torch.Tensor
    """int64, `SuffixRing.address` of the slot's ring; 0: none."""
    drafts_SR: torch.Tensor
    """Result."""
    num_drafts_S: torch.Tensor
    """Result, jump-forward tokens included."""
    from_ring_S: torch.Tensor
    """Result: bit j is set where the ring's places chose draft j."""


@dataclass(frozen=True, slots=True)
class BareWords:
    """The tokens of a vocabulary that begin with a space, spelled without it; V tokens."""

    start_V: torch.Tensor
    """int32 [V + 1], where the spelling of each token begins in `tokens`. It ends where the next one's begins."""
    tokens: torch.Tensor
    """int32, the spellings of all tokens."""
    quotes_V: torch.Tensor
    """uint8 [V], 1 where the text of a token ends with a quote."""

    @classmethod
    def of(cls, spellings: Mapping[int, Sequence[int]], quotes: Iterable[int], vocab_size: int) -> BareWords:
        """Args: `spellings` has the tokens of some words without their space, `quotes` the tokens that end with a
        quote."""
        assert all(0 <= each < vocab_size for spelling in spellings.values() for each in spelling), "no such token"
        sizes = [len(spellings.get(token, ())) for token in range(vocab_size)]
        tokens = [each for token in range(vocab_size) for each in spellings.get(token, ())]
        quotes_V = torch.zeros(vocab_size, dtype=torch.uint8)
        quotes_V[list(quotes)] = 1
        return cls(
            torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32),
            torch.tensor(tokens or [SEPARATOR], dtype=torch.int32),
            quotes_V,
        )


class SuffixVotes:
    """Drafts over fixed arrays, so that a step fills in only its size.

    A place counts if its last `min_run` tokens equal the end of the sequence (in a ring at least two); more than
    `max_run` equal tokens count as `max_run`. With `words`, a word after a quote equals the same word after a space.
    """

    def __init__(
        self, lanes: SuffixLanes, slots: SuffixSlots, min_run: int, max_run: int, words: BareWords | None = None
    ) -> None:
        assert slots.rings_S.dtype == torch.int64
        assert slots.drafts_SR.shape[1] <= 31, "from_ring_S has a bit for each draft"
        assert 1 <= min_run <= max_run, (min_run, max_run)
        self._lanes, self._slots, self._words = lanes, slots, words
        """Held, since the native arguments are addresses."""
        self._counts = torch.zeros(2, dtype=torch.int64)
        s = slots
        read = (s.history_SL, s.length_S, s.prompt_length_S, s.draft_limit_S, s.max_length_S, s.rings_S)
        written = (s.drafts_SR, s.num_drafts_S, s.from_ring_S)
        of_lanes = (lanes.slots_B, lanes.num_emitted_B, lanes.num_jump_forward_B)
        strides = (s.history_SL.stride(0), s.drafts_SR.stride(0))
        places = _addresses(*of_lanes, *read, *written)
        self._native_words = words and _Words(
            address(words.start_V), address(words.tokens), address(words.quotes_V), len(words.quotes_V)
        )
        at_words = ctypes.addressof(self._native_words) if self._native_words else None
        self._args = _Args(*places, at_words, *strides, 0, 0, min_run, max_run)
        self._most_lanes, self._most_drafts = len(lanes.slots_B), s.drafts_SR.shape[1]
        self._jump_forward = address(lanes.num_jump_forward_B)
        verified = (lanes.slots_B, lanes.num_emitted_B, lanes.num_verified_B, lanes.num_accepted_B)
        self._count_args = _CountArgs(*_addresses(*verified, s.from_ring_S, self._counts), 0)

    def draft(self, num_lanes: int, max_drafts: int, *, jump_forward: bool) -> None:
        """Write the drafts of the first `num_lanes` lanes, at most `max_drafts` for each.

        `jump_forward`: `num_jump_forward_B` is valid for this step; else no lane has jump-forward tokens.
        """
        assert 0 <= num_lanes <= self._most_lanes, num_lanes
        self._args.num_lanes, self._args.max_drafts = num_lanes, min(max_drafts, self._most_drafts)
        self._args.num_jump_forward = self._jump_forward if jump_forward else None
        native().lockstep_suffix_draft(ctypes.byref(self._args))

    def count(self, num_lanes: int) -> None:
        """Count the ring's drafts among those that the step verified; called before the next ones are written."""
        self._count_args.num_lanes = num_lanes
        native().lockstep_suffix_count(ctypes.byref(self._count_args))

    @property
    def num_verified(self) -> int:
        """Drafts of rings that were verified, since the start."""
        return int(self._counts[0])

    @property
    def num_accepted(self) -> int:
        """Drafts of rings that became output, since the start."""
        return int(self._counts[1])

    def __repr__(self) -> str:
        return f"<SuffixVotes {self.num_accepted} of {self.num_verified} drafts of rings accepted>"


def _addresses(*tensors: torch.Tensor) -> list[int]:
    assert all(x.is_contiguous() and x.dtype in (torch.int32, torch.int64) for x in tensors)
    return [address(x) for x in tensors]
