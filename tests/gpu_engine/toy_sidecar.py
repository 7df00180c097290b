"""A grammar process as a thread: the real segment and channel, a toy automaton, and every kind of misbehaviour.

Invariant: every record that breaks the protocol is added to `problems`: a gap, a repeated or an illegal committed
token. One thread owns the matchers.
Not responsible for: compilation and RPC, which the tests of tests/gpu_engine/sidecar cover.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.errors import InvalidRequest
from gpu_engine.api.ports import GrammarEvents
from gpu_engine.api.request import Request
from gpu_engine.core.engine import Engine
from gpu_engine.model.loader import LoadedModel
from shared_mem.channel import EngineEnd, GrammarEnd, Record
from shared_mem.errors import RingOverrun
from shared_mem.layout import Layout, RowKind, Stage, parent_of, token_of
from shared_mem.segment import Segment
from tests.fakes import EOS
from tests.gpu_engine.harness import PATIENCE_S, running, settle
from tests.gpu_engine.tiny import VOCAB

EVERY = frozenset(range(VOCAB))


@dataclass(frozen=True)
class Automaton:
    """Legal tokens by the number of tokens so far. A source is "length", or "length dead|error|crash at".

    "crash" ends the sidecar when it advances a matcher to `at` tokens.
    """

    length: int
    trouble: str = ""
    at: int = -1

    @staticmethod
    def parse(source: str) -> Automaton:
        length, *rest = source.split()
        return Automaton(int(length), rest[0], int(rest[1])) if rest else Automaton(int(length))

    def legal(self, emitted: list[int]) -> frozenset[int]:
        """Return the legal tokens after `emitted`, which repeat every six tokens; at `length` only the stop token.

        Of six places one allows a single token, one allows every token, and the others a small set each.
        """
        n = len(emitted)
        if emitted and emitted[-1] == EOS:
            return frozenset()
        if n >= self.length:
            return frozenset({EOS})
        match n % 6:
            case 2:
                return EVERY
            case 5:
                return frozenset({65})
            case place:
                return frozenset(range(100 + place, 256, 3))

    def forced(self, emitted: list[int]) -> list[int]:
        """Return the tokens that follow `emitted` as the only legal ones."""
        chain: list[int] = []
        while len(legal := self.legal(emitted + chain)) == 1:
            chain += legal
        return chain

    def allows(self, emitted: list[int]) -> bool:
        """Return whether every token is legal, in order."""
        return all(token in self.legal(emitted[:i]) for i, token in enumerate(emitted))


class CrashError(Exception):
    """The sidecar has crashed."""


@dataclass
class Matcher:
    """The grammar state of one slot for one generation: its automaton and its committed tokens (`certain`)."""

    gen: int
    automaton: Automaton
    certain: list[int]

    def moved_to(self, count: int) -> None:
        """Raise CrashError if the automaton crashes at `count` tokens."""
        if self.automaton.trouble == "crash" and count >= self.automaton.at:
            raise CrashError


@dataclass(eq=False)
class ToySidecar:
    """The toy sidecar. Call `run` once, on its own thread; `bind`, `release` and `give` are for any thread."""

    end: GrammarEnd
    before: Callable[[Record], None] | None = None
    """Called before a record is answered; may block."""
    refuse: Callable[[Record], bool] = lambda record: False
    """True: the answer comes in time, and every row is DEFER."""
    withhold: Callable[[Record], int | None] = lambda record: None
    """A number: the answer is marked late and has so many rows; `give` adds the other rows."""
    loses: Callable[[Record], bool] = lambda record: False
    """True: a record that copies a matcher gets lost."""
    gives: bool = False
    """True: withheld rows are added without a call of `give`, as soon as no post is unread."""
    proposes: Callable[[Automaton, list[int]], list[int]] = Automaton.forced
    """(automaton, tokens so far) -> the jump-forward tokens that are proposed after them, right or wrong."""
    gen_shift: int = 0
    """Added to the slot generation in the answers: any value but 0 makes them stale."""
    records: list[Record] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    matchers: dict[int, Matcher] = field(default_factory=dict)
    stopping: bool = False
    crashed: threading.Event = field(default_factory=threading.Event)
    binding: set[tuple[int, int]] = field(default_factory=set)
    """(slot, slot_gen) of the binds that have not completed."""
    frozen: bool = False
    """True: the sidecar reads no records and binds no matchers."""
    froze: threading.Event = field(default_factory=threading.Event)
    """Set when the sidecar has seen `frozen`: from then on it answers nothing."""
    released: set[tuple[int, int]] = field(default_factory=set)
    """(slot, slot_gen) of every release."""
    withheld: int = 0
    overruns: int = 0
    """Posts that were overwritten before they were read."""
    _inbox: deque[Callable[[], None]] = field(default_factory=deque)
    _late: list[tuple[int, int, list[int], list[int]]] = field(default_factory=list)

    def bind(self, slot: int, matcher: Matcher, bound: Callable[[], None]) -> None:
        def install() -> None:
            matcher.moved_to(len(matcher.certain))
            self.matchers[slot] = matcher
            self.binding.discard((slot, matcher.gen))
            bound()

        self.binding.add((slot, matcher.gen))
        self._inbox.append(install)

    def release(self, slot: int, gen: int) -> None:
        def drop() -> None:
            self.released.add((slot, gen))
            if slot in self.matchers and self.matchers[slot].gen == gen:
                del self.matchers[slot]

        self._inbox.append(drop)

    def give(self) -> None:
        """Schedule the addition of the withheld rows. Any thread may call this."""
        self._inbox.append(self._give)

    def _give(self) -> None:
        for seq, slot, kinds, forced in self._late:
            self.end.add_rows(seq, slot, kinds, forced, late=False)
        self._late.clear()

    def run(self) -> None:
        try:
            self._run()
        except CrashError:
            self.stopping = True
            self.crashed.set()

    def _run(self) -> None:
        last = self.end.start_seq
        while not self.stopping:
            if self.frozen:
                self.froze.set()
                time.sleep(0.0005)
                continue
            newest = self.end.wait(last, 0.002, 0)
            if self.gives and newest == last:
                self._give()
            while self._inbox:
                self._inbox.popleft()()
            for seq in range(last + 1, newest + 1):
                for record in self._records(seq):
                    self.records.append(record)
                    if self.before is not None:
                        self.before(record)
                    if self.stopping:
                        continue
                    if record.stage == Stage.FORK:
                        if not self.loses(record):
                            self._fork(record)
                    else:
                        self._answer(seq, record)
            last = newest

    def _records(self, seq: int) -> list[Record]:
        try:
            return self.end.records(seq)
        except RingOverrun:
            self.overruns += 1
            return []

    def _fork(self, record: Record) -> None:
        """Give the record's slot a copy of another slot's matcher."""
        (source,) = record.committed
        matcher = self.matchers.get(source)
        if (record.slot, record.slot_gen) in self.released:
            return  # a release may come before an earlier record is read
        self.matchers.pop(record.slot, None)
        if matcher is None or len(matcher.certain) < record.commit_pos:
            self.problems.append(f"{record} copies a matcher that is not there")
        else:
            certain = matcher.certain[: record.commit_pos]
            self.matchers[record.slot] = Matcher(record.slot_gen, matcher.automaton, certain)

    def _answer(self, seq: int, record: Record) -> None:
        kinds, forced = self._walk(seq, record)
        count = self.withhold(record)
        if count is None:
            self.end.publish(seq, record.slot, record.slot_gen + self.gen_shift, kinds, forced)
            return
        self.withheld += 1
        self.end.publish(seq, record.slot, record.slot_gen, kinds[:count], forced[:count], late=True)
        self._late.append((seq, record.slot, kinds, forced))

    def _walk(self, seq: int, record: Record) -> tuple[list[int], list[int]]:
        count = len(record.drafts) + 1
        kinds, forced = [int(RowKind.DEFER)] * count, [-1] * count
        matcher = self.matchers.get(record.slot)
        if matcher is None or matcher.gen != record.slot_gen:
            return kinds, forced
        if record.commit_pos > len(matcher.certain) and self.overruns:
            return kinds, forced  # the missing tokens were in a record that was overwritten before it was read
        if record.commit_pos != len(matcher.certain):
            self.problems.append(f"{record} after {len(matcher.certain)} tokens")
            return kinds, forced
        if record.stage == Stage.PROPOSE:
            return self._propose(record, matcher)
        matcher.certain += record.committed
        matcher.moved_to(len(matcher.certain))
        if not matcher.automaton.allows(matcher.certain):
            self.problems.append(f"illegal tokens were committed: {matcher.certain}")
        is_tree = record.stage == Stage.TREE
        drafts = [token_of(draft) for draft in record.drafts] if is_tree else list(record.drafts)
        parents = [parent_of(draft) for draft in record.drafts] if is_tree else [*range(len(drafts))]
        if not EVERY.issuperset(drafts) or any(parent > j for j, parent in enumerate(parents)):
            self.problems.append(f"{record} has drafts that are no tokens")
        if not record.need_rows & (1 << count) - 1:
            self.problems.append(f"{record} asks for nothing")
        if record.stage not in (Stage.VERIFY, Stage.TREE) and record.stage != Stage.DRAFT + len(record.drafts):
            self.problems.append(f"{record} is of another stage")
        if self.refuse(record):
            return kinds, forced
        ways: dict[int, list[int]] = {0: list(matcher.certain)}
        """By row: the tokens on the way to it, where all of them are legal."""
        for row in range(count):
            if row:
                before, token = ways.get(parents[row - 1]), drafts[row - 1]
                if before is None or token not in matcher.automaton.legal(before):
                    continue
                ways[row] = [*before, token]
                matcher.moved_to(len(ways[row]))
            emitted = ways[row]
            legal = matcher.automaton.legal(emitted)
            if not legal:
                continue
            if record.need_rows >> row & 1:
                kinds[row], forced[row] = self._fill(seq, record.slot, row, matcher.automaton, len(emitted), legal)
        return kinds, forced

    def _propose(self, record: Record, matcher: Matcher) -> tuple[list[int], list[int]]:
        """Return the jump-forward tokens of a PROPOSE record. The next record repeats its committed tokens."""
        emitted = [*matcher.certain, *record.committed]
        if not matcher.automaton.allows(emitted) or not record.need_rows:
            self.problems.append(f"{record} requests jump-forward tokens after {emitted}")
        if self.refuse(record):
            return [], []
        tokens = list(self.proposes(matcher.automaton, emitted)[: record.need_rows.bit_count()])
        return [int(RowKind.FORCED)] * len(tokens), tokens

    def _fill(
        self, seq: int, slot: int, row: int, automaton: Automaton, place: int, legal: frozenset[int]
    ) -> tuple[int, int]:
        if place == automaton.at:
            return {"dead": int(RowKind.DEAD_END), "error": int(RowKind.ERROR)}[automaton.trouble], -1
        if legal == EVERY:
            return int(RowKind.ALL), -1
        words = self.end.mask_rows(seq)[slot, row].view("uint32")
        words[:] = 0
        for token in legal:
            words[token // 32] |= 1 << token % 32
        return (int(RowKind.FORCED), min(legal)) if len(legal) == 1 else (int(RowKind.APPLY), -1)


@dataclass(eq=False)
class ToyGrammar:
    """A `ports.GrammarPort` over successive toy sidecars. It rejects a source that does not begin with a number."""

    segment: Segment
    engine: GrammarEvents = field(init=False)
    sidecar: ToySidecar = field(init=False)
    opened: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)
    """(slot, slot_gen, committed) of every open."""
    closed: list[tuple[int, int]] = field(default_factory=list)
    forks: list[tuple[int, int]] = field(default_factory=list)
    """(slot, slot_gen) of every matcher that was copied."""
    replaced: list[tuple[int, int]] = field(default_factory=list)
    """The matchers that a copy replaced; they are not closed."""
    hold: bool = False
    """True: calls of `open` are recorded and not answered."""
    forgives: bool = False
    """True: after a crash the engine is asked to forgive the end of the grammar process."""
    before: Callable[[Record], None] | None = None
    """`before` of every sidecar that is started after this is set."""
    buried: list[ToySidecar] = field(default_factory=list)
    """The sidecars that crashed while `supervised`, in order."""
    _thread: threading.Thread = field(init=False)

    def start_sidecar(self) -> ToySidecar:
        """Start a sidecar without any state of earlier sidecars."""
        # A restarted process maps the segment when it starts, and reads posts from that moment on.
        self.segment.start_seq = EngineEnd(self.segment).last_seq
        self.sidecar = ToySidecar(GrammarEnd(self.segment))
        self.sidecar.before = self.before
        self._thread = threading.Thread(target=self.sidecar.run, name="toy sidecar", daemon=True)
        self._thread.start()
        return self.sidecar

    def kill_sidecar(self) -> None:
        """Stop the sidecar without another answer. Its own thread must not call this."""
        self.sidecar.stopping = True
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def lose_sidecar(self, engine: Engine) -> None:
        """Kill the sidecar and notify the engine in the supervisor's order; no wait of the engine goes on for it."""
        channel = engine._channel
        assert channel is not None
        self.kill_sidecar()
        channel.set_abort()
        engine.grammar_lost(frozenset(self.sidecar.binding))
        # A real restart takes so long that the engine has processed the loss before the next sidecar is there.
        processed = threading.Event()
        engine._inbox.put(processed.set)
        assert processed.wait(PATIENCE_S)

    def restore_sidecar(self, engine: Engine) -> ToySidecar:
        """Start the next sidecar and notify the engine."""
        assert engine._channel is not None
        sidecar = self.start_sidecar()
        engine._channel.clear_abort()
        engine.grammar_restored()
        return sidecar

    @contextmanager
    def supervised(self, engine: Engine) -> Iterator[None]:
        """Within the block, replace each crashed sidecar and notify the engine in the supervisor's order."""
        over = threading.Event()

        def watch() -> None:
            while not over.is_set():
                if not self.sidecar.crashed.wait(0.01):
                    continue
                dead = self.sidecar
                self.lose_sidecar(engine)
                self.buried.append(dead)
                if self.forgives:
                    engine.forgive_grammar_end()
                self.restore_sidecar(engine)

        thread = threading.Thread(target=watch, name="toy supervisor", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(PATIENCE_S)
            assert not thread.is_alive()

    def backtrack(
        self,
        slot: int,
        slot_gen: int,
        request: Request,
        committed: tuple[int, ...],
        first: int,
        dead_texts: tuple[bytes, ...],
    ) -> None:
        raise AssertionError("no answer of this test is verified")

    def open(
        self,
        slot: int,
        slot_gen: int,
        request: Request,
        committed: tuple[int, ...],
        dead_texts: tuple[bytes, ...] = (),
    ) -> None:
        assert request.grammar is not None
        self.opened.append((slot, slot_gen, committed))
        source = request.grammar.source
        if not source.split()[0].isdigit():
            self.engine.grammar_failed(slot, slot_gen, InvalidRequest("grammar", "is no number"))
        elif not self.hold:
            matcher = Matcher(slot_gen, Automaton.parse(source), list(committed))
            self.sidecar.bind(slot, matcher, lambda: self._bound(slot, slot_gen))

    def _bound(self, slot: int, slot_gen: int) -> None:
        self.engine.grammar_opened(slot, slot_gen, compile_ms=1.5, cache_hit=True, backend=2, warnings=("toy",))

    def forked(self, slot: int, slot_gen: int, request: Request, before: tuple[int, int] | None) -> None:
        self.forks.append((slot, slot_gen))
        if before is not None:
            self.replaced.append(before)

    def close(self, slot: int, slot_gen: int) -> None:
        self.closed.append((slot, slot_gen))
        self.sidecar.release(slot, slot_gen)


@contextmanager
def guided_engine(model: LoadedModel, settings: EngineConfig) -> Iterator[tuple[Engine, ToyGrammar]]:
    """Run an engine with a toy sidecar; at the end every matcher is closed, and no record broke the protocol."""
    layout = Layout(settings.max_batch_size, settings.num_rows, model.vocab_size)
    with Segment.create(layout) as segment:
        grammar = ToyGrammar(segment)
        served = replace(model, max_model_len=settings.max_model_len)
        engine = Engine(settings, served, EngineEnd(segment), grammar)
        grammar.engine = engine
        grammar.start_sidecar()
        try:
            with running(engine):
                yield engine, grammar
                settle(engine)
                made = {(slot, gen) for slot, gen, _ in grammar.opened} | set(grammar.forks)
                assert made - set(grammar.replaced) == set(grammar.closed)
                assert len(set(grammar.closed)) == len(grammar.closed)
            assert grammar.sidecar.problems == []
        finally:
            grammar.kill_sidecar()
