"""The grammar client against a fake grammar process: real sockets, a real segment hand-over, scripted answers."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import pytest

from gpu_engine.api.config import ServerConfig
from gpu_engine.api.errors import (
    GrammarUnavailable,
    InternalError,
    InvalidRequest,
    LimitExceeded,
    LockstepError,
    NotSupported,
)
from gpu_engine.api.request import GrammarKind, GrammarOwner, GrammarSpec, Request
from gpu_engine.sidecar.client import GrammarClient
from gpu_engine.sidecar.link import GrammarLink, GrammarSetup, segment_hand_over
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
        self.compile_deadlines_s: list[float | None] = []
        self.turns: list[tuple[str, str, float]] = []
        """Owner, tenant and its weight of each Compile."""
        self._stack = AsyncExitStack()
        self._server: grpc.aio.Server
        self._peers: list[socket.socket] = []

    async def start(self) -> None:
        self._server = grpc.aio.server()
        grammar_pb2_grpc.add_GrammarServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.directory}/grammar.sock")
        await self._server.start()
        self._listener = listen(self.directory / SOCKET_NAME)
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())

    async def _accept(self) -> None:
        while True:
            peer, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            self._peers.append(peer)
            # An engine that was too slow comes again.
            with suppress(SharedMemoryError):
                segment = await asyncio.to_thread(recv_segment, peer)
                segment.close()

    async def stop(self) -> None:
        self._accepting.cancel()
        await asyncio.wait([self._accepting])
        self._listener.close()
        for peer in self._peers:
            peer.close()
        await self._server.stop(None)

    async def Configure(  # type: ignore[override]
        self, request: gpb.ConfigureRequest, context: object
    ) -> gpb.ConfigureResponse:
        self.configured.append(request)
        if self.refuse_configure:
            raise ModuleNotFoundError(self.refuse_configure)
        return gpb.ConfigureResponse(
            backends=[gpb.BACKEND_LLGUIDANCE],
            versions=["1"],
            pid=1,
            max_compilations=self.max_compilations,
            attempt_limit_s=self.attempt_limit_s,
        )

    async def Compile(  # type: ignore[override]
        self, request: gpb.CompileRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> gpb.CompileResponse:
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

    async def Backtrack(  # type: ignore[override]
        self, request: gpb.BacktrackRequest, context: object
    ) -> gpb.BacktrackResponse:
        return self.way_back

    async def Bind(  # type: ignore[override]
        self, request: gpb.BindRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> gpb.BindResponse:
        self.bound.append(request)
        await self.hold_bind.wait()
        if self.refuse_bind:
            await context.abort(self.refuse_bind.pop(0), "no")
        return gpb.BindResponse()

    async def Release(  # type: ignore[override]
        self, request: gpb.ReleaseRequest, context: object
    ) -> gpb.ReleaseResponse:
        self.released.append(request)
        return gpb.ReleaseResponse()

    async def GetStats(  # type: ignore[override]
        self, request: gpb.GetStatsRequest, context: object
    ) -> gpb.GetStatsResponse:
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


@asynccontextmanager
async def connected(
    tmp_path: Path,
    *,
    wait_s: float = 20.0,
    silence_s: float = 20.0,
    max_compilations: int = 0,
    attempt_limit_s: float = 0.0,
    was_attached: bool = False,
) -> AsyncIterator[Setup]:
    process = FakeGrammarProcess(tmp_path)
    process.max_compilations, process.attempt_limit_s = max_compilations, attempt_limit_s
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
        running = asyncio.create_task(link.run())
        try:
            await link.ready(20)
            yield Setup(process, client, link, engine, channel, stuck)
        finally:
            await client.aclose()
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            await process.stop()
            engine.close(5)


def spec(source: str = "a") -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, source, whitespace=1, backend=2)


def request(request_id: str = "r", source: str = "a") -> Request:
    return made([1], request_id=request_id, max_tokens=9, grammar=spec(source))


async def test_the_process_is_configured_with_the_tokenizer(tmp_path: Path) -> None:
    async with connected(tmp_path) as s:
        (message,) = s.process.configured
        assert (message.tokenizer_json, message.vocab_size, message.generation) == (b"{}", 320, 7)
        assert list(message.stop_token_ids) == [2]
        assert s.client.backends == (gpb.BACKEND_LLGUIDANCE,)
        assert s.channel.words == []
        stats = await s.client.stats()
        assert (stats.starts, stats.ready, stats.matchers, stats.cached_grammars) == (1, True, 4, 5)


async def test_a_compilation_takes_the_turn_of_its_tenant(tmp_path: Path) -> None:
    async with connected(tmp_path) as s:
        await s.client.compile(spec("a"))
        await s.client.compile(replace(spec("b"), owner=GrammarOwner("", "acme", 1, 1, 0, 2.5)))
        assert s.process.turns == [("", "", 0.0), ("", "acme", 2.5)]


async def test_a_slot_is_opened_with_its_tokens_and_released(tmp_path: Path) -> None:
    async with connected(tmp_path) as s:
        s.client.prepare("r", spec(), lambda error: None)
        await asyncio.to_thread(s.client.open, 1, 5, request(), (8, 9))
        await eventually(lambda: s.engine.opened == [(1, 5)])
        (bind,) = s.process.bound
        assert (bind.slot, bind.slot_gen, bind.grammar_id, list(bind.committed_tokens)) == (1, 5, "id:a", [8, 9])
        assert bind.request_id == "r"
        assert s.process.calls["compile"] == 1
        s.client.forget("r")
        await asyncio.to_thread(s.client.close, 1, 5)
        await eventually(lambda: s.process.released)
        assert (s.process.released[0].slot, s.process.released[0].slot_gen) == (1, 5)


async def test_a_compilation_is_cancelled_with_its_last_request(tmp_path: Path) -> None:
    async with connected(tmp_path) as s:
        s.process.hold_compile.clear()
        for i in range(2):
            s.client.prepare(f"r{i}", spec(), lambda error: None)
        await eventually(lambda: s.process.calls["compile"] == 1)
        s.client.forget("r0")
        ahead = asyncio.create_task(s.client.compile(spec()))
        await asyncio.sleep(0)
        s.client.forget("r1")
        await asyncio.sleep(0)
        assert s.process.calls["compile cancelled"] == 0
        ahead.cancel()
        await eventually(lambda: s.process.calls["compile cancelled"] == 1)
        # A request that arrives now starts a new compilation, and does not see the cancellation.
        s.process.hold_compile.set()
        made = await s.client.compile(spec())
        assert (made.grammar_id, made.min_tokens, made.known_answer_tokens) == ("id:a", 2, 7)
        assert s.process.calls["compile"] == 2


async def test_what_the_process_would_refuse_is_not_sent(tmp_path: Path) -> None:
    async with connected(tmp_path, max_compilations=2) as s:
        await s.client.compile(spec("had"))
        s.process.hold_compile.clear()
        for name in ("a", "b", "b"):  # an equal one joins, and takes no place
            s.client.prepare(f"r{name}", spec(name), lambda error: None)
        with pytest.raises(LimitExceeded, match="compile_queue: 2 compilations"):
            s.client.prepare("rc", spec("c"), lambda error: None)
        with pytest.raises(LimitExceeded, match="compile_queue"):
            await s.client.compile(spec("c"))
        assert s.client.admission.refused == 2
        assert "refused=2" in repr(s.client)
        had = asyncio.create_task(s.client.compile(spec("had")))
        await eventually(lambda: s.process.calls["compile"] == 4)
        s.client.forget("ra")
        await eventually(lambda: s.process.calls["compile cancelled"])
        s.client.prepare("rc", spec("c"), lambda error: None)
        await eventually(lambda: s.process.calls["compile"] == 5)
        s.process.hold_compile.set()
        assert (await had).grammar_id == "id:had"


async def test_a_process_guides_from_its_word_that_it_has_a_matcher_until_the_last_is_closed(tmp_path: Path) -> None:
    async with connected(tmp_path) as s:
        s.process.hold_compile.clear()
        s.process.hold_bind.clear()
        s.client.open(0, 1, request(), ())
        await eventually(lambda: s.process.calls["compile"])
        assert s.client.guided_by == 0, "it compiles, and sleeps meanwhile"
        s.process.hold_compile.set()
        await eventually(lambda: s.process.bound)
        assert s.client.guided_by == 0
        s.process.hold_bind.set()
        await eventually(lambda: s.engine.opened)
        assert s.client.guided_by == 1
        await s.process.stop()
        await eventually(lambda: not s.link.up)
        assert s.client.guided_by == 0
        await s.process.start()
        await eventually(lambda: s.link.up)
        assert s.client.guided_by == 0, "the next one has no matcher yet"
        s.client.open(0, 1, request(), ())
        await eventually(lambda: len(s.engine.opened) == 2)
        assert s.client.guided_by == 2
        s.client.close(0, 1)
        await eventually(lambda: s.client.guided_by == 0)


async def test_slots_are_opened_behind_a_restart_however_many_grammars_are_compiled_again(tmp_path: Path) -> None:
    async with connected(tmp_path, max_compilations=1) as s:
        sources = ("a", "b", "no ticket")
        for source in sources[:2]:
            s.client.prepare(source, spec(source), lambda error: None)
            await eventually(lambda: s.client.compiled_s(source))  # noqa: B023 - ends before it changes
        for slot, source in enumerate(sources):
            s.client.open(slot, 1, request(source, source), ())
        await eventually(lambda: len(s.engine.opened) == 3)
        await s.process.stop()
        await eventually(lambda: not s.link.up)
        s.process.hold_compile.clear()
        s.process.refuse_bind = [grpc.StatusCode.NOT_FOUND] * 2
        await s.process.start()
        await eventually(lambda: s.link.up)
        for slot, source in enumerate(sources):
            s.client.open(slot, 1, request(source, source), (5,))
        await eventually(lambda: s.process.calls["compile"] == 6 or s.engine.failed)
        # No queue of the grammar process refuses them, either.
        assert s.process.accepted == {"a": 1, "b": 1, "no ticket": 2}
        assert s.engine.failed == []
        # Each of them counts once: until one has ended there is no place for a new one.
        assert "running=3 " in repr(s.client)
        with pytest.raises(LimitExceeded, match="compile_queue: 1 "):
            s.client.prepare("new", spec("new"), lambda error: None)
        # Another death: what ran is opened once more, and compiled by the next process.
        await s.process.stop()
        await eventually(lambda: "running=0 " in repr(s.client))
        await s.process.start()
        await eventually(lambda: s.link.up)
        s.client.open(2, 1, request("no ticket", "no ticket"), (5,))
        await eventually(lambda: "running=1 " in repr(s.client))
        s.client.close(2, 1)
        await eventually(lambda: "running=0 " in repr(s.client))
        s.process.hold_compile.set()
        for slot, source in enumerate(sources[:2]):
            s.client.open(slot, 1, request(source, source), (5,))
        await eventually(lambda: len(s.engine.opened) == 5)
        s.client.prepare("new", spec("new"), lambda error: None)
        await eventually(lambda: s.client.compiled_s("new"))
        assert "running=0 " in repr(s.client)
        assert s.engine.failed == []


async def test_equal_grammars_share_one_compilation(tmp_path: Path) -> None:
    async with connected(tmp_path) as s:
        s.process.hold_compile.clear()
        for i in range(10):
            s.client.prepare(f"r{i}", spec(), lambda error: None)
        s.client.prepare("other", spec("b"), lambda error: None)
        for i in range(2):
            s.client.open(i, 1, request(f"r{i}"), ())
        await eventually(lambda: s.process.calls["compile"] == 2)
        s.process.hold_compile.set()
        await eventually(lambda: len(s.engine.opened) == 2)
        assert s.process.calls["compile"] == 2


@pytest.mark.parametrize(
    ("status", "kind", "text"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest, "grammar: line 3"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, LimitExceeded, "grammar: line 3"),
        (grpc.StatusCode.UNIMPLEMENTED, NotSupported, "grammar: line 3"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, GrammarUnavailable, "gave no answer to Compile within 35 s"),
        (grpc.StatusCode.INTERNAL, InternalError, "INTERNAL"),
    ],
)
async def test_a_refused_grammar_fails_at_arrival_and_at_its_slot(
    tmp_path: Path, status: grpc.StatusCode, kind: type[LockstepError], text: str
) -> None:
    async with connected(tmp_path) as s:
        s.process.refuse_compile = (status, "source: line 3")
        refused: list[LockstepError] = []
        s.client.prepare("r", spec(), refused.append)
        s.client.open(0, 1, request(), ())
        await eventually(lambda: s.engine.failed and refused)
        assert s.engine.failed[0][:2] == (0, 1)
        for error in (refused[0], s.engine.failed[0][2]):
            assert type(error) is kind
            assert text in str(error)


async def test_a_refused_grammar_is_freed_with_its_request(tmp_path: Path) -> None:
    """It may have megabytes, and the collector of Python finds a cycle of old objects minutes later."""

    def held() -> int:
        return sum(type(each) is GrammarSpec and each.source == "refused" for each in gc.get_objects())

    async with connected(tmp_path) as s:
        s.process.refuse_compile = (grpc.StatusCode.RESOURCE_EXHAUSTED, "source: line 3")
        refused: list[LockstepError] = []
        gc.collect()
        gc.disable()
        try:
            s.client.prepare("r", spec("refused"), refused.append)
            s.client.open(0, 1, request(source="refused"), ())
            await eventually(lambda: s.engine.failed and refused)
            s.client.close(0, 1)
            s.client.forget("r")
            with pytest.raises(LimitExceeded):
                await s.client.compile(spec("refused"))
            refused.clear()
            s.engine.failed.clear()
            await eventually(lambda: not held())
        finally:
            gc.enable()


async def test_the_deadline_of_a_compilation_leaves_the_process_the_time_that_its_limits_allow(tmp_path: Path) -> None:
    async with connected(tmp_path, attempt_limit_s=1000.0) as s:
        await s.client.compile(spec())
        await s.client.compile(replace(spec("b"), backend=gpb.BACKEND_AUTO))
        one, auto = s.process.compile_deadlines_s
        assert one is not None
        assert auto is not None
        assert 1000 < one < 1100
        assert 2000 < auto < 2200, "two attempts with the one backend"


async def test_a_process_that_cannot_be_configured_is_reported_once_with_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(tmp_path) as s:
        await s.process.stop()
        await eventually(lambda: not s.link.up)
        s.process.refuse_configure = "No module named 'x'"
        before = len(s.process.configured)
        await s.process.start()
        await eventually(lambda: len(s.process.configured) > before + 2)
        errors = [record.getMessage() for record in caplog.records if record.name == "gpu_engine.sidecar.link"]
        (error,) = [line for line in errors if "cannot be configured" in line]
        assert "No module named 'x'" in error
        s.process.refuse_configure = ""
        await eventually(lambda: s.link.up)


async def test_an_evicted_grammar_is_compiled_again_once(tmp_path: Path) -> None:
    async with connected(tmp_path) as s:
        s.process.refuse_bind = [grpc.StatusCode.NOT_FOUND]
        s.client.open(0, 1, request(), ())
        await eventually(lambda: s.engine.opened)
        assert (s.process.calls["compile"], len(s.process.bound)) == (2, 2)
        s.process.refuse_bind = [grpc.StatusCode.NOT_FOUND] * 2
        s.client.open(1, 1, request(), ())
        await eventually(lambda: s.engine.failed)
        assert isinstance(s.engine.failed[0][2], GrammarUnavailable)


async def test_refused_tokens_are_our_defect(tmp_path: Path) -> None:
    async with connected(tmp_path) as s:
        s.process.refuse_bind = [grpc.StatusCode.INVALID_ARGUMENT]
        s.client.open(0, 1, request(), (1,))
        await eventually(lambda: s.engine.failed)
        assert isinstance(s.engine.failed[0][2], InternalError)


@pytest.mark.parametrize(("num_tokens", "goes_back"), [(0, False), (1, True), (2, True), (3, False), (99, False)])
async def test_a_way_back_takes_back_some_tokens_and_none_that_was_sent(
    tmp_path: Path, num_tokens: int, goes_back: bool
) -> None:
    """The number is another process's: outside its range it ends one request, and not the engine."""
    async with connected(tmp_path) as s:
        s.process.way_back = gpb.BacktrackResponse(found=True, num_tokens=num_tokens, dead_texts=[b"x"])
        s.client.backtrack(0, 1, request(), (7, 8, 9), 1, ())
        await eventually(lambda: s.engine.failed or s.engine.backtracked)
        assert s.engine.backtracked == ([(0, 1, num_tokens, (b"x",))] if goes_back else [])
        assert [type(error) for _, _, error in s.engine.failed] == ([] if goes_back else [InternalError])


