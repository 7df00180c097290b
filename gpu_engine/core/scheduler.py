"""Who runs next: seats sequences in slots, cuts prompts into prefill chunks, picks the decode batch, preempts.

Decides and returns a `Plan`; the engine acts on it. First come, first served. One invariant: a seated sequence owns its
pages and its (slot, slot_gen), and `leave` or `preempt` takes both back. Pure: no tensors, no clocks, no I/O.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from gpu_engine.api.prefill_shapes import PrefillShapes
from gpu_engine.core.kv_cache import PageAllocator

Payload = TypeVar("Payload")


class GrammarState(enum.Enum):
    """Where a sequence stands with its grammar."""

    FREE = enum.auto()  # no grammar
    OPENING = enum.auto()  # the sidecar compiles or binds; prefill may go on
    OPEN = enum.auto()  # its matcher stands; may decode
    SILENT = enum.auto()  # its matcher stands, in a sidecar that shows no life; waits with its pages for a sign
    LOST = enum.auto()  # the sidecar died; waits with its pages for the next one, or there for its turn (suspects.py)


@dataclass(slots=True, eq=False)
class Sequence(Generic[Payload]):
    """Scheduling state of one request. The scheduler writes slot, slot_gen and pages; the engine the rest."""

    payload: Payload
    length: int
    """Tokens known: prompt plus answer."""
    guided: bool
    grammar_state: GrammarState = GrammarState.FREE
    slot: int = -1
    slot_gen: int = 0
    pages: list[int] = field(default_factory=list)
    prefilled: int = 0
    """Tokens whose keys and values are in the pages. Full pages of them are others', too, and not written again."""
    found: int = 0
    """Of those, in its seat: what was there before its first chunk."""
    noted: int = 0
    """Full pages whose tokens others may find."""
    looked: int = -1
    """`PageAllocator.known` when its beginning was last looked for."""
    parked: bool = False
    """Deferred by the sidecar: out of the batch until its answer is there."""
    order: int = 0
    """Arrival; younger sequences are preempted first."""

    @property
    def prefill_end(self) -> int:
        """All but the last token: that one is the first input of the first step."""
        return self.length - 1

    @property
    def decoding(self) -> bool:
        """May be in a decode batch."""
        ready = self.grammar_state in (GrammarState.FREE, GrammarState.OPEN)
        return self.slot >= 0 and ready and not self.parked and self.prefilled >= self.prefill_end

    def __repr__(self) -> str:
        state = "waiting" if self.slot < 0 else f"slot {self.slot} gen {self.slot_gen} pages {len(self.pages)}"
        return f"<Sequence {self.payload} {state} {self.grammar_state.name} {self.prefilled}/{self.length}>"


@dataclass(frozen=True, slots=True)
class Chunk(Generic[Payload]):
    """Tokens [start, end) of a sequence to be prefilled now."""

    sequence: Sequence[Payload]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Plan(Generic[Payload]):
    """One turn of the engine loop, in this order."""

    preempted: tuple[Sequence[Payload], ...]
    """Lost their slot and pages; they are waiting again, at the front."""
    running: tuple[Sequence[Payload], ...]
    """Got a slot just now."""
    prefill: tuple[Chunk[Payload], ...]
    """To be run in one forward; the oldest first."""
    decode: tuple[Sequence[Payload], ...]

    @property
    def idle(self) -> bool:
        """Nothing to run."""
        return not self.prefill and not self.decode


