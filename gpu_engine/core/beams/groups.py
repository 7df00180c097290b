"""The groups of running sequences that carry out beam searches.

A group has as many running sequences as its search has beams. They share one request, get their slots together and lose
them together. A beam takes part in a step like any other lane, but gets candidates and does not advance: it is held
until every beam of its group has some. Then `choose` asks the search, and moves the sequences:

    first child of a beam     stays in the slot of its parent
    any other child           forks: another slot of the group shares the full pages of the parent, gets a copy of the
                              partly filled one, its history, and a copy of its matcher
    no child                  the slot has no tokens until a later fork

At first one sequence has the prompt, and the others have no tokens. A preempted group keeps its search; its sequences
are prefilled again like any other. Matchers are rebuilt in the same way after the end of a grammar process.

Invariant: all sequences of a group with tokens have equally many, and no step with one of them is in flight when the
search chooses. Used only by the engine thread. Not responsible for: the decision (see search.py), steps (see
loop.py), events (see events/output_processor.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from gpu_engine.api.errors import LockstepError
from gpu_engine.api.request import FinishReason, PromptLogprobs, TokenEvent
from gpu_engine.core.beams.edits import edits_of
from gpu_engine.core.beams.search import BeamSearch, Child, Hypothesis
from gpu_engine.core.grammar_slots import GrammarSlots
from gpu_engine.core.running import RunningSequence, SlotWriter
from gpu_engine.core.scheduler import Scheduler
from gpu_engine.step.handle import BeamLanes
from gpu_engine.step.outcomes import Candidates
from gpu_engine.step.sync import Sync


@dataclass(slots=True, eq=False)
class BeamGroup:
    """The state of one search."""

    members: tuple[RunningSequence, ...]
    search: BeamSearch
    stop_ids: tuple[int, ...]
    beams: list[RunningSequence]
    """The sequence of each of the search's beams."""
    guided: bool
    found: dict[RunningSequence, Candidates] = field(default_factory=dict)
    """What the beams of the present step have found so far."""
    prompt_logprobs: PromptLogprobs | None = None
    """For the last event of the best sequence."""

    @property
    def is_complete(self) -> bool:
        """Every beam has its candidates."""
        return len(self.found) == len(self.beams)

    def last_events(self, finish: FinishReason | None, error: LockstepError | None) -> Iterator[TokenEvent]:
        """Yield the one event of each sequence that is returned. `finish` and `error` end the search early; without
        both it is done.
        """
        params = self.members[0].request.beams
        assert params is not None
        found = [] if finish or error else self.search.hypotheses
        missing = FinishReason.GRAMMAR_ERROR if self.guided else FinishReason.LENGTH
        for i in range(params.num_returned):
            if i >= len(found):
                yield TokenEvent(i, finish=None if error else finish or missing, error=error)
                continue
            ids, scores = found[i].token_ids, None if i else self.prompt_logprobs
            reason = self._finish(found[i])
            matched = ids[-1] if found[i].stopped else None
            yield TokenEvent(i, ids, (), reason, matched, prompt_logprobs=scores, beam_score=found[i].score)

    def _finish(self, hypothesis: Hypothesis) -> FinishReason:
        if not hypothesis.stopped:
            return FinishReason.GRAMMAR_INCOMPLETE if self.guided else FinishReason.LENGTH
        by_client = hypothesis.token_ids[-1] in self.members[0].request.sampling.stop_token_ids
        return FinishReason.GRAMMAR_CLOSED if self.guided and hypothesis.closed and not by_client else FinishReason.STOP

    def placed(self, children: Sequence[Child]) -> list[tuple[RunningSequence, RunningSequence]]:
        """Return (parent's sequence, own sequence) of each child. The first child of a beam has its parent's."""
        sources = [self.beams[child.parent] for child in children]
        free = [each for each in (*self.beams, *self.members) if each not in sources]
        free = list(dict.fromkeys(free))
        placed: list[tuple[RunningSequence, RunningSequence]] = []
        taken: set[RunningSequence] = set()
        for source in sources:
            placed.append((source, free.pop(0) if source in taken else source))
            taken.add(source)
        return placed


