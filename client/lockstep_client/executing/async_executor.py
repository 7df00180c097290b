"""The asynchronous executor, the twin of `executor.py`: the same methods, awaited.

The invariant: each request that was enqueued has exactly one last response, also when the server is lost: then it is an
error. Belongs to the event loop on which it is started; its tasks end with it.

Not responsible for: which responses are ready (see book.py), the server's process (see embedded.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, overload

import grpc

from lockstep_client.access import TLS, Token
from lockstep_client.async_client import AsyncClient
from lockstep_client.errors import CallError, Unavailable, from_rpc
from lockstep_client.executing.book import Book
from lockstep_client.executing.executor import ABORT_TIMEOUT_S, STATS_HISTORY, open_client, per_iteration
from lockstep_client.executing.requests import Request
from lockstep_client.executing.results import RequestStatsPerIteration, Response
from lockstep_client.statistics import IterationStats
from lockstep_client.wire import engine_pb2 as pb


class AsyncExecutor:
    """Takes requests, and has their responses awaited, of one request or of any. An asynchronous context manager.

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
        """As `Executor`; the server starts, or is asked, at the `async with` block, or at `await executor.start()`."""
        self._client: AsyncClient = open_client(
            AsyncClient, model, address, settings, tls, token, metadata, command, start_timeout_s
        )
        self._max_at_server, self._stats_history = max_at_server, stats_history
        self._book: Book | None = None
        self._changed = asyncio.Event()
        """Set, and replaced, whenever a response has come or a request has ended."""
        self._actions: asyncio.Queue[pb.GenerateManyRequest] | None = None
        """Of the open call; None: there is none."""
        self._caller: asyncio.Task[None] | None = None
        self._stats: _StatsReader | None = None
        self._shut_down = False

    @property
    def client(self) -> AsyncClient:
        """The client of the executor's server."""
        return self._client

    async def start(self) -> None:
        """Start a server of the executor's own, and ask the server for its limits. Does nothing when it is started."""
        if self._book is not None:
            return
        try:
            await self._client.start()
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
        """Wait for responses and return the new ones. See `Executor.await_responses`."""
        book = self._started()
        several = None if request_ids is None or isinstance(request_ids, int) else list(request_ids)
        ids = [request_ids] if isinstance(request_ids, int) else several
        if ids is None:
            await self._until(lambda: book.has_ready(None) or book.waits_for_nothing, timeout_s)
            return book.pop_any()
        book.check_known(ids)
        await self._until(lambda: book.has_ready(ids), timeout_s)
        return book.pop(ids[0]) if several is None else [book.pop(each) for each in ids]

    def get_num_responses_ready(self, request_id: int | None = None) -> int:
        """Return how many responses can be had without waiting, of one request or of any."""
        return self._started().num_ready(request_id)

    async def cancel_request(self, request_id: int) -> None:
        """End a request: its last result has the finish reason ABORTED. Without effect on one that has ended.

        Raises ValueError for an id that was never given.
        """
        self._started().cancel(request_id)
        self._send()
        self._notify()

    async def get_latest_iteration_stats(self, timeout_s: float = 0.5) -> list[IterationStats]:
        """Return the statistics of the iterations since the last call of this method, oldest first.

        The first call has those of the past that the server and the executor keep. `timeout_s`: longest wait while
        there are none. Raises CallError of a server that is not there.
        """
        reader = self._stats_reader()
        return await reader.taken(reader.iterations, timeout_s)

    async def get_latest_request_stats(self, timeout_s: float = 0.5) -> list[RequestStatsPerIteration]:
        """Return what the requests of the server were doing, as often as it was told since the last call.

        As for `get_latest_iteration_stats`. `request_id` is the name at the server, which ends with the executor's id.
        """
        reader = self._stats_reader()
        return await reader.taken(reader.requests, timeout_s)

    def can_enqueue(self) -> bool:
        """Return whether requests can be enqueued: the executor is started and not shut down."""
        return self._book is not None and not self._shut_down

    async def shutdown(self, *, cancel: bool = False, timeout_s: float | None = None) -> None:
        """Take no further requests, wait for the enqueued ones, and close; a second call does nothing.

        Responses can be awaited afterwards, too.

        Args:
            cancel: end the requests instead of waiting for them.
            timeout_s: end requests that take longer. None: wait for as long as they take.

        """
        if self._shut_down:
            return
        self._shut_down = True
        if (book := self._book) is not None:
            if not cancel:
                await self._until(lambda: book.waits_for_nothing, timeout_s)
            for request_id in book.ids():
                book.cancel(request_id)
            self._send()
            await self._until(lambda: book.waits_for_nothing, ABORT_TIMEOUT_S)
        if self._caller is not None:
            self._caller.cancel()
            await asyncio.wait([self._caller])
        if self._stats is not None:
            await self._stats.aclose()
        await self._client.aclose()

    async def __aenter__(self) -> AsyncExecutor:
        await self.start()
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

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _until(self, condition: Callable[[], bool], timeout_s: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition():
                    await self._changed.wait()

    def _send(self) -> None:
        messages = self._started().to_send()
        if messages and self._actions is None:
            self._actions = asyncio.Queue()
            self._caller = asyncio.create_task(self._call(self._actions), name="executor")
        if self._actions is not None:
            for message in messages:
                self._actions.put_nowait(message)

    async def _call(self, actions: asyncio.Queue[pb.GenerateManyRequest]) -> None:
        """Open a call, write actions to it, and file its responses until it ends."""
        book = self._started()
        error: CallError = Unavailable(grpc.StatusCode.UNAVAILABLE, "the server has ended the call")
        call = self._client.generate_many()
        writer = asyncio.create_task(_write(call, actions), name="executor actions")
        try:
            while (message := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # not in the stub
                book.take(message)
                self._send()
                self._notify()
        except grpc.RpcError as failed:
            error = from_rpc(failed)
        finally:
            self._actions = None
            writer.cancel()
            call.cancel()
            await asyncio.wait([writer])
            book.fail(error)
            self._notify()

    def _stats_reader(self) -> _StatsReader:
        if self._stats is None:
            self._started()
            if self._shut_down:
                raise RuntimeError("the executor is shut down")
            self._stats = _StatsReader(self._client, self._stats_history)
        return self._stats


async def _write(call: Any, actions: asyncio.Queue[pb.GenerateManyRequest]) -> None:
    with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):  # the call has ended: its reader has the error
        while True:
            await call.write(await actions.get())


class _StatsReader:
    """Reads a stream of statistics in a task of its own, and keeps the last ones in bounded rings."""

    def __init__(self, client: AsyncClient, history: int) -> None:
        self.iterations: deque[IterationStats] = deque(maxlen=history)
        self.requests: deque[RequestStatsPerIteration] = deque(maxlen=history)
        self._error: CallError | None = None
        self._news = asyncio.Event()
        self._stream = client.watch_stats(history=history)
        self._task = asyncio.create_task(self._read(), name="executor statistics")

    async def taken(self, ring: deque[Any], timeout_s: float) -> list[Any]:
        """Return what of `ring` was not returned yet; wait while there is nothing."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not ring and self._error is None:
                    self._news.clear()
                    await self._news.wait()
        if not ring and self._error is not None:
            raise self._error
        found = list(ring)
        ring.clear()
        return found

    async def aclose(self) -> None:
        """End the stream and the task."""
        await self._stream.aclose()
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _read(self) -> None:
        error: CallError = Unavailable(grpc.StatusCode.UNAVAILABLE, "the server has ended the statistics")
        try:
            async for update in self._stream:
                self.iterations.extend(update.iterations)
                self.requests.extend(per_iteration(update))
                self._news.set()
        except CallError as failed:
            error = failed
        finally:
            self._error = error
            self._news.set()