async def test_a_slot_closed_while_it_compiles_is_never_bound(tmp_path: Path) -> None:
    async with connected(tmp_path) as s:
        s.process.hold_compile.clear()
        s.client.open(0, 1, request(), ())
        await eventually(lambda: s.process.calls["compile"])
        s.client.close(0, 1)
        s.process.hold_compile.set()
        await eventually(lambda: s.process.released)
        assert s.process.bound == []
        assert s.engine.opened == []
        assert s.engine.failed == []


async def test_a_lost_process_pauses_and_the_next_one_goes_on(tmp_path: Path) -> None:
    async with connected(tmp_path) as s:
        s.client.open(0, 1, request(), ())
        await eventually(lambda: s.engine.opened)
        await s.process.stop()
        await eventually(lambda: s.engine.outages == ["lost"])
        assert s.channel.words == ["abort"]
        s.client.prepare("late", spec("late"), lambda error: None)
        await s.process.start()
        await eventually(lambda: s.engine.outages == ["lost", "restored"])
        assert s.channel.words == ["abort", "run"]
        assert len(s.process.configured) == 2
        s.client.open(0, 1, request(), (5, 6))
        await eventually(lambda: len(s.engine.opened) == 2)
        assert list(s.process.bound[-1].committed_tokens) == [5, 6]
        await eventually(lambda: s.process.calls["compile"] == 3)
        assert s.engine.failed == []
        assert (await s.client.stats()).starts == 2


