"""The synchronous executor. `async_executor.py` is its twin: the same methods, awaited.

The invariant: each request that was enqueued has exactly one last response, also when the server is lost: then it is an
error. One thread reads the call, another one the statistics once they are asked for; methods may be called from several
threads.

Not responsible for: which responses are ready (see book.py), the server's process (see embedded.py).
"""

from __future__ import annotations

import queue
import secrets
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, overload

import grpc

from lockstep_client.access import TLS, Token
from lockstep_client.client import Client, StatsStream
from lockstep_client.errors import CallError, Unavailable, from_rpc
from lockstep_client.executing.book import Book
from lockstep_client.executing.requests import Request
from lockstep_client.executing.results import RequestStatsPerIteration, Response
from lockstep_client.statistics import IterationStats, StatsUpdate
from lockstep_client.wire import engine_pb2 as pb

STATS_HISTORY = 1000
"""Iterations whose statistics an executor keeps until they are asked for."""
ABORT_TIMEOUT_S = 10.0
"""Longest wait for the last responses of requests that were aborted, when an executor is shut down."""


class Executor:
    """Takes requests, and has their responses awaited, of one request or of any. A context manager.

    Leaving the block waits for the requests that were enqueued, or ends them where an exception leaves it.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        address: str | None = None,
        tls: TLS | bool = False,
        token: Token | None = None,
        metadata: Sequence[tuple[str, str]] = (),
        command: Sequence[str] | None = None,
        start_timeout_s: float = 600.0,
        max_at_server: int | None = None,
        stats_history: int = STATS_HISTORY,
        **settings: str | float | bool,
    ) -> None:
        """Start a server for `model`, or connect to the one at `address`; return when it answers.

        Args:
            model: start a server of the executor's own: "embedded", a directory, or an id of a hub. It ends with the
                executor, or with this process.
            address, tls, token, metadata: of a server that runs, as for `Client`.
            command, start_timeout_s, settings: of a server of one's own, as for `Client.embedded`.
            max_at_server: sequences that may be at the server at once; requests above it wait here, in their order.
                None: as many as its queue and its batch hold.
            stats_history: iterations whose statistics are kept until they are asked for.

        Raises ValueError that names a wrong argument, EmbeddedServerError, or CallError of a server that is not there.

        """
        self._client: Client = open_client(
            Client, model, address, settings, tls, token, metadata, command, start_timeout_s
        )
        try:
            info = self._client.model_info()
        except BaseException:
            self._client.close()
            raise
        limit = max_at_server or info.max_queue_size + info.max_batch_size
        self._book = Book(f"{secrets.token_hex(6)}-", limit)
        self._changed = threading.Condition()
        self._actions: queue.SimpleQueue[pb.GenerateManyRequest | None] | None = None
        """Of the open call; None: there is none."""
        self._call: Any = None
        self._reader: threading.Thread | None = None
        self._stats: _StatsReader | None = None
        self._stats_history = stats_history
        self._shut_down = False

    @property
    def client(self) -> Client:
        """The client of the executor's server."""
        return self._client

    def enqueue_request(self, request: Request) -> int:
        """Enqueue a request and return its id. Raises TypeError or ValueError that names a wrong argument."""
        return self.enqueue_requests([request])[0]

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        """Enqueue requests and return their ids, in their order; none is enqueued where one is wrong."""
        with self._changed:
            if self._shut_down:
                raise RuntimeError("the executor is shut down")
            ids = self._book.enqueue(requests)
            self._send()
            return ids

    @overload
    def await_responses(self, request_ids: int | None = None, timeout_s: float | None = None) -> list[Response]: ...
    @overload
    def await_responses(self, request_ids: Iterable[int], timeout_s: float | None = None) -> list[list[Response]]: ...
    def await_responses(
        self, request_ids: int | Iterable[int] | None = None, timeout_s: float | None = None
    ) -> list[Response] | list[list[Response]]:
        """Wait for responses and return the new ones.

        Args:
            request_ids: an id: until that request has a response. Several: until each of them has one; a list is
                returned for each. None: until any request has one; they come in the order of their arrival, and there
                are none where no request is left that could have one.
            timeout_s: return after this time, with what there is. None: wait for as long as it takes.

        Raises ValueError for an id that is not known, or whose last response was returned.

        """
        several = None if request_ids is None or isinstance(request_ids, int) else list(request_ids)
        ids = [request_ids] if isinstance(request_ids, int) else several
        with self._changed:
            book = self._book
            if ids is None:
                self._changed.wait_for(lambda: book.has_ready(None) or book.waits_for_nothing, timeout_s)
                return book.pop_any()
            book.check_known(ids)
            self._changed.wait_for(lambda: book.has_ready(ids), timeout_s)
            return book.pop(ids[0]) if several is None else [book.pop(each) for each in ids]

    def get_num_responses_ready(self, request_id: int | None = None) -> int:
        """Return how many responses can be had without waiting, of one request or of any."""
        with self._changed:
            return self._book.num_ready(request_id)

    def cancel_request(self, request_id: int) -> None:
        """End a request: its last result has the finish reason ABORTED. Without effect on one that has ended.

        Raises ValueError for an id that was never given.
        """
        with self._changed:
            self._book.cancel(request_id)
            self._send()
            self._changed.notify_all()

    def get_latest_iteration_stats(self, timeout_s: float = 0.5) -> list[IterationStats]:
        """Return the statistics of the iterations since the last call of this method, oldest first.

        The first call has those of the past that the server and the executor keep. `timeout_s`: longest wait while
        there are none. Raises CallError of a server that is not there.
        """
        return self._stats_reader().iterations(timeout_s)

    def get_latest_request_stats(self, timeout_s: float = 0.5) -> list[RequestStatsPerIteration]:
        """Return what the requests of the server were doing, as often as it was told since the last call.

        As for `get_latest_iteration_stats`. `request_id` is the name at the server, which ends with the executor's id.
        """
        return self._stats_reader().requests(timeout_s)

    def can_enqueue(self) -> bool:
        """Return whether requests can be enqueued: the executor is not shut down."""
        return not self._shut_down

    def shutdown(self, *, cancel: bool = False, timeout_s: float | None = None) -> None:
        """Take no further requests, wait for the enqueued ones, and close; a second call does nothing.

        Responses can be awaited afterwards, too.

        Args:
            cancel: end the requests instead of waiting for them.
            timeout_s: end requests that take longer. None: wait for as long as they take.

        """
        with self._changed:
            if self._shut_down:
                return
            self._shut_down = True
            if not cancel:
                self._changed.wait_for(lambda: self._book.waits_for_nothing, timeout_s)
            for request_id in self._book.ids():
                self._book.cancel(request_id)
            self._send()
            self._changed.wait_for(lambda: self._book.waits_for_nothing, ABORT_TIMEOUT_S)
            if self._actions is not None:
                self._actions.put(None)
            call, reader = self._call, self._reader
        if call is not None and reader is not None:
            call.cancel()
            reader.join()
        if self._stats is not None:
            self._stats.close()
        self._client.close()

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown(cancel=error is not None)

    def __repr__(self) -> str:
        return f"<Executor {self._client.address} {self._book!r}>"

    def _send(self) -> None:
        """Send what may be sent; called with the lock."""
        messages = self._book.to_send()
        if messages and self._actions is None:
            self._open()
        if self._actions is not None:
            for message in messages:
                self._actions.put(message)

    def _open(self) -> None:
        actions: queue.SimpleQueue[pb.GenerateManyRequest | None] = queue.SimpleQueue()
        sent: Iterator[Any] = iter(actions.get, None)
        self._actions, self._call = actions, self._client.generate_many(sent)
        self._reader = threading.Thread(target=self._read, args=(self._call, actions), name="executor", daemon=True)
        self._reader.start()

    def _read(self, call: Any, actions: queue.SimpleQueue[pb.GenerateManyRequest | None]) -> None:
        error: CallError = Unavailable(grpc.StatusCode.UNAVAILABLE, "the server has ended the call")
        try:
            for message in call:
                with self._changed:
                    self._book.take(message)
                    self._send()
                    self._changed.notify_all()
        except grpc.RpcError as failed:
            error = from_rpc(failed)
        finally:
            actions.put(None)  # ends gRPC's thread that reads the actions
            with self._changed:
                self._actions = None
                self._book.fail(error)
                self._changed.notify_all()

    def _stats_reader(self) -> _StatsReader:
        with self._changed:
            if self._stats is None:
                if self._shut_down:
                    raise RuntimeError("the executor is shut down")
                self._stats = _StatsReader(self._client.watch_stats(history=self._stats_history), self._stats_history)
            return self._stats


