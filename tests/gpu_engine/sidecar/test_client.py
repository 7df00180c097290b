"""The grammar client against a fake grammar process: real sockets, a real segment hand-over, scripted answers."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from gpu_engine.api.config import ServerConfig
from gpu_engine.api.errors import (
    GrammarUnavailable,
    InternalError,
    InvalidRequest,
    LimitExceeded,
    LockstepError,
    NotSupported,
)
from gpu_engine.api.request import GrammarExact, GrammarKind, GrammarOwner, GrammarSpec, Request
from gpu_engine.sidecar.client import GrammarClient
from gpu_engine.sidecar.compilations import grammar_error
from gpu_engine.sidecar.link import TOLD_S, GrammarLink, GrammarSetup, segment_hand_over
from protos.grammar.v1 import grammar_pb2 as gpb
from protos.grammar.v1 import grammar_pb2_grpc
from shared_mem.channel import EngineEnd
from shared_mem.errors import HandshakeError, PeerGone, SharedMemoryError, VersionSkew
from shared_mem.handover import SOCKET_NAME, listen, recv_segment
from shared_mem.layout import Layout
from shared_mem.segment import Segment
from tests.fakes import FakeEngine
from tests.gpu_engine.made_requests import made
from tests.waiting import eventually

SETUP = GrammarSetup(b"{}", 320, (2,), 7)


class FakeGrammarProcess(grammar_pb2_grpc.GrammarServicer):
    """Answers as scripted; `stop` is its death."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.calls: Counter[str] = Counter()
        self.configured: list[gpb.ConfigureRequest] = []
        self.accepted: Counter[str] = Counter()
        """Compilations that were said to be of accepted sequences, by source."""
        self.bound: list[gpb.BindRequest] = []
        self.released: list[gpb.ReleaseRequest] = []
        self.refuse_compile: tuple[grpc.StatusCode, str] | None = None
        self.refuse_bind: list[grpc.StatusCode] = []
        self.refuse_configure = ""
        self.hold_compile = asyncio.Event()
        self.hold_compile.set()
        self.way_back = gpb.BacktrackResponse()
        self.hold_bind = asyncio.Event()
        self.hold_bind.set()
        self.max_compilations = 0
        self.attempt_limit_s = 0.0
        self.compile_timeout_s = 0.0
        self.compile_deadlines_s: list[float | None] = []
        self.turns: list[tuple[str, str, float]] = []
        """Owner, tenant and its weight of each Compile."""
        self._stack = AsyncExitStack()
        self._server: grpc.aio.Server
        self._peers: list[socket.socket] = []
        self._receiving: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._server = grpc.aio.server()
        grammar_pb2_grpc.add_GrammarServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.directory}/grammar.sock")
        await self._server.start()
        self._listener = listen(self.directory / SOCKET_NAME)
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Take a connection at once: a task that is cancelled while it waits for one may lose it."""
        peer, _ = self._listener.accept()
        self._peers.append(peer)
        self._receiving.append(asyncio.create_task(self._receive(peer)))

    async def _receive(self, peer: socket.socket) -> None:
        # An engine that was too slow comes again.
        with suppress(SharedMemoryError):
            segment = await asyncio.to_thread(recv_segment, peer)
            segment.close()

    async def stop(self) -> None:
        asyncio.get_running_loop().remove_reader(self._listener)
        for task in self._receiving:
            task.cancel()
        await asyncio.gather(*self._receiving, return_exceptions=True)
        self._listener.close()
        for peer in self._peers:
            peer.close()
        await self._server.stop(None)

    async def Configure(self, request: gpb.ConfigureRequest, context: Any) -> Any:
        self.configured.append(request)
        if self.refuse_configure:
            raise ModuleNotFoundError(self.refuse_configure)
        limits = {
            "max_compilations": self.max_compilations,
            "attempt_limit_s": self.attempt_limit_s,
            "compile_timeout_s": self.compile_timeout_s,
        }
        return gpb.ConfigureResponse(backends=[gpb.BACKEND_LLGUIDANCE], versions=["1"], pid=1, **limits)

    async def Compile(self, request: gpb.CompileRequest, context: Any) -> Any:
        self.calls["compile"] += 1
        self.accepted[request.source] += request.accepted
        self.compile_deadlines_s.append(context.time_remaining())
        self.turns.append((request.owner, request.tenant, request.tenant_weight))
        try:
            await self.hold_compile.wait()
        except asyncio.CancelledError:
            self.calls["compile cancelled"] += 1
            raise
        if self.refuse_compile:
            await context.abort(*self.refuse_compile)
        return gpb.CompileResponse(
            grammar_id=f"id:{request.source}",
            backend=gpb.BACKEND_LLGUIDANCE,
            compile_ms=3.0,
            warnings=["w"],
            min_tokens=2,
            known_answer_tokens=7,
        )

    async def Backtrack(self, request: gpb.BacktrackRequest, context: Any) -> Any:
        return self.way_back

    async def Bind(self, request: gpb.BindRequest, context: Any) -> Any:
        self.bound.append(request)
        await self.hold_bind.wait()
        if self.refuse_bind:
            await context.abort(self.refuse_bind.pop(0), "no")
        return gpb.BindResponse()

    async def Release(self, request: gpb.ReleaseRequest, context: Any) -> Any:
        self.released.append(request)
        return gpb.ReleaseResponse()

    async def GetStats(self, request: gpb.GetStatsRequest, context: Any) -> Any:
        return gpb.GetStatsResponse(matchers=4, cached_grammars=5)


@dataclass
class FakeChannel:
    """Abort word and heartbeats without a segment. The grammar process beats while `age_ns` is 0."""

    words: list[str] = field(default_factory=list)
    age_ns: int | None = 0
    beats: int = 0

    def set_abort(self) -> None:
        self.words.append("abort")

    def clear_abort(self) -> None:
        self.words.append("run")

    def heartbeat(self) -> None:
        self.beats += 1

    def heartbeat_age_ns(self) -> int | None:
        return self.age_ns


@dataclass
class Setup:
    process: FakeGrammarProcess
    client: GrammarClient
    link: GrammarLink
    engine: FakeEngine
    channel: FakeChannel
    stuck: list[str]

    def prepare(self, name: str = "r", source: str = "a") -> list[LockstepError]:
        """Announce a request; return the errors that it gets, now and later."""
        errors: list[LockstepError] = []
        self.client.prepare(name, spec(source), errors.append)
        return errors

    def open(
        self, slot: int, slot_gen: int = 1, tokens: tuple[int, ...] = (), *, name: str = "r", source: str = "a"
    ) -> None:
        self.client.open(slot, slot_gen, request(name, source), tokens)

    async def opened(self, count: int = 1) -> None:
        await eventually(lambda: len(self.engine.opened) == count)

    async def failed(self, count: int = 1) -> LockstepError:
        """Wait for the end of so many requests; return the last one's error."""
        await eventually(lambda: len(self.engine.failed) == count)
        return self.engine.failed[-1][2]

    async def called(self, what: str, count: int = 1) -> None:
        await eventually(lambda: self.process.calls[what] >= count)

    async def dies(self) -> None:
        await self.process.stop()
        await eventually(lambda: not self.link.up)

    async def comes_back(self) -> None:
        await self.process.start()
        await eventually(lambda: self.link.up)


