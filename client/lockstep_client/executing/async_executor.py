"""The asynchronous executor. `executor.py` is generated from this file: `python -m tools.client_twins --write`.

The invariant: each request that was enqueued has exactly one last response. When the server is lost, it is an error.
One worker reads the call, another one the statistics once they are asked for. An executor belongs to the event loop on
which it is started; its tasks end with it.

Not responsible for: which responses are ready (see book.py), the server's process (see embedded.py).
"""

from __future__ import annotations

import functools
import secrets
from collections import deque
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, overload

import grpc

from lockstep_client.access import TLS, Token
from lockstep_client.async_client import AsyncClient, AsyncStatsStream
from lockstep_client.concurrency import AsyncActions, AsyncChanges, AsyncWorker, async_read
from lockstep_client.errors import CallError, Unavailable, from_rpc
from lockstep_client.executing.book import Book
from lockstep_client.executing.opening import open_client
from lockstep_client.executing.requests import Request
from lockstep_client.executing.results import RequestStatsPerIteration, Response
from lockstep_client.statistics import IterationStats

STATS_HISTORY = 1000
"""Iterations whose statistics an executor keeps until they are asked for."""
ABORT_TIMEOUT_S = 10.0
"""Longest wait for the last responses of aborted requests, when an executor is shut down."""


