"""Compiles grammars in the grammar process, and makes matchers whose rows come from it.

    grammars = Grammars(tokenizer_json, vocab_size, stop_token_ids)
    matcher = grammars.compile(schema).open(max_tokens=200)
    row = matcher.row()                  # int32 [W]: bit v % 32 of word v / 32 is set where token v is legal
    matcher.accept(token)                # False: illegal, and nothing has moved
    matcher.rows(drafts)                 # the rows after each legal draft, in one round trip
    matcher.rollback(n); matcher.close()

Invariant: a row is never missing and never wider than the grammar. A matcher here is only the tokens of an answer: the
state is in the process, and is rebuilt from (grammar, tokens) in a new one. `row` therefore returns the row, or raises
after a stated time. A row during which the process ended `MAX_DEATHS` times in succession raises as well, so a grammar
that crashes its library ends one answer.

Any thread may compile. One thread at a time uses a matcher; several threads may use several matchers.

Not responsible for: starting the process (see process.py).
"""

from __future__ import annotations

import enum
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from types import TracebackType
from typing import cast

import grpc
import numpy as np
import numpy.typing as npt

from lockstep_grammar.errors import GrammarError, InvalidGrammar, LimitExceeded, MatcherFailed, Unavailable
from lockstep_grammar.process import GrammarProcess
from protos.grammar.v1 import grammar_pb2 as pb
from protos.grammar.v1.grammar_pb2_grpc import GrammarStub
from shared_mem.channel import EngineEnd
from shared_mem.layout import MAX_ROWS, MAX_SLOTS, Layout, RowKind
from shared_mem.segment import Segment

MAX_DEATHS = 3
"""A row or a compilation over which the process ends so often in succession fails."""
BIND_TIMEOUT_S = 10.0
COMPILE_MARGIN_S = 130.0
"""Added to a compilation's time limit for its wait in the queue, which has a limit of its own."""
_PAUSE_S = 0.1
"""Before the next look at a process whose RPC broke."""
_AWAIT_S = 0.002
"""The longest wait for rows under the lock: the other matchers' threads wait for it."""
_POLL_S = 0.0002
"""Interval at which an answer that came with rows missing is looked at again."""
_RECORDS = 256
_KEPT_ROWS = 4 * MAX_ROWS
_CODES = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidGrammar,
    grpc.StatusCode.UNIMPLEMENTED: InvalidGrammar,
    grpc.StatusCode.RESOURCE_EXHAUSTED: LimitExceeded,
}

Row = npt.NDArray[np.int32]


class Kind(enum.IntEnum):
    """What the text of a grammar is; see docs/grammars.md."""

    JSON_OBJECT = pb.KIND_JSON_OBJECT
    JSON_SCHEMA = pb.KIND_JSON_SCHEMA
    REGEX = pb.KIND_REGEX
    EBNF = pb.KIND_EBNF
    LARK = pb.KIND_LARK
    CHOICE = pb.KIND_CHOICE
    STRUCTURAL_TAG = pb.KIND_STRUCTURAL_TAG


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of each compilation: settings of the grammar process with the same names (docs/configuration.md)."""

    compile_timeout_s: float = 5.0
    """Time of one compilation."""
    compile_memory_mb: int = 2048
    """Memory of one compilation."""
    compile_workers: int = 0
    """Compilations at a time; 0: by the number of cores."""
    compile_queue: int = 256
    """Compilations that wait; one more is LimitExceeded."""
    max_grammar_bytes: int = 256 << 10
    """Longest grammar text."""

    def flags(self) -> list[str]:
        """Return the flags of `python -m grammar_service`."""
        pairs = [(f"--{field.name.replace('_', '-')}", str(getattr(self, field.name))) for field in fields(self)]
        return [part for pair in pairs for part in pair]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar that compiles; made by `Grammars.compile`."""

    grammars: Grammars
    request: pb.CompileRequest
    warnings: tuple[str, ...]
    """Parts of the grammar that are not enforced, or are verified, by name. Empty unless the caller allowed them."""
    verified: bool
    compile_ms: float
    min_tokens: int
    """A proven lower bound on the tokens of an answer, the stop token included; 0: not known."""
    grammar_id: str
    attached: int
    """Number of the process that has it under `grammar_id`."""

    def open(self, max_tokens: int = 0) -> Matcher:
        """Return a matcher at the start of an answer of at most `max_tokens` tokens, the stop token included.

        Near this limit the rows are narrowed so that the answer ends in time. 0: no limit is known, and they are not.
        """
        return Matcher(self, max_tokens)