@asynccontextmanager
async def connected(
    tmp_path: Path,
    *,
    wait_s: float = 20.0,
    silence_s: float = 20.0,
    max_compilations: int = 0,
    attempt_limit_s: float = 0.0,
    compile_timeout_s: float = 0.0,
    was_attached: bool = False,
) -> AsyncIterator[Setup]:
    process = FakeGrammarProcess(tmp_path)
    process.max_compilations, process.attempt_limit_s = max_compilations, attempt_limit_s
    process.compile_timeout_s = compile_timeout_s
    await process.start()
    channel, engine, stuck = FakeChannel(), FakeEngine(), list[str]()
    config = ServerConfig(grammar="connect", grammar_dir=str(tmp_path), grammar_wait_s=wait_s)
    with Segment.create(Layout(num_slots=2, num_rows=2, vocab_size=320, generation=7)) as segment:
        client = GrammarClient(config, channel)
        link = GrammarLink(
            tmp_path,
            SETUP,
            segment_hand_over(segment),
            client,
            channel,
            silence_s=silence_s,
            on_stuck=lambda: stuck.append("kill"),
            was_attached=lambda: was_attached,
        )
        client.attach(engine, link)
        try:
            async with running(link):
                await link.ready(20)
                yield Setup(process, client, link, engine, channel, stuck)
        finally:
            await client.aclose()
            await process.stop()
            engine.close(5)