def open_client(
    kind: Any,
    model: str | None,
    address: str | None,
    settings: dict[str, str | float | bool],
    tls: TLS | bool,
    token: Token | None,
    metadata: Sequence[tuple[str, str]],
    command: Sequence[str] | None,
    start_timeout_s: float,
) -> Any:
    """Return a client of `kind`: of a server for `model`, or of the one at `address`. Raises ValueError."""
    if model is None:
        if settings or command is not None:
            given = ", ".join([*settings, *(["command"] if command is not None else [])])
            raise ValueError(f"{given}: is for a server of the executor's own, which needs `model`")
        return kind(address, tls=tls, token=token, metadata=metadata)
    if address is not None or tls or token is not None or metadata:
        raise ValueError("model: starts a server of the executor's own, which has no address, TLS, token or metadata")
    return kind.embedded(command=command, start_timeout_s=start_timeout_s, model=model, **settings)


def per_iteration(update: StatsUpdate) -> list[RequestStatsPerIteration]:
    """Return what the requests were doing behind the last iteration of an update."""
    return [RequestStatsPerIteration(last.iteration, update.requests) for last in update.iterations[-1:]]


class _StatsReader:
    """Reads a stream of statistics on a thread of its own, and keeps the last ones in bounded rings."""

    def __init__(self, stream: StatsStream, history: int) -> None:
        self._stream = stream
        self._iterations: deque[IterationStats] = deque(maxlen=history)
        self._requests: deque[RequestStatsPerIteration] = deque(maxlen=history)
        self._error: CallError | None = None
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._read, name="executor statistics", daemon=True)
        self._thread.start()

    def iterations(self, timeout_s: float) -> list[IterationStats]:
        """Return the responses that were not returned before."""
        return self._taken(self._iterations, timeout_s)

    def requests(self, timeout_s: float) -> list[RequestStatsPerIteration]:
        """Return the responses that were not returned before."""
        return self._taken(self._requests, timeout_s)

    def close(self) -> None:
        """End the stream and the thread."""
        self._stream.close()
        self._thread.join()

    def _taken(self, ring: deque[Any], timeout_s: float) -> list[Any]:
        with self._news:
            self._news.wait_for(lambda: ring or self._error is not None, timeout_s)
            if not ring and self._error is not None:
                raise self._error
            found = list(ring)
            ring.clear()
            return found

    def _read(self) -> None:
        error: CallError = Unavailable(grpc.StatusCode.UNAVAILABLE, "the server has ended the statistics")
        try:
            for update in self._stream:
                with self._news:
                    self._iterations.extend(update.iterations)
                    self._requests.extend(per_iteration(update))
                    self._news.notify_all()
        except CallError as failed:
            error = failed
        with self._news:
            self._error = error
            self._news.notify_all()
