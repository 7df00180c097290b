"""Decides each iteration: assigns slots, cuts prompts into prefill chunks, picks the decode batch, preempts.

`Scheduler.plan` returns a `Plan`; the engine loop acts on it. The waiting queue is in the order of priorities, and
first come, first served among equal ones; a sequence that has waited for too long is ahead of all others. A priority
decides nothing else: a sequence that has had a slot is never preempted for one that had its first slot later. A
`SlotOrder` may choose another sequence of the queue, as tenants do.
Invariant: a running sequence owns its pages and its (slot, slot_gen); `remove` and `preempt` take both back. Pure: no
tensors, no clocks, no I/O; the caller says what time it is.

Not responsible for: page accounting (see kv_cache.py), running what was planned (see loop.py).
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, Protocol, Self, TypeVar

from gpu_engine.api.prefill_shapes import PrefillShapes
from gpu_engine.api.request import Salt, Scheduling, TenantShare
from gpu_engine.core.kv_cache import PageAllocator

_EARLY_TOKENS = 32
"""The forward of a shorter chunk may end before a matcher is open, so its sequence waits for the matcher."""


class GrammarState(enum.Enum):
    """State of a sequence's matcher in the grammar process."""

    UNCONSTRAINED = enum.auto()
    """The sequence has no grammar."""
    OPENING = enum.auto()
    """The grammar process compiles or binds; the prefill goes on meanwhile."""
    OPEN = enum.auto()
    """The matcher is at the committed tokens; the sequence may decode."""
    SILENT = enum.auto()
    """The matcher exists, but its process shows no life: the sequence waits, with its pages, for a heartbeat."""
    LOST = enum.auto()
    """There is no matcher: the sequence waits, with its pages, for the next process, or in quarantine for its trial."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Scheduling state of one sequence. The scheduler writes slot, slot_gen and page fields; the engine the rest."""

    length: int
    """Tokens known: prompt plus answer."""
    guided: bool
    """The sequence has a grammar."""
    grammar_state: GrammarState = GrammarState.UNCONSTRAINED
    slot: int = -1
    """-1 while the sequence waits in the queue."""
    slot_gen: int = 0
    """Number of sequences that have held the slot, this one included."""
    pages: list[int] = field(default_factory=list)
    prefilled: int = 0
    """Tokens whose keys and values are in the pages. Full pages of these may be shared, and are never rewritten."""
    num_cached_tokens: int = 0
    """Tokens of `prefilled` that the prefix cache had when the sequence got its slot."""
    num_indexed_pages: int = 0
    """Full pages, from the first on, that other sequences can find in the prefix cache."""
    restores: int = -1
    """The place of the snapshot that the recurrent layers resume from at `prefilled`; -1: none, or it is resumed. The
    engine clears it."""
    snapshot_ends: tuple[int, ...] = ()
    """Positions at the end of a page, at which the prefill stops once more so that a snapshot can be kept there."""
    searched_version: int = -1
    """`PageAllocator.index_version` at the last search of the prefix cache; -1: never searched."""
    deferred: bool = False
    """The grammar process deferred its rows: the sequence is out of the batch until they arrive."""
    scheduling: Scheduling = field(default_factory=Scheduling)
    """The request's own: its priority, the longest wait for its first slot, and its tenant."""
    salt: Salt = ""
    """The prefix cache shares pages only among sequences with the same salt."""
    scored: bool = False
    """Log-probabilities of its prompt are wanted: it is prefilled in separate chunks, and uses no cached page, for
    which there are no logits. The engine clears it with the first token."""
    group: tuple[Self, ...] = ()
    """The beams of a search, this one among them: they get their slots together and lose them together, and the first
    of them waits in the queue for all. Empty: the sequence is no beam."""
    early: bool = False
    """It may be in the step of its last chunk while its matcher is being opened: the step posts it last."""
    held: bool = False
    """A beam that waits for the other beams of its step, or that has no tokens (`length` 0); a sequence that is
    prefilled for another engine, and never decodes; or an exact answer while another one makes its shared tries."""
    order: int = 0
    """Number of its first slot, in the order in which slots were given; 0: it had none yet. The youngest sequence, with
    the largest number, is preempted first."""
    waits_since_s: float = 0.0
    """When it came into the waiting queue: at its arrival, or when it was preempted."""
    starving: bool = False
    """It has waited so long that no sequence that came later is ahead of it."""
    ended: bool = False
    """It has all of its tokens, and holds its slot until the engine removes it."""
    reserved: int = 0
    """The tokens whose pages it has from its first slot on: all that it may ever need, so it is never preempted. 0:
    it gets pages as it grows, and may be preempted."""

    @property
    def priority(self) -> int:
        """A sequence with a higher one leaves the waiting queue first."""
        return self.scheduling.priority

    @property
    def tenant(self) -> TenantShare | None:
        """The sequence's tenant; None: no tenant, and only its place in the queue decides."""
        return self.scheduling.tenant

    @property
    def prefill_end(self) -> int:
        """Tokens to prefill: all but the last, which is the first input of the first decode step."""
        return self.length - 1

    @property
    def decoding(self) -> bool:
        """The sequence may be in a decode batch."""
        return self.may_decode_at(self.prefilled)

    def may_decode_at(self, prefilled: int) -> bool:
        """Return whether the sequence may be in a decode batch once `prefilled` of its tokens are prefilled."""
        state = self.grammar_state
        ready = state is GrammarState.UNCONSTRAINED or state is GrammarState.OPEN
        return ready and self._is_free and prefilled >= self.prefill_end

    def may_begin_in(self, chunk: Chunk[Self]) -> bool:
        """Return whether the sequence may be in the decode batch of the forward of this chunk, before it is open."""
        ends = chunk.end == self.prefill_end and chunk.end - chunk.start >= _EARLY_TOKENS
        return ends and self.early and self.grammar_state is GrammarState.OPENING and self._is_free

    @property
    def _is_free(self) -> bool:
        return not (self.deferred or self.ended or self.held) and self.slot >= 0

    @property
    def members(self) -> tuple[Self, ...]:
        """Its beam group, or itself."""
        return self.group or (self,)

    def __repr__(self) -> str:
        state = "waiting" if self.slot < 0 else f"slot {self.slot} gen {self.slot_gen} pages {len(self.pages)}"
        return f"<Sequence {state} {self.grammar_state.name} {self.prefilled}/{self.length}>"