async def test_a_loss_is_reported_with_the_matchers_that_were_being_built(tmp_path: Path) -> None:
    async with connected(tmp_path) as s:
        s.client.open(0, 4, request("bound"), ())
        await eventually(lambda: s.engine.opened)
        s.process.hold_bind.clear()
        s.client.open(1, 5, request("in hand"), (7,))
        await eventually(lambda: len(s.process.bound) == 2)
        await s.process.stop()
        await eventually(lambda: s.engine.outages == ["lost"])
        assert s.engine.binding == {(1, 5)}
        # In the next one its grammar is gone, and compiled again: that is not yet the matcher.
        s.process.hold_bind.set()
        s.process.refuse_bind = [grpc.StatusCode.NOT_FOUND]
        s.process.hold_compile.clear()
        await s.process.start()
        await eventually(lambda: s.link.up)
        compiled = s.process.calls["compile"]
        s.process.hold_compile.set()
        await s.client.compile(spec())
        s.process.hold_compile.clear()
        s.client.prepare("in hand", spec("b"), lambda error: None)
        s.client.open(1, 5, request("in hand", "b"), (7,))
        await eventually(lambda: s.process.calls["compile"] > compiled + 1)
        await s.process.stop()
        await eventually(lambda: s.engine.outages.count("lost") == 2)
        assert s.engine.binding == set()
        s.process.hold_compile.set()
        await s.process.start()