class AsyncExecutor:
    """Takes requests, and returns their responses, of one request or of any. An asynchronous context manager.

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
        """Prepare a server for `model`, or a connection to the one at `address`, for `start`.

        Args:
            model: start a server of the executor's own: "embedded", a directory, or an id of a hub. It ends with the
                executor, or with this process.
            address: connect to this server instead, as `Client` does.
            tls: as for `Client`; only with `address`.
            token: as for `Client`; only with `address`.
            metadata: as for `Client`; only with `address`.
            command: starts the executor's own server, as for `Client.embedded`.
            start_timeout_s: longest start of the executor's own server.
            max_at_server: sequences that may be at the server at once; requests above it wait here, in their order.
                None: as many as its queue and its batch hold.
            stats_history: iterations whose statistics are kept until they are asked for.
            settings: of the executor's own server, as for `Client.embedded`.

        Raises ValueError that names a wrong argument, EmbeddedServerError, or CallError of a server that is not there.

        """
        self._client: AsyncClient = open_client(
            AsyncClient, model, address, settings, tls, token, metadata, command, start_timeout_s
        )
        self._max_at_server, self._stats_history = max_at_server, stats_history
        self._book: Book | None = None
        self._changed = AsyncChanges()
        """Notified when a response has come or a request has ended."""
        self._call: AsyncActions | None = None
        """The open call, if there is one."""
        self._reader: AsyncWorker | None = None
        self._stats: _StatsReader | None = None
        self._shut_down = False
        # sync: self.start()

    @property
    def client(self) -> AsyncClient:
        """The client of the executor's server."""
        return self._client

    async def start(self) -> None:
        """Start the executor's server if it has one, and ask the server for its limits. Does nothing a second time."""
        if self._book is not None:
            return
        try:
            # async:
            await self._client.start()
            # end
            info = await self._client.model_info()
        except BaseException:
            await self._client.aclose()
            raise
        limit = self._max_at_server or info.max_queue_size + info.max_batch_size
        self._book = Book(f"{secrets.token_hex(6)}-", limit)

    async def enqueue_request(self, request: Request) -> int:
        """Enqueue a request and return its id. Raises TypeError or ValueError that names a wrong argument."""
        return (await self.enqueue_requests([request]))[0]

    async def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        """Enqueue requests and return their ids, in their order; none is enqueued where one is wrong."""
        with self._changed:
            if self._shut_down:
                raise RuntimeError("the executor is shut down")
            ids = self._started().enqueue(requests)
            self._send()
            return ids

    @overload
    async def await_responses(
        self, request_ids: int | None = None, timeout_s: float | None = None
    ) -> list[Response]: ...
    @overload
    async def await_responses(
        self, request_ids: Iterable[int], timeout_s: float | None = None
    ) -> list[list[Response]]: ...
    async def await_responses(
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
        book = self._started()
        several = None if request_ids is None or isinstance(request_ids, int) else list(request_ids)
        ids = [request_ids] if isinstance(request_ids, int) else several
        with self._changed:
            if ids is None:
                await self._changed.wait_for(lambda: book.has_ready(None) or book.waits_for_nothing, timeout_s)
                return book.pop_any()
            book.check_known(ids)
            await self._changed.wait_for(lambda: book.has_ready(ids), timeout_s)
            return book.pop(ids[0]) if several is None else [book.pop(each) for each in ids]

    def get_num_responses_ready(self, request_id: int | None = None) -> int:
        """Return how many responses can be had without waiting, of one request or of any."""
        with self._changed:
            return self._started().num_ready(request_id)

    async def cancel_request(self, request_id: int) -> None:
        """End a request: its last result has the finish reason ABORTED. Without effect on one that has ended.

        Raises ValueError for an id that was never given.
        """
        with self._changed:
            self._started().cancel(request_id)
            self._send()
            self._changed.notify_all()

    async def get_latest_iteration_stats(self, timeout_s: float = 0.5) -> list[IterationStats]:
        """Return the statistics of the iterations since the last call of this method, oldest first.

        The first call also returns earlier iterations that the server and the executor keep. `timeout_s`: longest wait
        while there are none. Raises CallError for a server that cannot be reached.
        """
        return await self._stats_reader().iterations(timeout_s)

    async def get_latest_request_stats(self, timeout_s: float = 0.5) -> list[RequestStatsPerIteration]:
        """Return what the requests of the server were doing, one entry for each update since the last call.

        As for `get_latest_iteration_stats`. `request_id` is the name at the server, which ends with the executor's id.
        """
        return await self._stats_reader().requests(timeout_s)

    def can_enqueue(self) -> bool:
        """Return whether requests can be enqueued: the executor is started and not shut down."""
        return self._book is not None and not self._shut_down

    async def shutdown(self, *, cancel: bool = False, timeout_s: float | None = None) -> None:
        """Take no further requests, wait for the enqueued ones, and close; a second call does nothing.

        Responses can still be awaited afterwards.

        Args:
            cancel: end the requests instead of waiting for them.
            timeout_s: end requests that take longer. None: wait for as long as they take.

        """
        with self._changed:
            if self._shut_down:
                return
            self._shut_down = True
            if (book := self._book) is not None:
                if not cancel:
                    await self._changed.wait_for(lambda: book.waits_for_nothing, timeout_s)
                for request_id in book.ids():
                    book.cancel(request_id)
                self._send()
                await self._changed.wait_for(lambda: book.waits_for_nothing, ABORT_TIMEOUT_S)
            call, reader = self._call, self._reader
        if call is not None:
            call.cancel()
        if reader is not None:
            await reader.join()
        if self._stats is not None:
            await self._stats.aclose()
        await self._client.aclose()

    async def __aenter__(self) -> AsyncExecutor:
        # async:
        await self.start()
        # end
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown(cancel=error is not None)

    def __repr__(self) -> str:
        return f"<AsyncExecutor {self._client.address} {self._book!r}>"

    def _started(self) -> Book:
        if self._book is None:
            raise RuntimeError("the executor is not started: use it in `async with`, or await `start()`")
        return self._book

    def _send(self) -> None:
        """Send what may be sent; called with the lock."""
        messages = self._started().to_send()
        if messages and self._call is None:
            self._call = self._client.rpc.generate_many()
            self._reader = AsyncWorker(functools.partial(self._read, self._call), name="executor")
        if self._call is not None:
            for message in messages:
                self._call.send(message)

    async def _read(self, call: AsyncActions) -> None:
        """File the responses of a call until it ends."""
        book = self._started()
        error: CallError = Unavailable(grpc.StatusCode.UNAVAILABLE, "the server has ended the call")
        try:
            while (message := await async_read(call)) is not None:
                with self._changed:
                    book.take(message)
                    self._send()
                    self._changed.notify_all()
        except grpc.RpcError as failed:
            error = from_rpc(failed)
        finally:
            await call.aclose()
            with self._changed:
                self._call = None
                book.fail(error)
                self._changed.notify_all()

    def _stats_reader(self) -> _StatsReader:
        with self._changed:
            if self._stats is None:
                self._started()
                if self._shut_down:
                    raise RuntimeError("the executor is shut down")
                stream = self._client.watch_stats(history=self._stats_history)
                self._stats = _StatsReader(stream, self._stats_history)
            return self._stats


class _StatsReader:
    """Reads a stream of statistics in its own worker, and keeps the last ones in bounded rings."""

    def __init__(self, stream: AsyncStatsStream, history: int) -> None:
        self._stream = stream
        self._iterations: deque[IterationStats] = deque(maxlen=history)
        self._requests: deque[RequestStatsPerIteration] = deque(maxlen=history)
        self._error: CallError | None = None
        self._news = AsyncChanges()
        self._worker = AsyncWorker(self._read, name="executor statistics")

    async def iterations(self, timeout_s: float) -> list[IterationStats]:
        """Return what was not returned before; wait while there is nothing."""
        return await self._taken(self._iterations, timeout_s)

    async def requests(self, timeout_s: float) -> list[RequestStatsPerIteration]:
        """Return what was not returned before; wait while there is nothing."""
        return await self._taken(self._requests, timeout_s)

    async def aclose(self) -> None:
        """End the stream and the worker."""
        await self._stream.aclose()
        await self._worker.join()

    async def _taken(self, ring: deque[Any], timeout_s: float) -> list[Any]:
        with self._news:
            await self._news.wait_for(lambda: ring or self._error is not None, timeout_s)
            if not ring and self._error is not None:
                raise self._error
            found = list(ring)
            ring.clear()
            return found

    async def _read(self) -> None:
        error: CallError = Unavailable(grpc.StatusCode.UNAVAILABLE, "the server has ended the statistics")
        try:
            async for update in self._stream:
                with self._news:
                    self._iterations.extend(update.iterations)
                    last = update.iterations[-1:]
                    self._requests.extend(RequestStatsPerIteration(each.iteration, update.requests) for each in last)
                    self._news.notify_all()
        except CallError as failed:
            error = failed
        finally:
            with self._news:
                self._error = error
                self._news.notify_all()