class BeamGroups:
    """Every group of one engine.

    Args:
        scheduler: owns slots and pages.
        slot_writer: writes the slots.
        sync: the steps' sync.
        grammar_slots: owns the matchers.
        copy_page: copies one page of the target's cache, after the steps in flight.
        eos_token_ids: the model's end-of-sequence tokens.
        slot_lost: called with each sequence that is preempted because a fork needs its pages.
        copy_state: copies the state of one slot to another; None: the target has no recurrent layers.
    """

    def __init__(
        self,
        scheduler: Scheduler[RunningSequence],
        slot_writer: SlotWriter,
        sync: Sync,
        grammar_slots: GrammarSlots,
        copy_page: Callable[[int, int], None],
        eos_token_ids: Collection[int],
        slot_lost: Callable[[RunningSequence], None],
        copy_state: Callable[[int, int], None] | None = None,
    ) -> None:
        self._scheduler, self._slot_writer, self._sync, self._grammar_slots = (
            scheduler,
            slot_writer,
            sync,
            grammar_slots,
        )
        self._copy_state = copy_state
        self._copy_page, self._eos, self._report_lost = copy_page, tuple(eos_token_ids), slot_lost
        self._groups: dict[RunningSequence, BeamGroup] = {}
        """The groups by their first member."""

    def add(self, first: RunningSequence) -> None:
        """Make the group of a submitted sequence whose request is a beam search."""
        request, sampling = first.request, first.request.sampling
        assert request.beams is not None
        stop_ids = sampling.stop_token_ids if sampling.ignore_eos else (*sampling.stop_token_ids, *self._eos)
        others = [
            RunningSequence(
                0,
                False,
                scheduling=request.scheduling,
                salt=request.salt,
                held=True,
                request=request,
                telemetry=first.telemetry,
            )
            for _ in range(request.beams.width - 1)
        ]
        members = (first, *others)
        for each in members:
            each.group = members
        search = BeamSearch(request.beams, sampling.max_tokens, stop_ids, guided=first.guided)
        self._groups[first] = BeamGroup(members, search, stop_ids, [first], first.guided)

    def remove(self, first: RunningSequence) -> BeamGroup:
        """Forget a group, which has ended; return it."""
        return self._groups.pop(first)

    def of(self, beam: RunningSequence) -> BeamGroup:
        """Return the group of a beam."""
        return self._groups[beam.group[0]]

    def hold(self, batch: Sequence[RunningSequence]) -> BeamLanes | None:
        """Hold the beams of a step that is launched next; return their lanes; None: the step has no beams."""
        lanes, edits = [], []
        for b, sequence in enumerate(batch):
            if sequence.group:
                sequence.held = True
                lanes.append(b)
                edits.append(edits_of(sequence.request, self.of(sequence).stop_ids, sequence.answer))
        return BeamLanes(tuple(lanes), tuple(edits)) if lanes else None

    def slot_lost(self, beam: RunningSequence) -> None:
        """Drop the candidates of a preempted beam, which are found again."""
        self.of(beam).found.clear()
        beam.held = beam.length == 0

    def take(self, beam: RunningSequence, candidates: Candidates, waited_ms: float) -> None:
        """Keep what a step has found for a beam. `waited_ms`: the time that the step waited for mask rows."""
        self.of(beam).found[beam] = candidates
        if beam.guided:
            beam.telemetry.mask_wait_ms += waited_ms
            self._grammar_slots.rows_arrived(beam)

    def complete(self) -> list[BeamGroup]:
        """Return the groups whose beams all have candidates."""
        return [group for group in self._groups.values() if group.is_complete]

    def choose(self, group: BeamGroup) -> None:
        """Advance the search of a complete group; unless it is done, move the sequences to its new beams."""
        children = group.search.advance([group.found[beam] for beam in group.beams])
        group.found.clear()
        if group.search.done:
            return
        placed = group.placed(children)
        num_committed = len(group.beams[0].answer)
        for each in group.beams:
            each.prefilled = each.length  # the step has also stored the keys of the last token
        pairs = [(source, target) for source, target in placed if source is not target]
        forked = self._fork_each(pairs)
        group.beams = [target for _, target in placed]
        for each in group.members:
            if each not in group.beams and each.length:
                self._clear(each)
        prompt_length = len(group.members[0].request.prompt_ids)
        for sequence, beam in zip(group.beams, group.search.beams, strict=True):
            sequence.answer = beam.token_ids
            sequence.length = prompt_length + len(beam.token_ids)
            sequence.held, sequence.guided = False, group.guided
            if forked:
                self._slot_writer.extend(sequence, beam.token_ids[-1])
                if group.guided:
                    self._sync.forget(sequence.slot)
        if forked and group.guided:
            self._grammar_slots.fork(pairs, num_committed)

    def _fork_each(self, pairs: Sequence[tuple[RunningSequence, RunningSequence]]) -> bool:
        """Fork every (source, target), before any of them has its new token; preempt the youngest sequences while pages
        are missing. False: the group itself was preempted."""
        for source, target in pairs:
            is_new = target.length == 0
            while (copies := self._scheduler.fork(source, target)) is None:
                for lost in self._scheduler.preempt_youngest(time.monotonic()):
                    self._report_lost(lost)
                if source.slot < 0:
                    return False
            target.answer = list(source.answer)
            if is_new:
                self._slot_writer.assign(target)
            else:
                self._slot_writer.fork(source, target)
            for pages in copies:
                self._copy_page(*pages)
            if self._copy_state is not None:
                self._copy_state(source.slot, target.slot)
        return True

    def _clear(self, beam: RunningSequence) -> None:
        """Take the tokens of a beam without a child."""
        self._grammar_slots.close(beam)
        self._scheduler.clear(beam)
        beam.answer, beam.guided = [], False

    def __len__(self) -> int:
        return len(self._groups)

    def __repr__(self) -> str:
        return f"<BeamGroups {[len(group.beams) for group in self._groups.values()]}>"