class Grammars:
    """A grammar process for one vocabulary; a context manager.

    Args:
        tokenizer_json: the content of tokenizer.json.
        vocab_size: columns of the logits, padding included.
        stop_token_ids: tokens that end an answer.
        max_matchers: matchers that have a place in the process at once. More may be open: the least recently used one
            loses its place, and is built again at its next row.
        max_drafts: drafts that one call of `rows` sends at a time, at most 15.
        limits: limits of compilations.
        wait_s: how long a call waits for a process, a restart included.
        row_timeout_s: how long an attached process may take for one row.
        backend: "llguidance", or "xgrammar", which loads torch in the grammar process.
        python: the interpreter of the grammar process, if its libraries are installed in another environment than the
            host engine's. It must have the same release of this package.
    """

    def __init__(
        self,
        tokenizer_json: bytes,
        vocab_size: int,
        stop_token_ids: Sequence[int],
        *,
        max_matchers: int = 256,
        max_drafts: int = 0,
        limits: Limits = Limits(),
        wait_s: float = 30.0,
        row_timeout_s: float = 1.0,
        backend: str = "llguidance",
        python: str = "",
    ) -> None:
        places = min(max_matchers, MAX_SLOTS)
        layout = Layout(places, min(max_drafts + 1, MAX_ROWS), vocab_size, _RECORDS, time.time_ns())
        self.stop_token_ids, self.vocab_size = tuple(stop_token_ids), vocab_size
        self.wait_s, self.row_timeout_s, self.limits = wait_s, row_timeout_s, limits
        self.num_rows, self.num_words = layout.num_rows, layout.words
        self._segment = Segment.create(layout)
        self.end = EngineEnd(self._segment)
        self.lock = threading.Lock()
        """Held to post or to await, and to give a place away."""
        self._free = list(range(places))
        self._gens = [0] * places
        self._owners: OrderedDict[int, weakref.ref[Matcher]] = OrderedDict()
        self._left: deque[tuple[int, int]] = deque()
        """(slot, slot_gen) of the places that were left. Needs no lock: a matcher may be collected at any moment."""
        setup = pb.ConfigureRequest(
            tokenizer_json=tokenizer_json,
            vocab_size=vocab_size,
            stop_token_ids=self.stop_token_ids,
            generation=layout.generation,
        )
        flags = ["--backend", backend, *limits.flags()]
        self.process = GrammarProcess(self._segment, self.end, setup, flags, python)

    def compile(
        self,
        source: str,
        kind: Kind = Kind.JSON_SCHEMA,
        *,
        verify: bool = False,
        allow_unenforced: bool = False,
        tenant: str = "",
    ) -> Compiled:
        """Compile a grammar, or find it in the process's cache.

        Args:
            source: the text.
            kind: what the text is.
            verify: check on the answer the parts of a JSON Schema that the library cannot enforce.
            allow_unenforced: accept parts that cannot be enforced; each is one of the `warnings`.
            tenant: whose turn the compilation takes while compilations of several tenants wait.

        Raises:
            InvalidGrammar: the grammar is wrong, or has a part that cannot be enforced; the message names it.
            LimitExceeded: a limit of the compilation.
            Unavailable: no process within `wait_s`.
            MatcherFailed: the process ended over this grammar `MAX_DEATHS` times.
        """
        request = pb.CompileRequest(
            kind=cast("pb.Kind", int(kind)),
            source=source,
            verify=verify,
            allow_unenforced=allow_unenforced,
            tenant=tenant,
        )
        attached, response = self.compile_message(request)
        return Compiled(
            self,
            request,
            tuple(response.warnings),
            response.verified,
            response.compile_ms,
            response.min_tokens,
            response.grammar_id,
            attached,
        )

    def compile_message(self, request: pb.CompileRequest) -> tuple[int, pb.CompileResponse]:
        """Send a compilation, again to the next process if this one ends; return its number too. See `compile`."""
        timeout_s = self.limits.compile_timeout_s + COMPILE_MARGIN_S
        for _ in range(MAX_DEATHS):
            attached, stub = self.attachment(time.monotonic() + self.wait_s)
            try:
                return attached, stub.Compile(request, timeout=timeout_s)
            except grpc.RpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                    raise _error_of(error) from error
                time.sleep(_PAUSE_S)  # the RPC may break a moment before the socket that shows the end
        raise MatcherFailed(f"the grammar process ended {MAX_DEATHS} times while it compiled this grammar")

    def attachment(self, deadline_s: float) -> tuple[int, GrammarStub]:
        """Return the number of the attached process and its stub. Raises Unavailable at the deadline."""
        found = self.process.attachment(deadline_s - time.monotonic())
        if found is None:
            raise Unavailable(f"no grammar process answers within {self.wait_s:g} s: {self.process.problem}")
        return found

    def place(self, matcher: Matcher) -> tuple[int, int]:
        """Give a matcher a place, under a new owner number; return (slot, slot_gen)."""
        with self.lock:
            while self._left:
                slot, slot_gen = self._left.popleft()
                if slot in self._owners and self._gens[slot] == slot_gen:
                    del self._owners[slot]
                    self._free.append(slot)
            if self._free:
                slot = self._free.pop()
            else:
                slot, owner = self._owners.popitem(last=False)
                if (loser := owner()) is not None:
                    loser.lose_place()
            self._gens[slot] += 1
            self._owners[slot] = weakref.ref(matcher)
            return slot, self._gens[slot]

    def used(self, slot: int) -> None:
        """Note that a place is in use: it is the last to be given away. The caller holds the lock."""
        self._owners.move_to_end(slot)

    def leave(self, slot: int, slot_gen: int) -> None:
        """Take a matcher's place back. The matcher in the process is replaced by the next owner's."""
        self._left.append((slot, slot_gen))

    def close(self) -> None:
        """End the process."""
        self.process.close()
        self._segment.close()

    def __enter__(self) -> Grammars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Grammars {self.process!r} matchers={len(self._owners)}>"