S = TypeVar("S", bound=Sequence)


class SlotOrder(Protocol[S]):
    """Chooses the waiting sequence that gets the next slot. Used only by the engine thread."""

    def arrived(self, sequence: S, waiting: Iterable[S]) -> None:
        """Note a sequence that enters the queue; `waiting` is the queue before it."""

    def next(self, waiting: Iterable[S]) -> S | None:
        """Return the sequence that gets the next slots; None: no sequence may have them."""

    def assigned(self, sequence: S) -> None:
        """Note that a sequence, the first of its group, got its slots."""

    def released(self, sequence: S) -> None:
        """Note that a sequence, the first of its group, loses its slots."""


@dataclass(frozen=True, slots=True)
class Chunk(Generic[S]):
    """Tokens [start, end) of a sequence, to be prefilled in this iteration."""

    sequence: S
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Plan(Generic[S]):
    """One iteration of the engine loop; the loop acts on the fields in this order."""

    preempted: tuple[S, ...]
    """Sequences that lost their slot and pages; they wait ahead of the others of their priority."""
    assigned: tuple[S, ...]
    """Sequences that were given a slot in this iteration."""
    prefill: tuple[Chunk[S], ...]
    """Chunks to be run in one forward, the oldest sequence first."""
    decode: tuple[S, ...]
    """The batch of the decode step."""
    scored: Chunk[S] | None = None
    """A chunk to be run in a separate forward, before the others: its logits are wanted."""
    expired: tuple[S, ...] = ()
    """Sequences whose `max_queue_s` is over: they are out of the waiting queue, and the engine removes them."""

    @property
    def idle(self) -> bool:
        """There is nothing to run."""
        return not self.prefill and not self.decode and self.scored is None


