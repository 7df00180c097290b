"""State of sampling on a device, next to the slots' parameters: rules, token counts, mask rows, and scratch.

Invariant: everything is allocated before capture and never moves. Needs no Triton, so that a CPU install may
import it. Not responsible for: the kernels (see rows.py, filters.py).

Shapes: S slots, R rows a slot, V vocabulary, W' words of a mask row's stride, X numbers of packed rules, N rows of a
step at most (lanes times rows), C tiles of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 2048
"""Columns of a tile: small enough that four rows of a large vocabulary fill the chip."""
MAX_BIASES = 1024
"""Largest number of biases of a slot."""
SEEN = 1 << 30
"""Bit of `seen_SV`: the token is in the prompt or the answer; the bits below count it in the answer."""


@dataclass(frozen=True, slots=True)
class SlotBiases:
    """Numbers that are added to logits of a slot. Writer: the engine, when a sequence gets the slot (`write`)."""

    ids_SX: torch.Tensor
    """int32, tokens, rising; X is `MAX_BIASES`."""
    values_SX: torch.Tensor
    """float32."""
    num_S: torch.Tensor
    """int32, biases of the slot."""

    @classmethod
    def allocate(cls, num_slots: int, device: torch.device) -> SlotBiases:
        """Return a state without biases."""
        shape = (num_slots, MAX_BIASES)
        ids_SX, values_SX = (torch.zeros(shape, dtype=kind, device=device) for kind in (torch.int32, torch.float32))
        return cls(ids_SX, values_SX, torch.zeros(num_slots, dtype=torch.int32, device=device))

    def write(self, slot: int, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Set a slot's biases: int32 tokens that rise, and float32, of one length, at most `MAX_BIASES`."""
        count = len(ids)
        assert count == len(values) <= MAX_BIASES, (count, len(values))
        self.ids_SX[slot, :count] = ids.to(self.ids_SX.device, non_blocking=True)
        self.values_SX[slot, :count] = values.to(self.ids_SX.device, non_blocking=True)
        self.num_S[slot].fill_(count)


@dataclass(frozen=True, slots=True)
class SlotRows:
    """State of a slot's sampling besides `SlotParams`."""

    masks_SRW: torch.Tensor
    """int32 bitmasks, bit v % 32 of word v / 32: token v is legal. Writer: the sync. The last stride is 1."""
    rules_SX: torch.Tensor
    """int32, `pack_rules` of the slot, zeros: none.
    Writer: the engine, when a sequence gets the slot (`write_rules`)."""
    seen_SV: torch.Tensor
    """int32, see `SEEN`. Writer: the engine when a sequence gets the slot (`count_seen`), then the step."""
    done_S: torch.Tensor
    """bool, the slot's sequence has ended and emits no more. The step sets it;
    the engine clears it when a sequence gets the slot."""
    biases: SlotBiases

    @classmethod
    def allocate(
        cls, num_slots: int, vocab_size: int, masks_SRW: torch.Tensor, done_S: torch.Tensor, *, max_rules: int = 256
    ) -> SlotRows:
        """Return zeroed state next to the given mask rows and flags, on their device."""
        rules_SX, seen_SV = (
            torch.zeros(num_slots, width, dtype=torch.int32, device=masks_SRW.device)
            for width in (max_rules, vocab_size)
        )
        return cls(masks_SRW, rules_SX, seen_SV, done_S, SlotBiases.allocate(num_slots, masks_SRW.device))

    def write_rules(self, slot: int, packed: torch.Tensor) -> None:
        """Set a slot's rules (`kernels.accept.pack_rules`); ValueError when they have more than X numbers."""
        room = self.rules_SX.shape[1]
        if len(packed) > room:
            raise ValueError(f"rules of slot {slot}: {len(packed)} numbers, at most {room} are allowed")
        self.rules_SX[slot, : len(packed)] = packed.to(self.rules_SX.device, non_blocking=True)

    def count_seen(self, slot: int, tokens_L: torch.Tensor, prompt_length: int) -> None:
        """Count a sequence that takes the slot: `tokens_L` is prompt and answer, any integer dtype."""
        tokens, row = tokens_L.to(self.seen_SV.device).long(), self.seen_SV[slot]
        row.zero_()
        row.index_add_(0, tokens[prompt_length:], torch.ones_like(tokens[prompt_length:], dtype=torch.int32))
        row[tokens] |= SEEN


@dataclass(frozen=True, slots=True)
class RowScratch:
    """Scratch of the row kernels; content has no meaning between calls. One stream at a time."""

    best_NC: torch.Tensor  # float32
    best_column_NC: torch.Tensor  # int32
    peak_NC: torch.Tensor  # float32
    logits_NV: torch.Tensor  # float32, masked logits of the rows with filters
    chosen_N: torch.Tensor  # int32, columns of the rows with filters
    block: int
    """Columns of a tile; a multiple of 32 and a power of two."""

    @classmethod
    def allocate(
        cls, num_rows: int, vocab_size: int, device: torch.device | str, *, filters: bool = True, block: int = BLOCK
    ) -> RowScratch:
        """Return scratch for `num_rows` rows of `vocab_size` columns; without `filters` it is small."""
        tiles = -(-vocab_size // block)

        def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            empty(torch.float32, num_rows, tiles),
            empty(torch.int32, num_rows, tiles),
            empty(torch.float32, num_rows, tiles),
            empty(torch.float32, num_rows if filters else 0, tiles * block),
            empty(torch.int32, num_rows),
            block,
        )


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """The part of `StepTensors` that only a GPU reads."""

    slots: SlotRows
    scratch: RowScratch
    filters: bool = True
    """Static: False leaves the kernel of top-k, top-p and min-p out, and no lane may need them."""
    logprobs: bool = True
    """Static: False leaves the kernel of log-probabilities out, and no lane may need them."""
