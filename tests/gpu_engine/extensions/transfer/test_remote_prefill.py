"""The choice of a prefill engine, and every way back to the own one, over transports and pages without an engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from gpu_engine.api.errors import InternalError
from gpu_engine.api.page_transfer import Fallback, Opened, PageFormat, Piece, TransferFailed, WantedPages
from gpu_engine.api.request import Request
from gpu_engine.extensions.transfer.grpc_transport import GrpcTransport
from gpu_engine.extensions.transfer.metrics import TransferMetrics
from gpu_engine.extensions.transfer.remote_prefill import RemotePrefill
from protos.transfer.v1 import transfer_pb2 as pb
from protos.transfer.v1 import transfer_pb2_grpc
from tests.gpu_engine.made_requests import made
from tests.waiting import eventually

FORM = PageFormat("f", "float32", 16, "channel-major", 1, 1, 8)


def done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
    return future


@dataclass
class FakePages:
    """A `PageAccess` that records its calls."""

    opened: Opened = Opened(0)  # noqa: RUF009  # frozen
    form: PageFormat = FORM
    written: list[tuple[int, int]] = field(default_factory=list)
    closed: list[list[Request]] = field(default_factory=list)
    write_fails: bool = False

    def read(self, request: Request, first_page: int, most: int) -> Future[Piece]:
        return done(Piece(1, b""))

    def open(self, wanted: WantedPages) -> Future[Opened]:
        return done(self.opened)

    def write(self, wanted: WantedPages, first_page: int, piece: Piece) -> Future[None]:
        if self.write_fails:
            return done(InternalError("no"))
        self.written.append((first_page, piece.num_pages))
        return done(None)

    def close(self, wanted: WantedPages, requests: Sequence[Request]) -> None:
        self.closed.append(list(requests))


@dataclass
class FakeTransport:
    """Yields pages one by one, up to `fails_at`, with `reason`; `hangs` instead at that page."""

    address: str
    reason: Fallback | None = None
    fails_at: int = 0
    hangs: bool = False
    asked: list[int] = field(default_factory=list)
    ended: int = 0

    async def fetch(self, wanted: WantedPages, first_page: int, form: PageFormat) -> AsyncGenerator[Piece]:
        self.asked.append(first_page)
        try:
            for page in range(first_page, len(wanted.token_ids) // form.page_size):
                if page >= self.fails_at and self.hangs:
                    await asyncio.Event().wait()
                if page >= self.fails_at and self.reason:
                    raise TransferFailed(self.reason, f"{self.address} {self.reason.value}")
                yield Piece(1, bytes(form.page_bytes))
        finally:
            self.ended += 1

    async def close(self) -> None:
        pass


@dataclass
class Setup:
    prefills: RemotePrefill
    pages: FakePages
    registry: CollectorRegistry
    now_s: list[float]

    def fallbacks(self, reason: Fallback) -> float:
        return self.registry.get_sample_value("lockstep_transfer_fallbacks_total", {"reason": reason.value}) or 0.0

    async def ask(self, request: Request | None = None) -> bool:
        """Run one request to the end of its fetch; return whether it waited for pages."""
        request = request or prompt()
        wanted = self.prefills.begin([request])
        if wanted is not None:
            await asyncio.gather(self.prefills.start(wanted, [request]), return_exceptions=True)
        return wanted is not None


def setup(*transports: FakeTransport, pages: FakePages | None = None) -> Setup:
    registry, pages, now_s = CollectorRegistry(), pages or FakePages(), [100.0]
    metrics = TransferMetrics(registry)
    prefills = RemotePrefill(pages, transports, metrics, least_tokens=32, clock_s=lambda: now_s[0])
    prefills.form = FORM
    return Setup(prefills, pages, registry, now_s)


def prompt(count: int = 65, **fields: Any) -> Request:
    return made(list(range(count)), max_tokens=1, **fields)


async def test_pages_are_written_in_order_and_the_sequences_go_on() -> None:
    one = setup(FakeTransport("a"), pages=FakePages(Opened(1)))
    request = prompt()
    assert await one.ask(request)
    assert one.pages.written == [(1, 1), (2, 1), (3, 1)]
    assert one.pages.closed == [[request]]
    assert one.registry.get_sample_value("lockstep_transfer_received_pages_total") == 3


async def test_short_prompts_and_those_whose_forward_is_wanted_are_not_fetched() -> None:
    for request, fetched in ((prompt(33), True), (prompt(32), False), (prompt(prompt_logprobs=0), False)):
        transport = FakeTransport("a")
        assert await setup(transport).ask(request) is fetched  # two whole pages before the last token
        assert bool(transport.asked) is fetched


async def test_another_engine_goes_on_where_one_stopped() -> None:
    for failing, second in (("a", "b"), ("b", "a")):
        transports = {failing: FakeTransport(failing, Fallback.GONE, fails_at=2), second: FakeTransport(second)}
        one = setup(*transports.values())
        for _ in range(2):  # the first time either may be asked first
            await one.ask()
        assert one.pages.written[:4] == [(0, 1), (1, 1), (2, 1), (3, 1)]
        assert one.fallbacks(Fallback.GONE) == 0


async def test_a_slow_engine_is_not_followed_by_another_wait() -> None:
    slow = [FakeTransport(name, Fallback.SLOW) for name in "ab"]
    one = setup(*slow)
    await one.ask()
    assert sum(len(transport.asked) for transport in slow) == 1
    assert one.fallbacks(Fallback.SLOW) == 1
    assert len(one.pages.closed) == 1


async def test_an_engine_that_failed_rests_for_longer_each_time_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    transport = FakeTransport("a", Fallback.DIFFERS)
    one = setup(transport)
    with caplog.at_level(logging.INFO):
        assert await one.ask()
        assert not await one.ask()  # at once, without a wait
        one.now_s[0] += 1.0
        await one.ask()
        one.now_s[0] += 1.0
        await one.ask()
        assert len(transport.asked) == 2
        one.now_s[0] += 1.0
        transport.reason = None
        await one.ask()
    assert one.fallbacks(Fallback.DIFFERS) == 4
    assert [record.getMessage() for record in caplog.records] == [
        "prompts are prefilled here, not by a: a differs",
        "a prefills prompts again",
    ]


async def test_a_prompt_is_prefilled_here_without_room_or_after_a_failure_of_the_own_engine() -> None:
    for reason in (Fallback.BUSY, Fallback.NO_PAGES, Fallback.FAILED):
        transport, fails = FakeTransport("a"), reason is Fallback.FAILED
        one = setup(transport, pages=FakePages(write_fails=True) if fails else FakePages(Opened(0, reason)))
        await one.ask()
        assert one.fallbacks(reason) == 1
        assert bool(transport.asked) is fails
        assert len(one.pages.closed) == 1


async def test_a_cancelled_fetch_ends_the_transport_and_closes_the_import() -> None:
    transport = FakeTransport("a", hangs=True, fails_at=1)
    one, request = setup(transport), prompt()
    wanted = one.prefills.begin([request])
    assert wanted is not None
    task = one.prefills.start(wanted, [request])
    await eventually(lambda: one.pages.written)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (transport.ended, one.pages.closed) == (1, [[request]])


async def test_the_least_busy_engine_is_asked() -> None:
    hanging = [FakeTransport(name, hangs=True) for name in "ab"]
    one = setup(*hanging)
    tasks = []
    for _ in range(4):
        request = prompt()
        wanted = one.prefills.begin([request])
        assert wanted is not None
        tasks.append(one.prefills.start(wanted, [request]))
        await eventually(lambda: sum(len(each.asked) for each in hanging) == len(tasks))
    assert [len(transport.asked) for transport in hanging] == [2, 2]
    await one.prefills.aclose()
    assert len(one.pages.closed) == 4


@dataclass
class OtherEngine(transfer_pb2_grpc.KvTransferServicer):
    """An engine that sends `responses`, and then ends its stream with `status`, or hangs without one."""

    responses: list[pb.FetchResponse]
    status: grpc.StatusCode | None = grpc.StatusCode.OK

    async def Fetch(self, request: pb.FetchRequest, context: Any) -> None:  # type: ignore[override]
        for response in self.responses:
            await context.write(response)
        if self.status is None:
            await asyncio.Event().wait()
        elif self.status is not grpc.StatusCode.OK:
            await context.abort(self.status, "no")


def pages(count: int, more_bytes: int = 0) -> pb.FetchResponse:
    return pb.FetchResponse(num_pages=count, data=bytes(count * FORM.page_bytes + more_bytes))


async def test_pages_that_do_not_fit_and_streams_that_end_early_fail_the_fetch(tmp_path: Path) -> None:
    cases: list[tuple[OtherEngine, int, Fallback | None]] = [
        (OtherEngine([pages(1), pages(2)]), 3, None),
        (OtherEngine([pages(2), pages(2)]), 2, Fallback.DIFFERS),
        (OtherEngine([pages(0)]), 0, Fallback.DIFFERS),
        (OtherEngine([pages(1, more_bytes=1)]), 0, Fallback.DIFFERS),
        (OtherEngine([pages(2)]), 2, Fallback.GONE),
        (OtherEngine([pages(1)], grpc.StatusCode.UNAVAILABLE), 1, Fallback.GONE),
        (OtherEngine([], grpc.StatusCode.FAILED_PRECONDITION), 0, Fallback.DIFFERS),
        (OtherEngine([], grpc.StatusCode.UNAUTHENTICATED), 0, Fallback.REFUSED),
        (OtherEngine([pages(1)], None), 1, Fallback.SLOW),
    ]
    wanted = WantedPages(list(range(4 * FORM.page_size)), "", "w")
    for number, (engine, expected, reason) in enumerate(cases):
        server, address = grpc.aio.server(), f"unix:{tmp_path}/{number}"
        transfer_pb2_grpc.add_KvTransferServicer_to_server(engine, server)
        server.add_insecure_port(address)
        await server.start()
        timeout_s = 2.0 if reason is Fallback.SLOW else 60.0
        transport, found, failure = GrpcTransport(address, timeout_s=timeout_s), 0, None
        try:
            async for piece in transport.fetch(wanted, 1, FORM):
                found += piece.num_pages
        except TransferFailed as error:
            failure = error.reason
        assert (found, failure) == (expected, reason), number
        await transport.close()
        await server.stop(None)