class Scheduler(Generic[S]):
    """Slots and waiting queue. Used only by the engine thread; other threads may read `running` and `waiting`."""

    def __init__(
        self,
        num_slots: int,
        allocator: PageAllocator,
        *,
        prefill_chunk: int,
        lookahead: int,
        shapes: PrefillShapes,
        tokens_of: Callable[[S], list[int]] | None = None,
        max_batched_tokens: int = 0,
        scored_chunk: int = 1,
        max_starvation_s: float = math.inf,
        slot_order: SlotOrder[S] | None = None,
        snapshot_interval: int = 0,
    ) -> None:
        """Args: see below.

        prefill_chunk: chunks end at multiples of this number of tokens.
        lookahead: tokens beyond its length that the steps in flight may write for a sequence.
        shapes: the padded shapes that one prefill forward may have.
        tokens_of: returns the tokens of a sequence, by which the prefix cache is searched; None: no prefix cache.
        max_batched_tokens: tokens of one forward, over decoding sequences and prompts together: a prompt whose last
            chunk is in it also decodes in it. 0: prompts have separate forwards, with `prefill_chunk` and `shapes`.
        scored_chunk: chunks of scored sequences end at multiples of this number of tokens.
        max_starvation_s: the wait after which a sequence goes ahead of every one that came later.
        slot_order: chooses who gets the next slot; None: the first of the waiting queue.
        snapshot_interval: a multiple of `prefill_chunk`; where the allocator has snapshots, one is kept whenever a
            prompt is prefilled up to a multiple of this number of tokens.
        """
        self.allocator, self._shapes, self._tokens_of = allocator, shapes, tokens_of
        self._chunk, self.lookahead, self._max_batched_tokens = prefill_chunk, lookahead, max_batched_tokens
        self._scored_chunk_tokens = scored_chunk
        self._max_starvation_s, self._snapshot_interval = max_starvation_s, snapshot_interval
        self._slots: list[S | None] = [None] * num_slots
        self._gens = [0] * num_slots
        self._waiting: deque[S] = deque()
        self._expired: list[S] = []
        """Sequences that a plan named and that are not removed yet."""
        self._next_due_s = math.inf
        """When a wait in the queue is over next, or earlier: `plan` looks at the queue then."""
        self._admissions = 0
        self._slot_order = slot_order
        self._blocked: tuple[S, int, int] | None = None
        """The first waiting sequence that had too few pages, with the allocator's (index_version, num_available)."""
        self.num_cached_tokens = 0
        """Tokens of all sequences so far that the prefix cache had, so that they needed no prefill."""

    def add(self, sequence: S) -> None:
        """Put a new sequence into the waiting queue, after the others of its priority, since `waits_since_s`."""
        if self._slot_order is not None:
            self._slot_order.arrived(sequence, self._waiting)
        at = len(self._waiting)
        while at and not self._waiting[at - 1].starving and self._waiting[at - 1].priority < sequence.priority:
            at -= 1
        self._waiting.insert(at, sequence)
        self._next_due_s = min(self._next_due_s, self._due_s(sequence))

    def remove(self, sequence: S) -> None:
        """Remove a sequence with its group, running or waiting; slots and pages are released."""
        if sequence.slot >= 0:
            self._release_slots(sequence)
        elif sequence in self._expired:
            self._expired.remove(sequence)
        else:
            self._waiting.remove(sequence.members[0])

    def plan(self, now_s: float = 0.0) -> Plan[S]:
        """Decide one iteration: find pages for the decode batch, assign free slots, choose chunks to prefill.

        `now_s` is of the clock of `Sequence.waits_since_s`, and never goes back.
        """
        expired = self._look_at_waits(now_s) if now_s >= self._next_due_s else ()
        preempted = self._make_room(now_s)
        assigned = () if preempted else self._assign_slots()
        scored = self._scored_chunk()
        # Before the decode batch: the search of the prefix cache may leave nothing of a prompt to prefill.
        chunks = self._mixed_chunks(scored) if self._max_batched_tokens else self._chunks()
        ends = {c.sequence: c.end for c in chunks} if self._max_batched_tokens else {}
        early = {c.sequence for c in chunks if c.sequence.may_begin_in(c)} if ends else ()
        decode = tuple(s for s in self.running if s.may_decode_at(ends.get(s, s.prefilled)) or s in early)
        return Plan(tuple(preempted), tuple(assigned), chunks, decode, scored, expired)

    def index_pages(self, sequence: S) -> None:
        """Put the full pages that are prefilled so far into the prefix cache, for sequences with the same beginning."""
        if self._tokens_of is not None and sequence.prefilled // self.allocator.page_size > sequence.num_indexed_pages:
            sequence.num_indexed_pages = self.allocator.insert(
                self._tokens_of(sequence)[: sequence.prefilled],
                sequence.pages,
                num_indexed=sequence.num_indexed_pages,
                salt=sequence.salt,
            )

    def place_of_snapshot(self, sequence: S) -> int | None:
        """Return the place where the state after the prefilled tokens is to be kept; None: nowhere.

        One is kept at the end of the last full page of a prompt, where the prompt leaves an earlier one that has no
        snapshot there, and at multiples of `snapshot_interval`. Indexes the pages, and replaces them where others with
        the same tokens are indexed: the caller writes the page table again.
        """
        at, snapshots = sequence.prefilled, self.allocator.snapshots
        if snapshots is None or self._tokens_of is None or at % self.allocator.page_size:
            return None
        if at not in sequence.snapshot_ends and at % self._snapshot_interval:
            return None
        tokens = self._tokens_of(sequence)[:at]
        sequence.num_indexed_pages = self.allocator.adopt(tokens, sequence.pages, sequence.salt)
        self.index_pages(sequence)
        return self.allocator.add_snapshot(tokens, sequence.salt)

    def preempt(self, sequence: S, now_s: float = 0.0) -> None:
        """Take slot and pages of a sequence and put it into the waiting queue, ahead of the others of its priority.

        With its next slot it is prefilled again, or finds its pages in the prefix cache. A group loses its slots
        together.
        """
        self._release_slots(sequence)
        for each in sequence.members:
            each.prefilled = 0
        first = sequence.members[0]
        first.waits_since_s, first.starving = now_s, False
        at = 0
        while at < len(self._waiting) and (
            self._waiting[at].starving or self._waiting[at].priority > sequence.priority
        ):
            at += 1
        self._waiting.insert(at, first)
        self._next_due_s = min(self._next_due_s, self._due_s(first))

    def cut(self, sequence: S, length: int) -> bool:
        """Take back the tokens after the first `length`: the sequence becomes a new owner of its slot.

        It keeps the pages of these tokens, and need not be prefilled again. False, and nothing changes, where another
        sequence may read a page that would be written again, for a beam, and with recurrent layers, whose state does
        not go back.
        """
        is_shared = bool(sequence.group) or sequence.num_indexed_pages * self.allocator.page_size >= length
        if is_shared or self.allocator.snapshots is not None:
            return False
        if self._slot_order is not None:
            self._slot_order.released(sequence)  # counts the tokens that are taken back
        num_pages = self.allocator.pages_for(max(length, sequence.reserved) + self.lookahead)
        surplus = sequence.pages[num_pages:]
        del sequence.pages[num_pages:]
        self.allocator.free(surplus)
        self._gens[sequence.slot] += 1
        sequence.slot_gen, sequence.deferred = self._gens[sequence.slot], False
        sequence.length, sequence.prefilled = length, length - 1
        if self._slot_order is not None:
            self._slot_order.assigned(sequence)
        return True

    def preempt_youngest(self, now_s: float) -> tuple[S, ...]:
        """Preempt the youngest running sequence that reserved no pages, with its group; return what lost its slot."""
        youngest = max((s for s in self.running if not s.reserved), key=lambda s: s.order)
        self.preempt(youngest, now_s)
        return youngest.members

    def fork(self, source: S, target: S) -> tuple[tuple[int, int], ...] | None:
        """Make `target` a copy of `source`, another beam of its group: a new owner of its slot, with the same tokens.

        It gives up its own pages, shares the full pages of `source`, and gets its own pages after them. Returns the
        (page of `source`, page of `target`) whose contents the caller must copy. None when there are too few pages:
        then `target` has none.
        """
        full = source.prefilled // self.allocator.page_size
        self.allocator.free(target.pages)
        pages = self.allocator.share(source.pages[:full])
        if not self.allocator.grow(pages, source.length + self.lookahead):
            self.allocator.free(pages)
            target.prefilled = target.num_indexed_pages = 0
            return None
        self._gens[target.slot] += 1
        target.slot_gen, target.pages = self._gens[target.slot], pages
        target.length, target.prefilled = source.length, source.prefilled
        target.num_indexed_pages = min(source.num_indexed_pages, full)
        partly = source.prefilled % self.allocator.page_size != 0
        return ((source.pages[full], pages[full]),) if partly else ()

    def clear(self, beam: S) -> None:
        """Take the tokens and pages of a beam that has no continuation; it keeps its slot, for a later fork."""
        self.index_pages(beam)
        self.allocator.free(beam.pages)
        beam.length = beam.prefilled = beam.num_indexed_pages = 0
        beam.held, beam.deferred = True, False

    def _due_s(self, sequence: S) -> float:
        """Return when the queue must be looked at for this sequence."""
        starves_s = math.inf if sequence.starving else self._max_starvation_s
        return sequence.waits_since_s + min(starves_s, math.inf if sequence.order else sequence.scheduling.max_queue_s)

    def _look_at_waits(self, now_s: float) -> tuple[S, ...]:
        """Take sequences whose longest wait is over out of the queue, and return them; put starving ones to the front.

        Starving sequences are in the order in which they came.
        """
        expired = [s for s in self._waiting if not s.order and now_s >= s.waits_since_s + s.scheduling.max_queue_s]
        left = [s for s in self._waiting if s not in expired]
        for s in left:
            s.starving = s.starving or now_s >= s.waits_since_s + self._max_starvation_s
        front = sorted((s for s in left if s.starving), key=lambda s: s.waits_since_s)
        self._waiting = deque([*front, *(s for s in left if not s.starving)])
        self._next_due_s = min(map(self._due_s, self._waiting), default=math.inf)
        self._expired += expired
        return tuple(expired)

    def _scored_chunk(self) -> Chunk[S] | None:
        """Return the next chunk of the oldest scored sequence."""
        prompts = [s for s in self.running if s.scored and s.prefilled < s.prefill_end]
        oldest = min(prompts, key=lambda s: s.order, default=None)
        if oldest is None:
            return None
        return Chunk(oldest, oldest.prefilled, _chunk_end(oldest, self._scored_chunk_tokens))

    def _prompts(self) -> list[S]:
        """Return the running sequences whose prompts share forwards, the oldest first."""
        prompts = [s for s in self.running if s.prefilled < s.prefill_end and not s.scored]
        return sorted(prompts, key=lambda s: s.order) if prompts else prompts

    def _chunks(self) -> tuple[Chunk[S], ...]:
        """Return the next chunk of the oldest sequence, and of every younger one that still fits.

        Whether a sequence is included depends only on older sequences, so younger ones never delay it. Chunks end at
        multiples of the chunk size: a prompt is cut the same way whatever other prompts are prefilled with it.
        """
        chosen: list[Chunk[S]] = []
        longest = 0
        for s in self._prompts():
            if chosen and self._shapes.of(len(chosen) + 1, longest) is None:
                break
            if self._search_again(s):
                continue
            end = _chunk_end(s, self._chunk)
            length = max(longest, end - s.prefilled)
            if not chosen or self._shapes.of(len(chosen) + 1, length) is not None:
                chosen.append(Chunk(s, s.prefilled, end))
                longest = length
        return tuple(chosen)

    def _mixed_chunks(self, scored: Chunk[S] | None) -> tuple[Chunk[S], ...]:
        """Return what the prompts have of the next forward: the oldest first, as much as the budget leaves.

        A decoding sequence takes one token of the budget: its drafts are bounded elsewhere. The chunk `scored`, which
        runs in a separate forward, takes part of it as well. A prompt that begins like an older one in the same forward
        waits, because it finds these pages in the prefix cache afterwards.
        """
        prompts = self._prompts()
        if not prompts:
            return ()
        room = self._max_batched_tokens - sum(s.decoding for s in self.running)
        if scored is not None:
            room -= scored.end - scored.start
        chosen: list[Chunk[S]] = []
        for s in prompts:
            if room <= 0:
                break
            if self._search_again(s) or any(self._shares_next_page(s, chunk) for chunk in chosen):
                continue
            end = min(s.prefill_end, s.prefilled + room)
            chosen.append(Chunk(s, s.prefilled, end))
            room -= end - s.prefilled
        return tuple(chosen)

    def _shares_next_page(self, sequence: S, chunk: Chunk[S]) -> bool:
        """Return whether the sequence of `chunk` has the next full page that this one needs, or has it afterwards.

        Pages are in the prefix cache once their whole prompt is prefilled."""
        end = sequence.prefilled + self.allocator.page_size
        if self._tokens_of is None or end > min(chunk.end, sequence.prefill_end):
            return False
        if sequence.salt != chunk.sequence.salt:
            return False
        return self._tokens_of(sequence)[:end] == self._tokens_of(chunk.sequence)[:end]

    def _make_room(self, now_s: float) -> list[S]:
        """Give every decoding sequence pages for its next step; preempt the youngest sequences while there are too few.

        A sequence that has reserved pages has all of them, so every sequence that needs more pages may be
        preempted itself.
        """
        preempted: list[S] = []
        pages_for = self.allocator.pages_for
        short = [s for s in self.running if len(s.pages) < pages_for(s.length + self.lookahead) and s.decoding]
        for sequence in sorted(short, key=lambda s: s.order):
            while sequence.slot >= 0 and not self.allocator.grow(sequence.pages, sequence.length + self.lookahead):
                preempted += self.preempt_youngest(now_s)
        return preempted

    def _assign_slots(self) -> list[S]:
        """Move sequences from the head of the waiting queue into free slots while there are pages for the first one."""
        assigned: list[S] = []
        free = [slot for slot, sequence in enumerate(self._slots) if sequence is None]
        while self._waiting and free:
            first = self._waiting[0] if self._slot_order is None else self._slot_order.next(self._waiting)
            if first is None or len(first.members) > len(free) or not self._allocate(first):
                break
            self._waiting.remove(first)  # at once where it is the first of the queue
            if self._slot_order is not None:
                self._slot_order.assigned(first)
            for sequence in first.members:
                self._assign_slot(sequence, free.pop(0))
                assigned.append(sequence)
        return assigned

    def _assign_slot(self, sequence: S, slot: int) -> None:
        first = sequence.members[0]
        if not first.order:
            self._admissions += 1
            first.order = self._admissions
        sequence.order = first.order
        self._gens[slot] += 1
        sequence.slot, sequence.slot_gen = slot, self._gens[slot]
        sequence.starving = False
        sequence.grammar_state = GrammarState.OPENING if sequence.guided else GrammarState.UNCONSTRAINED
        self._slots[slot] = sequence

    def _allocate(self, sequence: S) -> bool:
        """Give a waiting sequence, with its group, its pages, cached ones first.

        False, and no pages, when too few are available.
        """
        state = (sequence, self.allocator.index_version, self.allocator.num_available)
        if state == self._blocked:
            return False
        given: list[S] = []
        for each in sequence.members:
            pages = self._match_prefix(each) if each.length else []
            given.append(each)
            each.pages = pages
            if each.length and not self.allocator.grow(pages, max(each.length, each.reserved) + self.lookahead):
                for other in given:
                    self.allocator.free(other.pages)
                self._blocked = state
                return False
        self.num_cached_tokens += sum(each.num_cached_tokens for each in given)
        return True

    def _match_prefix(self, sequence: S) -> list[int]:
        """Return the cached pages of the sequence's beginning, which counts as prefilled.

        At least the last token is left over: it is the first input of the first decode step.
        """
        if self._tokens_of is None:
            return []
        tokens = [] if sequence.scored else self._tokens_of(sequence)[: sequence.prefill_end]
        pages = self.allocator.match_prefix(tokens, sequence.salt)
        sequence.searched_version, sequence.num_indexed_pages = self.allocator.index_version, len(pages)
        sequence.prefilled = sequence.num_cached_tokens = len(pages) * self.allocator.page_size
        if self.allocator.snapshots is not None:
            sequence.restores = self.allocator.snapshots.place_of(pages[-1]) if pages else -1
            num_full = sequence.prefill_end // self.allocator.page_size
            ends = (self.allocator.num_indexed(tokens, sequence.salt), num_full)
            sequence.snapshot_ends = tuple(count * self.allocator.page_size for count in ends)
        return pages

    def _search_again(self, sequence: S) -> bool:
        """Search the prefix cache once more before the first chunk; True when nothing is left to prefill.

        A sequence that was admitted together with this one may have been prefilled since. The pages that are exchanged
        were neither written nor indexed yet.
        """
        begun = sequence.prefilled > sequence.num_cached_tokens
        if self._tokens_of is None or begun or sequence.searched_version == self.allocator.index_version:
            return False
        before = sequence.num_cached_tokens
        matched = self._match_prefix(sequence)
        if sequence.num_cached_tokens < before:  # the snapshot that it resumed from has gone since
            self.allocator.free(matched)
            sequence.prefilled = sequence.num_cached_tokens = before
            sequence.num_indexed_pages, sequence.restores = before // self.allocator.page_size, -1
            return False
        exchanged = sequence.pages[: len(matched)]
        sequence.pages[: len(matched)] = matched
        self.allocator.free(exchanged)
        self.num_cached_tokens += sequence.num_cached_tokens - before
        return sequence.prefilled == sequence.prefill_end

    def _release_slots(self, sequence: S) -> None:
        """Take the slots and pages of a sequence and its group."""
        if self._slot_order is not None:
            self._slot_order.released(sequence.members[0])
        for each in sequence.members:
            self._release_slot(each)

    def _release_slot(self, sequence: S) -> None:
        slot, sequence.slot, sequence.deferred = sequence.slot, -1, False
        self._slots[slot] = None
        try:
            self.index_pages(sequence)
        finally:
            self.allocator.free(sequence.pages)

    @property
    def next_due_s(self) -> float:
        """When a wait in the queue is over next, or earlier; inf: never."""
        return self._next_due_s

    @property
    def running(self) -> list[S]:
        """Sequences that hold a slot, by slot."""
        return [s for s in self._slots if s is not None]

    @property
    def waiting(self) -> list[S]:
        """The waiting queue, next sequence first."""
        return list(self._waiting)

    def sequence(self, slot: int, slot_gen: int) -> S | None:
        """Return the sequence that holds (slot, slot_gen); None when it has lost the slot."""
        holder = self._slots[slot]
        return holder if holder is not None and holder.slot_gen == slot_gen else None

    def check_integrity(self, owned: list[list[int]] | None = None) -> None:
        """Assert that slots and pages are owned as the sequences say; `owned` are the pages of other owners."""
        self.allocator.check_integrity([*(s.pages for s in self.running), *(owned or [])])
        assert all(s is None or s.slot == slot for slot, s in enumerate(self._slots))
        assert all(s.slot < 0 and not s.pages for s in self._waiting)
        assert all(self.allocator.pages_for(s.reserved) <= len(s.pages) for s in self.running)

    def __repr__(self) -> str:
        slots = f"running={len(self.running)}/{len(self._slots)}"
        return f"<Scheduler {slots} waiting={len(self._waiting)} {self.allocator}>"


def _chunk_end(sequence: Sequence, size: int) -> int:
    """Return the end of a sequence's next chunk: a multiple of `size`, or a snapshot's position before it."""
    end = min(sequence.prefill_end, (sequence.prefilled // size + 1) * size)
    return min((at for at in sequence.snapshot_ends if sequence.prefilled < at < end), default=end)