async def test_a_compilation_cut_by_a_crash_is_made_again(tmp_path: Path) -> None:
    async with connected(tmp_path) as s:
        s.process.hold_compile.clear()
        refused: list[LockstepError] = []
        s.client.prepare("r", spec(), refused.append)
        await eventually(lambda: s.process.calls["compile"])
        await s.process.stop()
        s.process.hold_compile.set()
        await s.process.start()
        await eventually(lambda: s.link.up)
        s.client.open(0, 1, request(), ())
        await eventually(lambda: s.engine.opened)
        assert refused == []


async def test_a_compilation_that_outlives_its_channel_is_made_again(tmp_path: Path) -> None:
    async with connected(tmp_path, silence_s=0.3) as s:
        s.link.retire_s = 0.05
        s.process.hold_compile.clear()
        refused: list[LockstepError] = []
        s.client.prepare("r", spec(), refused.append)
        await eventually(lambda: s.process.calls["compile"])
        # It lives, and is attached again; the call on the channel of before is cut off.
        s.channel.age_ns = 10**12
        await eventually(lambda: "lost" in s.engine.outages)
        s.channel.age_ns = 0
        await eventually(lambda: s.process.calls["compile cancelled"])
        s.process.hold_compile.set()
        s.client.open(0, 1, request(), ())
        await eventually(lambda: s.engine.opened)
        assert (refused, s.engine.failed) == ([], [])