@asynccontextmanager
async def running(link: GrammarLink) -> AsyncIterator[None]:
    task = asyncio.create_task(link.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def spec(source: str = "a") -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, source, whitespace=1, backend=2)


def request(request_id: str = "r", source: str = "a") -> Request:
    return made([1], request_id=request_id, max_tokens=9, grammar=spec(source))


async def test_the_process_is_configured_and_compiles_in_turns_and_within_the_time_that_it_allows(
    tmp_path: Path,
) -> None:
    async with connected(tmp_path, attempt_limit_s=1000.0) as s:
        (message,) = s.process.configured
        assert (message.tokenizer_json, message.vocab_size, message.generation) == (b"{}", 320, 7)
        assert list(message.stop_token_ids) == [2]
        assert s.client.backends == (gpb.BACKEND_LLGUIDANCE,)
        assert s.channel.words == []
        async with asyncio.timeout(60):
            while not (stats := await s.client.stats()).ready:  # noqa: ASYNC110 - as in `eventually`
                await asyncio.sleep(0.01)
        assert (stats.starts, stats.matchers, stats.cached_grammars) == (1, 4, 5)
        await s.client.compile(spec("a"))
        await s.client.compile(
            replace(spec("b"), backend=gpb.BACKEND_AUTO, owner=GrammarOwner("", "acme", 1, 1, 0, 2.5))
        )
        await s.client.compile(replace(spec("c"), client="one of the clients"))
        assert s.process.turns == [("", "", 0.0), ("", "acme", 2.5), ("", "one of the clients", 1.0)]
        one, auto, _ = (deadline_s or 0.0 for deadline_s in s.process.compile_deadlines_s)
        assert 1000 < one < 1100
        assert 2000 < auto < 2200, "two attempts with the one backend"