class Matcher:
    """One answer under a grammar; made by `Compiled.open`."""

    def __init__(self, compiled: Compiled, max_tokens: int = 0) -> None:
        self._compiled, self._grammars, self._max_tokens = compiled, compiled.grammars, max_tokens
        self.tokens: list[int] = []
        """The tokens that were accepted."""
        self._place: tuple[int, int] | None = None
        self._bound_in = 0
        """Number of the process that has the matcher; 0: none."""
        self._grammar_id, self._compiled_in = compiled.grammar_id, compiled.attached
        self._known = 0
        """The first so many of `tokens` are committed in the process. A post takes back what it has after them."""
        self._rows: dict[int, Row] = {}
        """Position -> the row after the first so many tokens."""
        self._path: dict[int, int] = {}
        """Position -> the token after it, for the rows after later positions."""
        self._posted: tuple[int, int, int] | None = None
        """(length, number of the process, sequence) of the last post without drafts."""
        self._failure: GrammarError | None = None

    @property
    def terminated(self) -> bool:
        """The last token is a stop token."""
        return bool(self.tokens) and self.tokens[-1] in self._grammars.stop_token_ids

    def row(self) -> Row:
        """Return the row of the next token, int32 [W], which must not be changed. See `rows` for errors."""
        found = self._rows.get(len(self.tokens))
        return self._fetch(())[0] if found is None else found

    def rows(self, drafts: Sequence[int] = ()) -> list[Row]:
        """Return the row of the next token and the row after each draft, up to the first illegal or last draft.

        Raises:
            Unavailable: no process within `wait_s`.
            MatcherFailed: no token is legal, the row takes longer than `row_timeout_s`, or the process ended over it
                `MAX_DEATHS` times. The matcher stays failed.
        """
        start, found = len(self.tokens), [self.row()]
        while len(found) <= len(drafts):
            position, draft = start + len(found) - 1, drafts[len(found) - 1]
            if not has(found[-1], draft) or draft in self._grammars.stop_token_ids:
                break
            if self._path.get(position) != draft or position + 1 not in self._rows:
                before = list(drafts[: len(found) - 1])
                self._fetch_after(before, drafts[len(found) - 1 :])
            if position + 1 not in self._rows:
                break
            found.append(self._rows[position + 1])
        return found

    def accept(self, token: int) -> bool:
        """Advance over a token. False: it is illegal, and nothing has moved. Errors as for `rows`."""
        if self.terminated or not has(self.row(), token):
            return False
        position = len(self.tokens)
        if self._path.get(position) != token:
            self._forget_after(position)
        self.tokens.append(token)
        for old in [at for at in self._rows if at < position - _KEPT_ROWS]:
            del self._rows[old]
            self._path.pop(old, None)
        return True

    def post(self) -> None:
        """Ask for the next row without waiting for it, where that needs no wait."""
        length = len(self.tokens)
        if length in self._rows or self.terminated or self._failure is not None:
            return
        process = self._grammars.process
        with self._grammars.lock:
            if self._place is not None and process.up and self._bound_in == process.attached:
                self._post(self._place, self._bound_in, ())

    def rollback(self, num_tokens: int) -> None:
        """Take the last tokens back."""
        if not 0 <= num_tokens <= len(self.tokens):
            raise ValueError(f"num_tokens: {num_tokens} is not in [0, {len(self.tokens)}]")
        for token in reversed(self.tokens[len(self.tokens) - num_tokens :]):
            self.tokens.pop()
            self._path[len(self.tokens)] = token
        self._known = min(self._known, len(self.tokens))
        if self._posted is not None and self._posted[0] != len(self.tokens):
            self._posted = None

    def close(self) -> None:
        """Give the place back. A closed matcher must not be used."""
        place, self._place = self._place, None
        if place is not None:
            self._grammars.leave(*place)

    def lose_place(self) -> None:
        """Note that another matcher has the place now; called under the lock."""
        self._place, self._bound_in, self._posted = None, 0, None

    def _forget_after(self, position: int) -> None:
        for at in [at for at in self._rows if at > position]:
            del self._rows[at]
        for at in [at for at in self._path if at >= position]:
            del self._path[at]

    def _fetch_after(self, before: Sequence[int], drafts: Sequence[int]) -> None:
        """Fetch the rows after `before`, whose row is known, and after each of `drafts`."""
        for token in before:
            self.tokens.append(token)
        try:
            self._fetch(drafts[: self._grammars.num_rows - 1])
            if self._grammars.num_rows == 1:  # a segment without drafts: the draft is a token that is taken back
                self._forget_after(len(self.tokens))
                self.tokens.append(drafts[0])
                try:
                    self._fetch(())
                finally:
                    self._path[len(self.tokens) - 1] = self.tokens.pop()
        finally:
            if before:
                del self.tokens[-len(before) :]
            self._known, self._posted = min(self._known, len(self.tokens)), None

    def _fetch(self, drafts: Sequence[int]) -> list[Row]:
        """Ask for the row of the next token and the rows after drafts until they are there."""
        if self._failure is not None:
            raise self._failure
        try:
            return self._asked(drafts)
        except GrammarError as error:
            self._failure = error
            raise

    def _asked(self, drafts: Sequence[int]) -> list[Row]:
        grammars, deaths = self._grammars, 0
        deadline_s = time.monotonic() + grammars.wait_s
        while True:
            attached, stub = grammars.attachment(deadline_s)
            rows: list[Row] | None = None
            if self._bind(attached, stub):
                rows = self._answer(attached, drafts)
            if rows is not None:
                return rows
            if grammars.process.attached != attached or not grammars.process.up:
                deaths += 1
                if deaths == MAX_DEATHS:
                    raise MatcherFailed(f"the grammar process ended {deaths} times over one row of this answer")
            else:
                time.sleep(_POLL_S)
            if time.monotonic() > deadline_s:
                raise Unavailable(f"the grammar process gave no row within {grammars.wait_s:g} s")

    def _bind(self, attached: int, stub: GrammarStub) -> bool:
        """Have a matcher in the process of this number. False: it has ended meanwhile."""
        if self._place is not None and self._bound_in == attached:
            return True
        if self._place is not None:
            self._grammars.leave(*self._place)  # a new owner number: late answers to the old one do not count
        place = self._place = self._grammars.place(self)
        try:
            if self._compiled_in != attached:
                # In a new process the grammar is found in the cache of the last one, or is compiled again.
                limit_s = self._grammars.limits.compile_timeout_s + BIND_TIMEOUT_S
                self._grammar_id = stub.Compile(self._accepted(), timeout=limit_s).grammar_id
                self._compiled_in = attached
            stub.Bind(
                pb.BindRequest(
                    slot=place[0],
                    slot_gen=place[1],
                    grammar_id=self._grammar_id,
                    committed_tokens=self.tokens,
                    max_tokens=self._max_tokens,
                ),
                timeout=self._grammars.row_timeout_s,
            )
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                time.sleep(_PAUSE_S)
                return False
            if error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION):
                self._compiled_in = 0
                return False
            raise MatcherFailed(f"the matcher cannot be built: {error.details()}") from error
        self._bound_in, self._known, self._posted = attached, len(self.tokens), None
        return True

    def _accepted(self) -> pb.CompileRequest:
        message = pb.CompileRequest()
        message.CopyFrom(self._compiled.request)
        message.accepted = True
        return message

    def _post(self, place: tuple[int, int], attached: int, drafts: Sequence[int]) -> int:
        """Post the tokens that the process lacks, and the drafts; the caller holds the lock. Returns the sequence."""
        grammars, length, seq = self._grammars, len(self.tokens), 0
        while True:
            new = self.tokens[self._known : self._known + grammars.num_rows]
            last = self._known + len(new) == length
            asked = list(drafts) if last else []
            tokens = [*new, *asked] or [0]
            seq = grammars.end.post(
                [place[0]],
                [place[1]],
                [self._known],
                [len(new)],
                [len(asked)],
                [tokens],
                need_rows=[0xFFFFFFFF if last else 0],
            )
            self._known += len(new)
            if last:
                break
        grammars.used(place[0])
        self._posted = None if drafts else (length, attached, seq)
        return seq

    def _answer(self, attached: int, drafts: Sequence[int]) -> list[Row] | None:
        """Return the rows; None: the process has ended, or the record was lost. Raises MatcherFailed."""
        grammars, place, length = self._grammars, self._place, len(self.tokens)
        assert place is not None
        limit_s, seq = time.monotonic() + grammars.row_timeout_s, 0
        while grammars.process.attached == attached and grammars.process.up:
            with grammars.lock:
                if self._place != place:
                    return None
                if not seq:
                    posted = None if drafts else self._posted
                    known = posted is not None and posted[:2] == (length, attached)
                    seq = posted[2] if posted and known else self._post(place, attached, drafts)
                got = grammars.end.await_rows(seq, [place[0]], [place[1]], timeout_s=_AWAIT_S)
                kinds = [RowKind(kind) for kind in got.kinds[0, : len(drafts) + 1].tolist()]
                if not got.num_missing and not got.num_late:
                    if kinds[0] is RowKind.DEFER:
                        self._bound_in, self._posted = 0, None
                        return None
                    return self._take(grammars.end.mask_rows(seq)[place[0]], kinds, drafts)
            if time.monotonic() > limit_s and grammars.process.up:
                raise MatcherFailed(f"a row took longer than row_timeout_s = {grammars.row_timeout_s:g} s")
            time.sleep(_POLL_S)
        self._bound_in = 0
        return None

    def _take(self, masks: Row, kinds: Sequence[RowKind], drafts: Sequence[int]) -> list[Row]:
        """Copy an answer's rows and keep them. Raises MatcherFailed."""
        length = len(self.tokens)
        self._forget_after(length)
        found: list[Row] = []
        for j, kind in enumerate(kinds):
            if kind is RowKind.DEFER:
                break
            if kind in (RowKind.DEAD_END, RowKind.ERROR):
                if j:
                    break
                raise MatcherFailed(
                    "no token is legal" if kind is RowKind.DEAD_END else "the library failed on a token"
                )
            row = masks[j, : self._grammars.num_words].copy()
            if kind is RowKind.ALL:
                row[:] = -1
            found.append(row)
            self._rows[length + j] = row
            if j:
                self._path[length + j - 1] = drafts[j - 1]
        return found

    def __del__(self) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Matcher {len(self.tokens)} tokens place={self._place} {self._failure or 'ready'}>"


def has(row: Row, token: int) -> bool:
    """Return whether a row allows a token; any number that is no token is not allowed."""
    return 0 <= token < 32 * len(row) and bool(int(row[token >> 5]) >> (token & 31) & 1)


def _error_of(error: grpc.RpcError) -> GrammarError:
    message = (error.details() or error.code().name).removeprefix("source: ")
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Unavailable("the grammar process gave no answer to a compilation in time")
    return _CODES.get(error.code(), GrammarError)(message)