class Scheduler(Generic[Payload]):
    """Slots and waiting line. Used by the engine thread alone."""

    def __init__(
        self,
        num_slots: int,
        allocator: PageAllocator,
        *,
        prefill_chunk: int,
        lookahead: int,
        shapes: PrefillShapes,
        tokens_of: Callable[[Sequence[Payload]], list[int]] | None = None,
    ) -> None:
        """Args: see below.

        lookahead: tokens beyond its length that a decode step may write (R).
        shapes: what fits one prefill.
        tokens_of: the tokens of a sequence, by which pages that were prefilled before are found; None: none are.
        """
        self.allocator, self._shapes, self._tokens_of = allocator, shapes, tokens_of
        self._chunk, self._lookahead = prefill_chunk, lookahead
        self._slots: list[Sequence[Payload] | None] = [None] * num_slots
        self._gens = [0] * num_slots
        self._waiting: deque[Sequence[Payload]] = deque()
        self._arrivals = 0
        self._stuck: tuple[Sequence[Payload], int, int] | None = None
        """The first in line did not fit, and (known, left) of the allocator then."""
        self.found_tokens = 0
        """Tokens that needed no prefill, all together."""

    def add(self, sequence: Sequence[Payload]) -> None:
        """Put a new sequence at the end of the line."""
        self._arrivals += 1
        sequence.order = self._arrivals
        self._waiting.append(sequence)

    def leave(self, sequence: Sequence[Payload]) -> None:
        """Forget a sequence, wherever it is; its slot and pages are free."""
        if sequence.slot >= 0:
            self._release_slot(sequence)
        else:
            self._waiting.remove(sequence)

    def plan(self) -> Plan[Payload]:
        """Decide one turn: make room for the decode batch, seat who fits, choose what to prefill."""
        preempted = self._make_room()
        running = () if preempted else self._assign_slots()
        chunks = self._chunks()  # first: of a prompt that is found nothing may be left
        decode = tuple(s for s in self.running if s.decoding)
        return Plan(tuple(preempted), tuple(running), chunks, decode)

    def keep(self, sequence: Sequence[Payload]) -> None:
        """Let others that begin with the same tokens use what is prefilled of a sequence, now and behind its end."""
        if self._tokens_of is not None and sequence.prefilled // self.allocator.page_size > sequence.noted:
            tokens = self._tokens_of(sequence)[: sequence.prefilled]
            sequence.noted = self.allocator.remember(tokens, sequence.pages, sequence.noted)

    def preempt(self, sequence: Sequence[Payload]) -> None:
        """Take the slot and the pages; the sequence waits at the front, to be prefilled again or to find them."""
        self._release_slot(sequence)
        sequence.prefilled = 0
        self._waiting.appendleft(sequence)

    def _chunks(self) -> tuple[Chunk[Payload], ...]:
        """The next chunk of the oldest, then of everyone behind who fits beside those before.

        Whether a sequence is in depends on older ones alone, so who is passed over is no later for it. Chunks end at
        multiples of the chunk size: behind what was found of it, a prompt is cut the same way in company or not.
        """
        chosen: list[Chunk[Payload]] = []
        longest = 0
        for s in sorted((s for s in self.running if s.prefilled < s.prefill_end), key=lambda s: s.order):
            if chosen and self._shapes.of(len(chosen) + 1, longest) is None:
                break
            if self._find_more(s):
                continue
            end = min(s.prefill_end, (s.prefilled // self._chunk + 1) * self._chunk)
            length = max(longest, end - s.prefilled)
            if not chosen or self._shapes.of(len(chosen) + 1, length) is not None:
                chosen.append(Chunk(s, s.prefilled, end))
                longest = length
        return tuple(chosen)

    def _make_room(self) -> list[Sequence[Payload]]:
        preempted: list[Sequence[Payload]] = []
        for sequence in sorted((s for s in self.running if s.decoding), key=lambda s: s.order):
            while sequence.slot >= 0 and not self.allocator.grow(sequence.pages, sequence.length + self._lookahead):
                youngest = max(self.running, key=lambda s: s.order)
                self.preempt(youngest)
                preempted.append(youngest)
        return preempted

    def _assign_slots(self) -> list[Sequence[Payload]]:
        running: list[Sequence[Payload]] = []
        free = [slot for slot, sequence in enumerate(self._slots) if sequence is None]
        for slot in free:
            if not self._waiting or not self._fits(self._waiting[0]):
                break
            sequence = self._waiting.popleft()
            self._gens[slot] += 1
            sequence.slot, sequence.slot_gen = slot, self._gens[slot]
            sequence.grammar_state = GrammarState.OPENING if sequence.guided else GrammarState.FREE
            self._slots[slot] = sequence
            running.append(sequence)
        return running

    def _fits(self, sequence: Sequence[Payload]) -> bool:
        """Give a sequence its pages, those first that hold its beginning already; False and nothing: too few are free.

        At least its last token is left, which is the first input of its first step.
        """
        state = (sequence, self.allocator.known, self.allocator.left)
        if state == self._stuck:
            return False
        pages = self._share(sequence)
        if not self.allocator.grow(pages, sequence.length + self._lookahead):
            self.allocator.free(pages)
            self._stuck = state
            return False
        sequence.pages = pages
        self.found_tokens += sequence.found
        return True

    def _share(self, sequence: Sequence[Payload]) -> list[int]:
        """Return the pages that hold its beginning; it counts as prefilled."""
        if self._tokens_of is None:
            return []
        found = self.allocator.share(self._tokens_of(sequence)[: sequence.prefill_end])
        sequence.looked, sequence.noted = self.allocator.known, len(found)
        sequence.prefilled = sequence.found = len(found) * self.allocator.page_size
        return found

    def _find_more(self, sequence: Sequence[Payload]) -> bool:
        """Look again before its first chunk: who came with it may be prefilled by now. True: there is nothing left.

        Its own pages were not written, nor told to anybody.
        """
        begun = sequence.prefilled > sequence.found
        if self._tokens_of is None or begun or sequence.looked == self.allocator.known:
            return False
        before = sequence.found
        found = self._share(sequence)
        given_back = sequence.pages[: len(found)]
        sequence.pages[: len(found)] = found
        self.allocator.free(given_back)
        self.found_tokens += sequence.found - before
        return sequence.prefilled == sequence.prefill_end

    def _release_slot(self, sequence: Sequence[Payload]) -> None:
        slot, sequence.slot, sequence.parked = sequence.slot, -1, False
        self._slots[slot] = None
        try:
            self.keep(sequence)
        finally:
            self.allocator.free(sequence.pages)

    @property
    def running(self) -> list[Sequence[Payload]]:
        """Sequences that hold a slot, by slot."""
        return [s for s in self._slots if s is not None]

    @property
    def waiting(self) -> list[Sequence[Payload]]:
        """The line, first first."""
        return list(self._waiting)

    def sequence(self, slot: int, slot_gen: int) -> Sequence[Payload] | None:
        """Return who holds (slot, slot_gen); None when that owner is gone."""
        holder = self._slots[slot]
        return holder if holder is not None and holder.slot_gen == slot_gen else None

    def check_integrity(self) -> None:
        """Assert that every slot has one owner, and every page as many as begin with its tokens."""
        self.allocator.check_integrity([s.pages for s in self.running])
        assert all(s is None or s.slot == slot for slot, s in enumerate(self._slots))
        assert all(s.slot < 0 and not s.pages for s in self._waiting)

    def __repr__(self) -> str:
        return (
            f"<Scheduler seated={len(self.running)}/{len(self._slots)} waiting={len(self._waiting)} {self.allocator}>"
        )