async def test_a_slot_is_opened_with_its_tokens_and_released(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with connected(tmp_path) as s:
        s.client.close(3, 3)  # one without a grammar
        s.prepare()
        await asyncio.to_thread(s.open, 1, 5, (8, 9))
        await eventually(lambda: s.engine.opened == [(1, 5)])
        (bind,) = s.process.bound
        assert (bind.slot, bind.slot_gen, bind.grammar_id, list(bind.committed_tokens)) == (1, 5, "id:a", [8, 9])
        assert bind.request_id == "r"
        assert s.process.calls["compile"] == 1
        s.client.forget("r")
        await asyncio.to_thread(s.client.close, 1, 5)
        await eventually(lambda: s.process.released)
        assert (s.process.released[0].slot, s.process.released[0].slot_gen) == (1, 5)
        # One that is closed while its grammar compiles is never bound.
        s.process.hold_compile.clear()
        s.open(0, source="b")
        await s.called("compile", 2)
        s.client.close(0, 1)
        s.process.hold_compile.set()
        await eventually(lambda: len(s.process.released) == 2)
        assert (len(s.process.bound), len(s.engine.opened), s.engine.failed) == (1, 1, [])
    assert not [record for record in caplog.records if record.exc_info]


async def test_equal_grammars_share_one_compilation_which_is_cancelled_with_the_last_request(tmp_path: Path) -> None:
    async with connected(tmp_path) as s:
        s.process.hold_compile.clear()
        for i in range(2):
            s.prepare(f"r{i}")
        await s.called("compile")
        s.client.forget("r0")
        ahead = asyncio.create_task(s.client.compile(spec()))
        await asyncio.sleep(0)
        s.client.forget("r1")
        await asyncio.sleep(0)
        assert s.process.calls["compile cancelled"] == 0
        ahead.cancel()
        await s.called("compile cancelled")
        # A request that arrives now starts a new compilation, and does not see the cancellation.
        s.process.hold_compile.set()
        compiled = await s.client.compile(spec())
        assert (compiled.grammar_id, compiled.min_tokens, compiled.known_answer_tokens) == ("id:a", 2, 7)
        assert s.process.calls["compile"] == 2
        s.process.hold_compile.clear()
        for i in range(10):
            s.prepare(f"r{i}", "b")
        for i in range(2):
            s.open(i, name=f"r{i}", source="b")
        await s.called("compile", 3)
        s.process.hold_compile.set()
        await s.opened(2)
        assert s.process.calls["compile"] == 3


async def test_what_the_process_would_refuse_is_not_sent(tmp_path: Path) -> None:
    async with connected(tmp_path, max_compilations=2) as s:
        await s.client.compile(spec("had"))
        s.process.hold_compile.clear()
        for name in ("a", "b", "b"):  # an equal one joins, and takes no place
            s.prepare(f"r{name}", name)
        with pytest.raises(LimitExceeded, match="compile_queue: 2 compilations"):
            s.prepare("rc", "c")
        with pytest.raises(LimitExceeded, match="compile_queue"):
            await s.client.compile(spec("c"))
        assert s.client.admission.refused == 2
        had = asyncio.create_task(s.client.compile(spec("had")))
        await s.called("compile", 4)
        s.client.forget("ra")
        await s.called("compile cancelled")
        s.prepare("rc", "c")
        await s.called("compile", 5)
        s.process.hold_compile.set()
        assert (await had).grammar_id == "id:had"


async def test_whatever_a_grammar_waits_for_counts_toward_one_limit_which_ends_no_running_sequence(
    tmp_path: Path,
) -> None:
    ours = GrammarOwner("", "acme", max_compilations=1, max_waiting=1, max_bytes=0)
    async with connected(tmp_path, wait_s=1.2, compile_timeout_s=0.8) as s:
        s.process.hold_compile.clear()
        s.open(0, source="running")
        auto = replace(spec("auto"), backend=gpb.BACKEND_AUTO)
        waiting = [replace(spec(name), owner=ours) for name in ("its turn", "waits for its turn")]
        ended = asyncio.gather(*map(s.client.compile, (auto, *waiting)), return_exceptions=True)
        await eventually(lambda: s.process.accepted.keys() >= {"running", "auto", "its turn"})
        assert "waits for its turn" not in s.process.accepted  # it may get the turn when the limit of both ends
        results = await ended
        assert [type(result) for result in results] == [LimitExceeded] * 3
        assert {str(result).partition(" of its")[0] for result in results} == {
            "grammar: compile_timeout_s: the grammar was not ready within 2 s"
        }
        assert "1.2 s to wait (grammar_wait_s) and 0.8 s to compile" in str(results[0])
        await s.called("compile cancelled", 2)
        s.process.hold_compile.set()
        await s.opened()
        assert s.engine.failed == []
        s.link.compile_timeout_s = 60.0
        assert (await s.client.compile(waiting[1])).grammar_id == "id:waits for its turn"


async def test_a_process_guides_from_its_word_that_it_has_a_matcher_until_the_last_is_closed(tmp_path: Path) -> None:
    async with connected(tmp_path) as s:
        s.process.hold_compile.clear()
        s.process.hold_bind.clear()
        s.open(0)
        await s.called("compile")
        assert s.client.guided_by == 0, "it compiles, and sleeps meanwhile"
        s.process.hold_compile.set()
        await eventually(lambda: s.process.bound)
        assert s.client.guided_by == 0
        s.process.hold_bind.set()
        await s.opened()
        assert s.client.guided_by == 1
        await s.dies()
        assert s.client.guided_by == 0
        await s.comes_back()
        assert s.client.guided_by == 0, "the next one has no matcher yet"
        s.open(0)
        await s.opened(2)
        assert s.client.guided_by == 2
        # A beam that was forked from it has a matcher, without another call.
        s.client.forked(1, 1, request("beam"), None)
        s.client.close(0, 1)
        await eventually(lambda: s.process.released)
        assert (s.client.guided_by, len(s.engine.opened)) == (2, 2)
        s.client.forked(0, 2, request("next beam"), (1, 1))  # in its place
        await asyncio.to_thread(s.client.close, 0, 2)
        await eventually(lambda: s.client.guided_by == 0)


async def test_slots_are_opened_after_a_restart_however_many_grammars_are_compiled_again(tmp_path: Path) -> None:
    def compiling(count: int) -> bool:
        return f"running={count} " in repr(s.client)

    async with connected(tmp_path, max_compilations=1) as s:
        sources = ("a", "b", "no ticket")
        for source in sources[:2]:
            s.prepare(source, source)
            await eventually(lambda: s.client.compiled_s(source))  # noqa: B023 - ends before it changes
        for slot, source in enumerate(sources):
            s.open(slot, name=source, source=source)
        await s.opened(3)
        await s.dies()
        s.process.hold_compile.clear()
        s.process.refuse_bind = [grpc.StatusCode.NOT_FOUND] * 2
        await s.comes_back()
        for slot, source in enumerate(sources):
            s.open(slot, 1, (5,), name=source, source=source)
        await eventually(lambda: s.process.calls["compile"] == 6 or s.engine.failed)
        # No queue of the grammar process refuses them, either.
        assert s.process.accepted == {"a": 1, "b": 1, "no ticket": 2}
        assert s.engine.failed == []
        # Each of them counts once: until one has ended there is no place for a new one.
        assert compiling(3)
        with pytest.raises(LimitExceeded, match="compile_queue: 1 "):
            s.prepare("new", "new")
        # Another death: what ran is opened once more, and compiled by the next process.
        await s.process.stop()
        await eventually(lambda: compiling(0))
        await s.comes_back()
        s.open(2, 1, (5,), name="no ticket", source="no ticket")
        await eventually(lambda: compiling(1))
        s.client.close(2, 1)
        await eventually(lambda: compiling(0))
        s.process.hold_compile.set()
        for slot, source in enumerate(sources[:2]):
            s.open(slot, 1, (5,), name=source, source=source)
        await s.opened(5)
        s.prepare("new", "new")
        await eventually(lambda: s.client.compiled_s("new"))
        assert compiling(0)
        assert s.engine.failed == []


async def test_a_refused_grammar_fails_at_arrival_and_at_its_slot(tmp_path: Path) -> None:
    async with connected(tmp_path) as s:
        for number, (status, kind, text) in enumerate(
            (
                (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest, "grammar: line 3"),
                (grpc.StatusCode.RESOURCE_EXHAUSTED, LimitExceeded, "grammar: line 3"),
                (grpc.StatusCode.UNIMPLEMENTED, NotSupported, "grammar: line 3"),
                (grpc.StatusCode.DEADLINE_EXCEEDED, GrammarUnavailable, "gave no answer to Compile within 35 s"),
                (grpc.StatusCode.INTERNAL, InternalError, "INTERNAL"),
            )
        ):
            s.process.refuse_compile = (status, "source: line 3")
            refused = s.prepare(status.name, status.name)
            s.open(0, number, name=status.name, source=status.name)
            at_slot = await s.failed(number + 1)
            await eventually(lambda refused=refused: refused)
            assert s.engine.failed[-1][:2] == (0, number)
            for error in (refused[0], at_slot):
                assert type(error) is kind
                assert text in str(error)


async def test_a_refused_grammar_is_freed_with_its_request(tmp_path: Path) -> None:
    """It may have megabytes, and the collector of Python finds a cycle of old objects minutes later."""

    def held() -> int:
        return sum(type(each) is GrammarSpec and each.source == "refused" for each in gc.get_objects())

    async with connected(tmp_path) as s:
        s.process.refuse_compile = (grpc.StatusCode.RESOURCE_EXHAUSTED, "source: line 3")
        gc.collect()
        gc.disable()
        try:
            refused = s.prepare("r", "refused")
            s.open(0, source="refused")
            await s.failed()
            await eventually(lambda: refused)
            s.client.close(0, 1)
            s.client.forget("r")
            with pytest.raises(LimitExceeded):
                await s.client.compile(spec("refused"))
            refused.clear()
            s.engine.failed.clear()
            await eventually(lambda: not held())
        finally:
            gc.enable()


async def test_a_process_that_cannot_be_configured_is_reported_once_with_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(tmp_path) as s:
        await s.dies()
        s.process.refuse_configure = "No module named 'x'"
        before = len(s.process.configured)
        await s.process.start()
        await eventually(lambda: len(s.process.configured) > before + 2)
        errors = [record.getMessage() for record in caplog.records if record.name == "gpu_engine.sidecar.link"]
        (error,) = [line for line in errors if "cannot be configured" in line]
        assert "No module named 'x'" in error
        s.process.refuse_configure = ""
        await eventually(lambda: s.link.up)


class BrokenStub:
    """Has a defect that no call should have."""

    async def Bind(self, message: gpb.BindRequest, timeout: float) -> gpb.BindResponse:
        raise ZeroDivisionError


async def test_an_exact_answer_is_not_steered_and_may_be_spelled_in_any_way(tmp_path: Path) -> None:
    async with connected(tmp_path) as s:
        for slot, exact in enumerate((None, GrammarExact(9, 1.0), GrammarExact(9, 1.0, any_spelling=True))):
            asked = made([1], request_id=f"r{slot}", max_tokens=9, grammar=spec("a"), grammar_exact=exact)
            s.client.open(slot, 1, asked, ())
            await s.opened(slot + 1)
        assert [(bound.max_tokens, bound.any_spelling) for bound in s.process.bound] == [
            (9, False),
            (0, False),
            (0, True),
        ]


async def test_an_evicted_grammar_is_compiled_again_once_and_a_defect_ends_its_request(tmp_path: Path) -> None:
    async with connected(tmp_path) as s:
        s.process.refuse_bind = [grpc.StatusCode.NOT_FOUND]
        s.open(0)
        await s.opened()
        assert (s.process.calls["compile"], len(s.process.bound)) == (2, 2)
        s.process.refuse_bind = [grpc.StatusCode.NOT_FOUND] * 2
        s.open(1)
        assert isinstance(await s.failed(1), GrammarUnavailable)
        s.process.refuse_bind = [grpc.StatusCode.INVALID_ARGUMENT]  # of the tokens, which are ours
        s.open(0, 2, (1,))
        assert isinstance(await s.failed(2), InternalError)
        s.prepare()
        await eventually(lambda: s.client.compiled_s("r"))
        s.link.stub = BrokenStub()  # type: ignore[assignment]
        s.open(0, 3)
        assert isinstance(await s.failed(3), InternalError)


async def test_a_way_back_takes_back_some_tokens_and_none_that_was_sent(tmp_path: Path) -> None:
    """The number is another process's: outside its range it ends one request, and not the engine."""
    async with connected(tmp_path) as s:
        for count, num_tokens in enumerate((0, 1, 2, 3, 99), start=1):
            s.process.way_back = gpb.BacktrackResponse(found=True, num_tokens=num_tokens, dead_texts=[b"x"])
            s.client.backtrack(0, count, request(), (7, 8, 9), 1, ())
            await eventually(lambda count=count: len(s.engine.failed) + len(s.engine.backtracked) == count)
        assert s.engine.backtracked == [(0, 2, 1, (b"x",)), (0, 3, 2, (b"x",))]
        assert [(slot_gen, type(error)) for _, slot_gen, error in s.engine.failed] == [
            (count, InternalError) for count in (1, 4, 5)
        ]


async def test_a_lost_process_pauses_and_the_next_one_goes_on(tmp_path: Path) -> None:
    async with connected(tmp_path) as s:
        s.open(0)
        await s.opened()
        s.process.hold_compile.clear()
        cut = s.prepare("cut", "cut")
        await s.called("compile", 2)
        await s.process.stop()
        await eventually(lambda: s.engine.outages == ["lost"])
        assert s.channel.words == ["abort"]
        late = s.prepare("late", "late")
        s.process.hold_compile.set()
        await s.process.start()
        await eventually(lambda: s.engine.outages == ["lost", "restored"])
        assert s.channel.words == ["abort", "run"]
        assert len(s.process.configured) == 2
        s.open(0, 1, (5, 6))
        await s.opened(2)
        assert list(s.process.bound[-1].committed_tokens) == [5, 6]
        for slot, name in enumerate(("cut", "late")):
            s.open(slot, 2, name=name, source=name)
        await s.opened(4)
        assert (cut, late, s.engine.failed) == ([], [], [])
        assert (await s.client.stats()).starts == 2


async def test_a_loss_is_reported_with_the_matchers_that_were_being_built(tmp_path: Path) -> None:
    async with connected(tmp_path) as s:
        s.open(0, 4, name="bound")
        await s.opened()
        s.process.hold_bind.clear()
        s.open(1, 5, (7,), name="in hand")
        await eventually(lambda: len(s.process.bound) == 2)
        await s.process.stop()
        await eventually(lambda: s.engine.outages == ["lost"])
        assert s.engine.binding == {(1, 5)}
        # In the next one its grammar is gone, and compiled again: that is not yet the matcher.
        s.process.hold_bind.set()
        s.process.refuse_bind = [grpc.StatusCode.NOT_FOUND]
        await s.comes_back()
        compiled = s.process.calls["compile"]
        await s.client.compile(spec())
        s.process.hold_compile.clear()
        s.prepare("in hand", "b")
        s.open(1, 5, (7,), name="in hand", source="b")
        await s.called("compile", compiled + 2)
        await s.process.stop()
        await eventually(lambda: s.engine.outages.count("lost") == 2)
        assert s.engine.binding == set()
        s.process.hold_compile.set()
        await s.process.start()


async def test_a_process_that_does_not_come_back_ends_guided_requests_with_and_without_a_slot(tmp_path: Path) -> None:
    async with connected(tmp_path, wait_s=0.3) as s:
        in_line, over = s.prepare("in line"), s.prepare("over", "b")
        s.open(0, name="in line")
        await s.opened()
        s.client.close(0, 1)  # preempted: it waits for a slot again
        await eventually(lambda: s.process.released)
        s.client.forget("over")
        s.open(1)
        await s.opened(2)
        await s.process.stop()
        assert isinstance(await s.failed(), GrammarUnavailable)
        late = s.prepare("late", "late")
        await eventually(lambda: late and in_line)
        assert [type(errors[0]) for errors in (late, in_line)] == [GrammarUnavailable] * 2
        assert over == []
        await s.process.start()


async def test_after_the_process_is_given_up_no_request_waits_until_one_comes(tmp_path: Path) -> None:
    async with connected(tmp_path) as s:
        s.open(0)
        await s.opened()
        await s.dies()
        assert s.client.serves, "a request that arrives now waits"
        first = s.prepare("r1", "b")
        s.client.give_up("failed 8 times")
        assert not s.client.serves
        second = s.prepare("r2", "c")
        await eventually(lambda: first and second)
        assert all("failed 8 times" in str(error) for error in (*first, *second))
        assert len(s.engine.failed) == 1
        await s.comes_back()
        assert s.client.serves
        s.open(0)
        await s.opened(2)


async def test_a_process_without_heartbeats_is_lost_and_what_it_compiles_is_compiled_again(tmp_path: Path) -> None:
    async with connected(tmp_path, silence_s=2 * TOLD_S) as s:  # longer than any silence that is none
        s.link.retire_s = 0.05
        assert s.channel.beats > 0
        s.process.hold_compile.clear()
        refused = s.prepare()
        await s.called("compile")
        s.channel.age_ns = 10**12
        await eventually(lambda: s.engine.outages[:2] == ["silent", "lost"])
        assert s.stuck[0] == "kill"
        # It lives, and is attached again; the call on the channel of before is cut off.
        s.channel.age_ns = 0
        await s.called("compile cancelled")
        await eventually(lambda: s.link.up)
        s.process.hold_compile.set()
        s.open(0)
        await s.opened()
        assert (refused, s.engine.failed) == ([], [])


async def test_a_process_that_is_silent_for_a_moment_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with connected(tmp_path) as s:
        s.open(0)
        await s.opened()
        for count in range(1, 4):
            s.channel.age_ns = 400_000_000
            await eventually(lambda count=count: s.engine.outages == ["silent", "alive"] * (count - 1) + ["silent"])
            assert s.channel.words == ["abort", "run"] * (count - 1) + ["abort"]
            s.channel.age_ns = 0
            await eventually(lambda count=count: s.engine.outages == ["silent", "alive"] * count)
            assert s.channel.words == ["abort", "run"] * count
        assert len(s.process.bound) == s.link.attached == 1
        assert (s.stuck, s.link.silences) == ([], 3)
    assert not caplog.text.count("shows no life"), "so short a silence is only counted"


async def test_only_a_heartbeat_ends_a_silence(tmp_path: Path) -> None:
    """A late check of ours lengthens the silence that is none, and ends none."""
    async with connected(tmp_path) as s:
        s.channel.age_ns = 400_000_000
        await eventually(lambda: s.engine.outages == ["silent"])
        time.sleep(0.15)  # noqa: ASYNC251 - the loop is late
        await asyncio.sleep(0.1)
        assert s.engine.outages == ["silent"]
        s.channel.age_ns = 0
        await eventually(lambda: s.engine.outages == ["silent", "alive"])


async def test_a_process_that_is_attached_again_in_time_is_not_killed(tmp_path: Path) -> None:
    async with connected(tmp_path, silence_s=3.0, was_attached=True) as s:
        await s.dies()
        await s.process.start()
        await eventually(lambda: s.link.attached == 2)
        await asyncio.sleep(3.1)
        assert s.link.up
        assert s.stuck == []


@dataclass
class Tries:
    """Hands a segment over as a test says, and records when a process is killed."""

    answer: Callable[[], socket.socket]
    count: int = 0
    killed_s: list[float] = field(default_factory=list)

    def link(self, tmp_path: Path, *, silence_s: float = 1.0, was_attached: bool = False) -> GrammarLink:
        def hand_over(directory: Path) -> socket.socket:
            self.count += 1
            return self.answer()

        return GrammarLink(
            tmp_path,
            SETUP,
            hand_over,
            GrammarClient(ServerConfig(), FakeChannel()),
            FakeChannel(),
            silence_s=silence_s,
            on_stuck=lambda: self.killed_s.append(time.monotonic()),
            was_attached=lambda: was_attached,
        )


def raises(error: Exception, after: threading.Event | None = None) -> Callable[[], socket.socket]:
    def answer() -> socket.socket:
        if after:
            after.wait(20)
        raise error

    return answer


async def test_another_release_is_not_tried_again_and_a_process_that_is_not_there_is(tmp_path: Path) -> None:
    with pytest.raises(VersionSkew):
        await Tries(raises(VersionSkew(1, 2))).link(tmp_path).run()
    tries = Tries(raises(PeerGone("nobody")))
    link = tries.link(tmp_path)
    async with running(link):
        await eventually(lambda: tries.count >= 3)
        with pytest.raises(GrammarUnavailable, match=r"within 0\.01 s"):
            await link.ready(0.01)


async def test_a_socket_that_comes_after_the_link_has_ended_is_closed(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    goes_on = threading.Event()

    def answer() -> socket.socket:
        assert goes_on.wait(20)
        return ours

    tries = Tries(answer)
    with theirs:
        async with running(tries.link(tmp_path)):
            await eventually(lambda: tries.count)
        goes_on.set()
        await eventually(lambda: ours.fileno() == -1)


SLOW = HandshakeError("no acknowledgement within 5 s")


async def test_a_process_that_hangs_before_it_is_attached_is_killed(tmp_path: Path) -> None:
    tries = Tries(raises(SLOW))
    link = tries.link(tmp_path)
    link.start_patience_s = 0.1
    begun_s = time.monotonic()
    async with running(link):
        await eventually(lambda: len(tries.killed_s) >= 2)
    assert tries.killed_s[0] >= begun_s + 0.1
    assert tries.killed_s[1] >= tries.killed_s[0] + 0.1


@pytest.mark.parametrize("was_attached", [True, False])
async def test_a_process_that_was_attached_needs_no_time_for_a_start(tmp_path: Path, was_attached: bool) -> None:
    ends = threading.Event()
    tries = Tries(raises(SLOW, after=ends))  # it is stopped: the attempt lasts longer than the silence
    begun_s = time.monotonic()
    async with running(tries.link(tmp_path, silence_s=0.2, was_attached=was_attached)):
        if was_attached:
            await eventually(lambda: tries.killed_s)
            assert tries.killed_s[0] >= begun_s + 0.2
        else:
            await asyncio.sleep(0.5)
            assert tries.killed_s == []
        ends.set()


def test_the_channel_has_what_the_client_needs() -> None:
    with Segment.create(Layout(num_slots=2, num_rows=2, vocab_size=320)) as segment:
        end = EngineEnd(segment)
        end.set_abort()
        assert end.aborted
        end.clear_abort()
        assert not end.aborted
        end.heartbeat()
        assert end.heartbeat_age_ns() is None


def test_no_line_above_debug_has_the_grammar(caplog: pytest.LogCaptureFixture) -> None:
    """The library's message may quote the grammar, which SECURITY.md promises to keep out of the log."""
    error = AioRpcError(grpc.StatusCode.INTERNAL, Metadata(), Metadata(), details='panic at "secret rule"')
    with caplog.at_level(logging.DEBUG):
        found = grammar_error(error, "Compile", 5.0)
    assert isinstance(found, InternalError)
    assert "secret" not in str(found)
    lines = {record.levelno: record.getMessage() for record in caplog.records}
    assert "secret rule" in lines[logging.DEBUG]
    assert "INTERNAL" in lines[logging.ERROR]
    assert "secret" not in lines[logging.ERROR]
