"""Which requests wait, run and have responses: the decisions of an executor, without threads and without I/O.

    enqueue   gives a request its id and puts it after the requests that wait to be sent
    to_send   returns what may be sent now: aborts, and requests as long as `limit` sequences are not exceeded
    take      files a response of the server under the id of its request
    pop       returns the responses that were not taken yet

Invariant: a request has exactly one last response, whatever happens to the call. An id is known from `enqueue` until
its last response is popped. Not thread-safe: an executor calls in here under its own lock.

Not responsible for: the server (see executor.py), what a result holds (see results.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import grpc

from lockstep_client.answers import FinishReason, delta_of
from lockstep_client.errors import CallError, from_status
from lockstep_client.executing.requests import Request
from lockstep_client.executing.results import Response, Result, ResultMaker
from lockstep_client.wire import engine_pb2 as pb

_CODES = {int(code.value[0]): code for code in grpc.StatusCode}


@dataclass(slots=True)
class _Entry:
    """A request from `enqueue` until its last response was popped."""

    request: Request
    message: pb.GenerateRequest
    maker: ResultMaker
    sent: bool = False
    ended: bool = False
    unread: list[tuple[int, Response]] = field(default_factory=list)
    """With the number of each response, in the order of their arrival."""


class Book:
    """The requests of one executor."""

    def __init__(self, prefix: str, limit: int) -> None:
        """Args: see below.

        prefix: begins the names of this executor's requests at the server, which must be unique there.
        limit: sequences that may be at the server at once; others wait here.
        """
        self._prefix, self._limit = prefix, limit
        self._entries: dict[int, _Entry] = {}
        self._waiting: deque[int] = deque()
        self._aborts: deque[int] = deque()
        self._at_server = self._running = self._last_id = self._arrivals = 0
        self._ready: dict[int, None] = {}
        """Ids with unread responses, the one that has had them for the longest time first."""

    def enqueue(self, requests: Sequence[Request]) -> list[int]:
        """Return the ids of new requests. Takes none where one is wrong: raises TypeError or ValueError."""
        first = self._last_id + 1
        messages = [request.message(f"{self._prefix}{i}") for i, request in enumerate(requests, first)]
        ids = list(range(first, first + len(messages)))
        for request_id, request, message in zip(ids, requests, messages, strict=True):
            self._entries[request_id] = _Entry(request, message, ResultMaker(request))
        self._waiting.extend(ids)
        self._last_id += len(ids)
        self._running += len(ids)
        return ids

    def to_send(self) -> list[pb.GenerateManyRequest]:
        """Return the messages that may be sent now, and count them as sent."""
        messages = [pb.GenerateManyRequest(abort=f"{self._prefix}{request_id}") for request_id in self._aborts]
        self._aborts.clear()
        while self._waiting:
            entry = self._entries.get(self._waiting[0])
            if entry is None or entry.ended:  # cancelled while it waited
                self._waiting.popleft()
                continue
            size = entry.request.num_sequences
            if self._at_server and self._at_server + size > self._limit:
                break
            self._waiting.popleft()
            entry.sent = True
            self._at_server += size
            messages.append(pb.GenerateManyRequest(generate=entry.message))
        return messages

    def take(self, message: pb.GenerateManyResponse) -> None:
        """File a response of the server."""
        request_id = int(message.request_id.removeprefix(self._prefix) or 0)
        entry = self._entries.get(request_id)
        if entry is None or entry.ended:
            return
        if message.HasField("error"):
            code = _CODES.get(message.error.code, grpc.StatusCode.UNKNOWN)
            self._end(request_id, entry, from_status(code, message.error.message))
            return
        result = entry.maker.take(delta_of(message.response), last=message.last)
        if result is not None:
            self._file(request_id, entry, Response(request_id, entry.request.client_id, None, result))
        if message.last:
            self._ended(entry)

    def cancel(self, request_id: int) -> None:
        """End a request; one that was not sent yet ends here. Without effect on one that has ended.

        Raises ValueError for an id that was never given.
        """
        if not 1 <= request_id <= self._last_id:
            raise ValueError(f"request_id: {request_id} is not known")
        entry = self._entries.get(request_id)
        if entry is None or entry.ended:
            return
        if entry.sent:
            self._aborts.append(request_id)
            return
        result = Result(
            is_final=True,
            is_sequence_final=True,
            sequence_index=0,
            output_token_ids=((),),
            texts=("",),
            finish_reasons=(FinishReason.ABORTED,),
        )
        self._file(request_id, entry, Response(request_id, entry.request.client_id, None, result))
        self._ended(entry)

    def fail(self, error: CallError) -> None:
        """End every request with `error`: the call to the server is broken."""
        for request_id, entry in self._entries.items():
            if not entry.ended:
                self._end(request_id, entry, error)
        self._aborts.clear()
        self._waiting.clear()

    def check_known(self, request_ids: Iterable[int]) -> None:
        """Raise ValueError for an id that was never given, or whose last response was popped."""
        for request_id in request_ids:
            if request_id not in self._entries:
                raise ValueError(f"request_id: {request_id} is not known, or its last response was taken")

    def num_ready(self, request_id: int | None = None) -> int:
        """Return how many responses can be popped, of one request or of any."""
        if request_id is None:
            return sum(len(self._entries[each].unread) for each in self._ready)
        entry = self._entries.get(request_id)
        return len(entry.unread) if entry is not None else 0

    def has_ready(self, request_ids: Collection[int] | None) -> bool:
        """Return whether each of these requests has a response; None: whether any has."""
        if request_ids is None:
            return bool(self._ready)
        return all(self.num_ready(each) or each not in self._entries for each in request_ids)

    def pop(self, request_id: int) -> list[Response]:
        """Return the responses of a request that were not taken yet."""
        return [response for _, response in self._take_unread(request_id)]

    def pop_any(self) -> list[Response]:
        """Return the responses of all requests that were not taken yet, in the order of their arrival."""
        found = [each for request_id in list(self._ready) for each in self._take_unread(request_id)]
        return [response for _, response in sorted(found, key=lambda each: each[0])]

    @property
    def waits_for_nothing(self) -> bool:
        """No request's last response is missing."""
        return not self._running

    def ids(self) -> list[int]:
        """Return the ids of the requests that have not ended."""
        return [request_id for request_id, entry in self._entries.items() if not entry.ended]

    def _take_unread(self, request_id: int) -> list[tuple[int, Response]]:
        entry = self._entries.get(request_id)
        if entry is None:  # another thread took its last response
            return []
        found, entry.unread = entry.unread, []
        self._ready.pop(request_id, None)
        if entry.ended:
            del self._entries[request_id]
        return found

    def _end(self, request_id: int, entry: _Entry, error: CallError) -> None:
        self._file(request_id, entry, Response(request_id, entry.request.client_id, error, None))
        self._ended(entry)

    def _file(self, request_id: int, entry: _Entry, response: Response) -> None:
        self._arrivals += 1
        entry.unread.append((self._arrivals, response))
        self._ready[request_id] = None

    def _ended(self, entry: _Entry) -> None:
        entry.ended = True
        self._running -= 1
        if entry.sent:
            self._at_server -= entry.request.num_sequences

    def __repr__(self) -> str:
        return f"<Book running={self._running} waiting={len(self._waiting)} ready={self.num_ready()}>"