class BrokenStub:
    """Has a defect that no call should have."""

    async def Bind(self, message: gpb.BindRequest, timeout: float) -> gpb.BindResponse:
        raise ZeroDivisionError


async def test_a_defect_at_opening_ends_its_request(tmp_path: Path) -> None:
    async with connected(tmp_path) as s:
        await s.client.compile(spec())
        s.client.prepare("r", spec(), lambda error: None)
        await eventually(lambda: s.client.compiled_s("r"))
        s.link.stub = BrokenStub()  # type: ignore[assignment]
        s.client.open(0, 1, request(), ())
        await eventually(lambda: s.engine.failed)
        assert isinstance(s.engine.failed[0][2], InternalError)


async def test_a_process_that_does_not_come_back_ends_guided_requests(tmp_path: Path) -> None:
    async with connected(tmp_path, wait_s=0.3) as s:
        s.client.open(0, 1, request(), ())
        await eventually(lambda: s.engine.opened)
        await s.process.stop()
        await eventually(lambda: s.engine.failed)
        assert isinstance(s.engine.failed[0][2], GrammarUnavailable)
        refused: list[LockstepError] = []
        s.client.prepare("late", spec("late"), refused.append)
        await eventually(lambda: refused)
        assert isinstance(refused[0], GrammarUnavailable)
        await s.process.start()


async def test_a_process_that_does_not_come_back_ends_compiled_requests_without_a_slot(tmp_path: Path) -> None:
    async with connected(tmp_path, wait_s=0.3) as s:
        in_line, over = list[LockstepError](), list[LockstepError]()
        s.client.prepare("in line", spec(), in_line.append)
        s.client.prepare("over", spec("b"), over.append)
        s.client.open(0, 1, request("in line"), ())
        await eventually(lambda: s.engine.opened)
        s.client.close(0, 1)  # preempted: it waits for a slot again
        await eventually(lambda: s.process.released)
        s.client.forget("over")
        await s.process.stop()
        await eventually(lambda: in_line)
        assert isinstance(in_line[0], GrammarUnavailable)
        assert over == []
        assert s.engine.failed == []
        await s.process.start()


async def test_after_the_process_is_given_up_no_request_waits(tmp_path: Path) -> None:
    async with connected(tmp_path) as s:
        s.client.open(0, 1, request(), ())
        await eventually(lambda: s.engine.opened)
        await s.process.stop()
        await eventually(lambda: not s.link.up)
        waiting: list[LockstepError] = []
        s.client.prepare("r1", spec("b"), waiting.append)
        s.client.give_up("failed 8 times")
        s.client.prepare("r2", spec("c"), waiting.append)
        await eventually(lambda: len(waiting) == 2)
        assert all("failed 8 times" in str(error) for error in waiting)
        assert len(s.engine.failed) == 1
        await s.process.start()


async def test_a_process_without_heartbeats_is_lost(tmp_path: Path) -> None:
    async with connected(tmp_path, silence_s=0.3) as s:
        assert s.channel.beats > 0
        s.channel.age_ns = 10**12
        await eventually(lambda: s.engine.outages[:2] == ["silent", "lost"])
        assert s.stuck[0] == "kill"
        s.channel.age_ns = 0
        await eventually(lambda: s.link.up)


async def test_a_process_that_is_silent_for_a_moment_loses_nothing(tmp_path: Path) -> None:
    async with connected(tmp_path) as s:
        s.client.open(0, 1, request(), ())
        await eventually(lambda: s.engine.opened)
        s.channel.age_ns = 99_000_000
        await eventually(lambda: s.engine.outages)
        assert (s.engine.outages, s.channel.words) == (["silent"], ["abort"])
        s.channel.age_ns = 0
        await eventually(lambda: s.engine.outages == ["silent", "alive"])
        assert s.channel.words == ["abort", "run"]
        assert len(s.process.bound) == s.link.attached == 1
        assert s.stuck == []


async def test_each_silence_is_counted_and_logged_when_it_begins_and_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with connected(tmp_path) as s:
        for count in range(1, 4):
            s.channel.age_ns = 99_000_000
            await eventually(lambda: s.engine.outages.count("silent") == count)  # noqa: B023 - ends before it changes
            s.channel.age_ns = 0
            await eventually(lambda: s.engine.outages.count("alive") == count)  # noqa: B023
        assert s.link.silences == 3
    assert caplog.text.count("shows no life") == caplog.text.count("shows life again") == 3


async def test_a_process_that_comes_after_it_was_given_up_serves(tmp_path: Path) -> None:
    async with connected(tmp_path) as s:
        assert s.client.serves
        await s.process.stop()
        await eventually(lambda: not s.link.up)
        assert s.client.serves  # a request that arrives now waits
        s.client.give_up("failed 8 times")
        assert not s.client.serves
        await s.process.start()
        await eventually(lambda: s.link.up)
        assert s.client.serves
        s.client.open(0, 1, request(), ())
        await eventually(lambda: s.engine.opened)


async def test_another_release_is_not_tried_again(tmp_path: Path) -> None:
    def hand_over(directory: Path) -> socket.socket:
        raise VersionSkew(1, 2)

    client = GrammarClient(ServerConfig(), FakeChannel())
    link = GrammarLink(tmp_path, SETUP, hand_over, client, FakeChannel(), silence_s=1, on_stuck=lambda: None)
    with pytest.raises(VersionSkew):
        await link.run()


async def test_a_socket_that_comes_after_the_link_has_ended_is_closed(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    begun, goes_on = threading.Event(), threading.Event()

    def hand_over(directory: Path) -> socket.socket:
        begun.set()
        assert goes_on.wait(20)
        return ours

    client = GrammarClient(ServerConfig(), FakeChannel())
    link = GrammarLink(tmp_path, SETUP, hand_over, client, FakeChannel(), silence_s=1, on_stuck=lambda: None)
    with theirs:
        task = asyncio.create_task(link.run())
        await eventually(begun.is_set)
        task.cancel()
        await asyncio.wait([task])
        goes_on.set()
        await eventually(lambda: ours.fileno() == -1)


async def test_a_process_that_hangs_before_it_is_attached_is_killed(tmp_path: Path) -> None:
    killed: list[float] = []

    def hand_over(directory: Path) -> socket.socket:
        raise HandshakeError("no acknowledgement within 5 s")

    client = GrammarClient(ServerConfig(), FakeChannel())
    link = GrammarLink(
        tmp_path, SETUP, hand_over, client, FakeChannel(), silence_s=1, on_stuck=lambda: killed.append(time.monotonic())
    )
    link.start_patience_s = 0.1
    begun_s = time.monotonic()
    task = asyncio.create_task(link.run())
    await eventually(lambda: len(killed) >= 2)
    assert killed[0] >= begun_s + 0.1
    assert killed[1] >= killed[0] + 0.1
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize("was_attached", [True, False])
async def test_a_process_that_was_attached_needs_no_time_for_a_start(tmp_path: Path, was_attached: bool) -> None:
    killed, ends = list[float](), threading.Event()

    def hand_over(directory: Path) -> socket.socket:
        ends.wait(20)  # the process is stopped: the attempt lasts longer than the silence
        raise HandshakeError("no acknowledgement within 5 s")

    client = GrammarClient(ServerConfig(), FakeChannel())
    link = GrammarLink(
        tmp_path,
        SETUP,
        hand_over,
        client,
        FakeChannel(),
        silence_s=0.2,
        on_stuck=lambda: killed.append(time.monotonic()),
        was_attached=lambda: was_attached,
    )
    begun_s = time.monotonic()
    task = asyncio.create_task(link.run())
    if was_attached:
        await eventually(lambda: killed)
        assert killed[0] >= begun_s + 0.2
    else:
        await asyncio.sleep(0.5)
        assert killed == []
    ends.set()
    task.cancel()
    await asyncio.wait([task])


async def test_a_process_that_is_attached_again_in_time_is_not_killed(tmp_path: Path) -> None:
    async with connected(tmp_path, silence_s=2.0, was_attached=True) as s:
        await s.process.stop()
        await eventually(lambda: not s.link.up)
        await s.process.start()
        await eventually(lambda: s.link.attached == 2)
        await asyncio.sleep(2.1)
        assert s.link.up
        assert s.stuck == []


async def test_a_connection_without_a_process_is_tried_again(tmp_path: Path) -> None:
    tries: list[Path] = []

    def hand_over(directory: Path) -> socket.socket:
        tries.append(directory)
        raise PeerGone("nobody")

    client = GrammarClient(ServerConfig(), FakeChannel())
    link = GrammarLink(tmp_path, SETUP, hand_over, client, FakeChannel(), silence_s=1, on_stuck=lambda: None)
    task = asyncio.create_task(link.run())
    await eventually(lambda: len(tries) >= 3)
    with pytest.raises(GrammarUnavailable, match=r"within 0\.01 s"):
        await link.ready(0.01)
    task.cancel()
    await asyncio.wait([task])


def test_the_channel_has_what_the_client_needs() -> None:
    with Segment.create(Layout(num_slots=2, num_rows=2, vocab_size=320)) as segment:
        end = EngineEnd(segment)
        end.set_abort()
        assert end.aborted
        end.clear_abort()
        assert not end.aborted
        end.heartbeat()
        assert end.heartbeat_age_ns() is None
