"""A real sidecar process, called as an engine calls it."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from grammar_service.compile.pool import NUM_QUEUES
from grammar_service.config import GrammarConfig
from grammar_service.server import _start_grpc
from grammar_service.servicer import GrammarServicer
from protos.grammar.v1 import grammar_pb2 as pb
from protos.grammar.v1 import grammar_pb2_grpc as pb_grpc
from shared_mem.channel import EngineEnd
from shared_mem.handover import SOCKET_NAME, connect, send_segment
from shared_mem.layout import Layout, RowKind
from shared_mem.segment import Segment
from tests.grammar_service.toy import PADDED, STOPS, spell, tokenizer_json, tokens_in
from tests.waiting import eventually

LAYOUT = Layout(num_slots=2, num_rows=8, vocab_size=PADDED)
PATIENCE_S = 300.0
"""Bound on waits that only a failing test reaches."""
SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}'


class Sidecar:
    """The process, a stub, and the engine's side of its sockets."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.directory = directory
        # On a busy machine a row takes longer than the 2 ms after which it would be late.
        patient = ("--compile-workers", "1", "--row-deadline-ms", "10000")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "grammar_service", "--dir", str(directory), *patient, *flags],
            cwd=Path(__file__).resolve().parents[2],
        )
        # A pool of its own: a successor on the same path must not inherit the reconnection backoff of its predecessor.
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.insecure_channel(f"unix:{directory}/grammar.sock", options)
        grpc.channel_ready_future(self.channel).result(timeout=60)
        self.stub = pb_grpc.GrammarStub(self.channel)
        self._open: list[socket.socket | Segment] = []

    def configure(self, **changes: object) -> pb.ConfigureResponse:
        fields = {"tokenizer_json": tokenizer_json(), "vocab_size": PADDED, "stop_token_ids": STOPS}
        return self.stub.Configure(pb.ConfigureRequest(**(fields | changes)))  # type: ignore[arg-type]

    def compile(self, source: str = SCHEMA, kind: pb.Kind = pb.KIND_JSON_SCHEMA, **more: object) -> pb.CompileResponse:
        return self.stub.Compile(pb.CompileRequest(kind=kind, source=source, **more))  # type: ignore[arg-type]

    def bind(
        self,
        grammar: pb.CompileResponse,
        slot: int = 0,
        gen: int = 1,
        tokens: list[int] | None = None,
        *,
        any_spelling: bool = False,
    ) -> None:
        request = pb.BindRequest(slot=slot, slot_gen=gen, grammar_id=grammar.grammar_id, committed_tokens=tokens or [])
        request.any_spelling = any_spelling
        self.stub.Bind(request)

    def attach(self, layout: Layout = LAYOUT) -> tuple[socket.socket, EngineEnd]:
        segment = Segment.create(layout)
        connection = connect(self.directory / SOCKET_NAME)
        self._open += [segment, connection]
        assert send_segment(connection, segment).pid == self.process.pid
        return connection, EngineEnd(segment)

    def detach(self) -> None:
        """Close the segments and connections that `attach` made."""
        for each in self._open:
            each.close()
        self._open.clear()

    def close(self) -> None:
        self.detach()
        self.channel.close()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(30) == 0


Start = Callable[..., Sidecar]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[Sidecar] = []

    def starting(*flags: str) -> Sidecar:
        made.append(Sidecar(tmp_path / f"s{len(made)}", *flags))
        return made[-1]

    yield starting
    for sidecar in made:
        sidecar.close()


@pytest.fixture
def sidecar(start: Start) -> Sidecar:
    return start()


@pytest.fixture(scope="module")
def _lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    sidecar = Sidecar(tmp_path_factory.mktemp("lasting") / "s")
    yield sidecar
    sidecar.close()


@pytest.fixture
def shared(_lasting: Sidecar) -> Iterator[Sidecar]:
    """One sidecar for the tests that need no fresh one; no engine is attached to it, and it may have grammars."""
    yield _lasting
    _lasting.detach()


def ask(engine: EngineEnd, text: str, drafts: str = "", *, at: int = 0, gen: int = 1) -> list[int]:
    committed, guessed = spell(text), spell(drafts)
    seq = engine.post([0], [gen], [at], [len(committed)], [len(guessed)], [[*committed, *guessed]])
    until(lambda: not engine.await_rows(seq, [0], [gen], timeout_s=PATIENCE_S).num_late)
    return engine.await_rows(seq, [0], [gen], timeout_s=0).kinds[0, : len(guessed) + 1].tolist()


def until(condition: Callable[[], object]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.005)


def refused(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error = caught.value
    assert isinstance(error, grpc.Call)
    return error.code(), error.details()


def test_a_guided_answer_from_configure_to_release(sidecar: Sidecar) -> None:
    configured = sidecar.configure()
    assert configured.backends[0] == pb.BACKEND_LLGUIDANCE
    assert configured.versions[0]
    assert configured.pid == sidecar.process.pid
    assert configured.max_compilations == NUM_QUEUES * (1 + 256)
    assert (configured.attempt_limit_s, configured.compile_timeout_s) == (2 * 120 + 120 + 5, 5)
    grammar = sidecar.compile()
    assert (grammar.backend, grammar.cache_hit) == (pb.BACKEND_LLGUIDANCE, False)
    assert sidecar.compile(SCHEMA.replace(":", ": ")).cache_hit
    _, engine = sidecar.attach()
    sidecar.bind(grammar)
    assert ask(engine, '{"a":', " 1}")[:2] == [RowKind.FORCED, RowKind.APPLY]
    row = engine.mask_rows(engine.last_seq)[0, 3, : LAYOUT.words]
    assert tokens_in(row) == set(STOPS)
    assert refused(lambda: sidecar.compile("{"))[0] == grpc.StatusCode.INVALID_ARGUMENT
    lines = {
        'lockstep_grammar_cache_hits_total{backend="llguidance",kind="json_schema"} 1.0',
        'lockstep_grammar_cache_misses_total{backend="llguidance",kind="json_schema"} 1.0',
        'lockstep_grammar_compile_seconds_count{backend="llguidance",kind="json_schema"} 1.0',
        'lockstep_grammar_compile_refusals_total{kind="json_schema",reason="invalid"} 1.0',
        *(f"lockstep_grammar_{name} 1.0" for name in ("cached_grammars", "engine_attached", "matchers")),
        *(f"lockstep_grammar_{name} 1.0" for name in ("records_total", "fill_seconds_count")),
    }

    def missing() -> set[str]:
        return lines - {*sidecar.stub.GetMetrics(pb.GetMetricsRequest()).exposition.decode().splitlines()}

    until(lambda: not missing())  # records are counted after their publication
    sidecar.bind(grammar, gen=2, tokens=spell('{"a": 1'))
    assert ask(engine, "2", at=7, gen=2) == [RowKind.APPLY]
    assert ask(engine, "3", at=7, gen=1) == [RowKind.ALL]
    stats = sidecar.stub.GetStats(pb.GetStatsRequest())
    assert (stats.matchers, stats.cached_grammars, stats.compiled, stats.cache_hits) == (1, 1, 1, 1)
    assert stats.generation == 1
    # Counted after the publication.
    until(lambda: sidecar.stub.GetStats(pb.GetStatsRequest()).records == 3)
    sidecar.stub.Release(pb.ReleaseRequest(slot=0, slot_gen=2))
    assert ask(engine, "3", at=8, gen=2) == [RowKind.ALL]


def test_a_bind_says_whether_masks_allow_every_spelling(sidecar: Sidecar) -> None:
    sidecar.configure()
    _, engine = sidecar.attach()
    grammar = sidecar.compile(whitespace=pb.WHITESPACE_COMPACT)
    # Only `{"a":` may follow: the library's own token, or `{` as well.
    for gen, any_spelling, kind, count in ((1, False, RowKind.FORCED, 1), (2, True, RowKind.APPLY, 2)):
        sidecar.bind(grammar, gen=gen, any_spelling=any_spelling)
        assert ask(engine, "", gen=gen) == [kind]
        assert len(tokens_in(engine.mask_rows(engine.last_seq)[0, 0, : LAYOUT.words])) == count


def serves(channel: grpc.Channel) -> bool:
    stub = health_pb2_grpc.HealthStub(channel)
    asked = [health_pb2.HealthCheckRequest(service=name) for name in ("", "lockstep.grammar.v1.Grammar")]
    answers = [stub.Check(each, timeout=PATIENCE_S, wait_for_ready=True).status for each in asked]
    return answers == [health_pb2.HealthCheckResponse.SERVING] * 2


def test_the_sockets_are_private_and_health_is_served(shared: Sidecar) -> None:
    for name in ("grammar.sock", SOCKET_NAME):
        assert stat.S_IMODE((shared.directory / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(shared.directory.stat().st_mode) == 0o700
    assert serves(shared.channel)


def test_errors_become_statuses(sidecar: Sidecar) -> None:
    code = grpc.StatusCode
    assert refused(sidecar.compile)[0] == code.FAILED_PRECONDITION
    assert refused(lambda: sidecar.stub.ClearCache(pb.ClearCacheRequest()))[0] is code.FAILED_PRECONDITION
    assert refused(lambda: sidecar.configure(stop_token_ids=[]))[0] == code.INVALID_ARGUMENT
    assert refused(lambda: sidecar.configure(tokenizer_json=b"no"))[0] == code.INVALID_ARGUMENT
    sidecar.configure()
    assert refused(lambda: sidecar.compile("{")) == (
        code.INVALID_ARGUMENT,
        "JSON Schema: not JSON: Expecting property name enclosed in double quotes at line 1 column 2",
    )
    assert refused(lambda: sidecar.compile(kind=pb.KIND_UNSPECIFIED)) == (code.INVALID_ARGUMENT, "kind: is required")
    assert refused(lambda: sidecar.compile("x" * (1 << 19)))[0] == code.RESOURCE_EXHAUSTED
    assert refused(lambda: sidecar.compile(tenant="e" * 65)) == (
        code.INVALID_ARGUMENT,
        "tenant: has more than 64 bytes",
    )
    for weight, shown in ((0.001, "0.001"), (-1.0, "-1"), (float("inf"), "inf"), (float("nan"), "nan")):
        assert refused(lambda: sidecar.compile(tenant="acme", tenant_weight=weight)) == (  # noqa: B023 - called at once
            code.INVALID_ARGUMENT,
            f"tenant_weight: {shown} is not in [0.01, 100]",
        )
    status, message = refused(lambda: sidecar.compile('{"type":"array","uniqueItems":true}'))
    assert status == code.INVALID_ARGUMENT
    assert "uniqueItems" in message
    grammar = sidecar.compile()
    _, _ = sidecar.attach()
    assert refused(lambda: sidecar.bind(grammar, slot=2)) == (code.INVALID_ARGUMENT, "slot: 2 is not in [0, 2)")
    assert refused(lambda: sidecar.bind(grammar, tokens=spell('{"b')))[1].startswith("committed_tokens[2]: token")
    assert refused(lambda: sidecar.bind(pb.CompileResponse(grammar_id="none")))[0] == code.NOT_FOUND
    sidecar.stub.Release(pb.ReleaseRequest(slot=1, slot_gen=7))


def test_another_engine_follows_the_first(shared: Sidecar) -> None:
    shared.configure()
    grammar = shared.compile()
    connection, engine = shared.attach()
    shared.bind(grammar)
    assert ask(engine, '{"a": ') == [RowKind.APPLY]
    connection.close()
    _, engine = shared.attach(Layout(num_slots=1, num_rows=2, vocab_size=PADDED, generation=2))
    # Matchers went with their engine, grammars stay.
    assert ask(engine, "{") == [RowKind.DEFER]
    assert shared.compile().cache_hit
    shared.bind(grammar, tokens=spell("{"))
    assert ask(engine, '"', at=1) == [RowKind.FORCED]
    assert shared.stub.GetStats(pb.GetStatsRequest()).generation == 2


def test_the_same_configuration_keeps_everything_and_another_drops_it(shared: Sidecar) -> None:
    shared.configure()
    grammar = shared.compile()
    _, engine = shared.attach()
    shared.bind(grammar)
    shared.configure()
    assert ask(engine, "{")[0] in (RowKind.APPLY, RowKind.FORCED)
    shared.configure(stop_token_ids=STOPS[:1])
    assert ask(engine, '"', at=1) == [RowKind.DEFER]
    assert refused(lambda: shared.bind(grammar))[0] == grpc.StatusCode.NOT_FOUND


def test_a_cleared_cache_keeps_the_grammars_of_matchers(shared: Sidecar) -> None:
    shared.configure()
    shared.stub.ClearCache(pb.ClearCacheRequest())
    _, engine = shared.attach()
    bound, other = shared.compile(), shared.compile("[a-z]+", pb.KIND_REGEX)
    shared.bind(bound, gen=1)
    cleared = shared.stub.ClearCache(pb.ClearCacheRequest(disk=True))
    assert (cleared.dropped, cleared.kept, cleared.files) == (1, 1, 0)
    assert cleared.freed_bytes == other.memory_bytes
    assert shared.stub.GetStats(pb.GetStatsRequest()).cached_grammars == 1
    assert refused(lambda: shared.bind(other, slot=1))[0] is grpc.StatusCode.NOT_FOUND
    assert ask(engine, "", "{") != [int(RowKind.ERROR)] * 2
    shared.bind(bound, gen=2)
    shared.stub.Release(pb.ReleaseRequest(slot=0, slot_gen=1))  # of the owner before
    assert shared.stub.ClearCache(pb.ClearCacheRequest()).kept == 1
    shared.stub.Release(pb.ReleaseRequest(slot=0, slot_gen=2))
    assert shared.stub.ClearCache(pb.ClearCacheRequest()).kept == 0
    assert not shared.compile().cache_hit


def test_a_segment_of_another_vocabulary_is_not_bound_to(shared: Sidecar) -> None:
    shared.configure()
    grammar = shared.compile()
    shared.attach(Layout(num_slots=1, num_rows=2, vocab_size=PADDED + 1))
    assert refused(lambda: shared.bind(grammar)) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        f"vocab_size: {PADDED} in Configure, {PADDED + 1} in the segment",
    )


def fails_with(*flags: str) -> str:
    """Return the error of a sidecar that cannot start."""
    command = [sys.executable, "-m", "grammar_service", *flags]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    return done.stderr


def test_a_place_that_cannot_be_had_is_named(shared: Sidecar, tmp_path: Path) -> None:
    taken = fails_with("--dir", str(shared.directory))
    assert "python -m grammar_service: dir: another process listens" in taken
    shared.configure()
    assert fails_with("--dir", "/proc/none").startswith("python -m grammar_service: dir: /proc/none: ")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        assert f"health_listen: cannot bind '{address}'" in fails_with(
            "--dir", str(tmp_path / "s"), "--health-listen", address
        )


def test_compile_workers_die_with_a_killed_sidecar(start: Start) -> None:
    victim = start()
    victim.configure()
    victim.compile()
    children = _children(victim.process.pid)
    assert children
    victim.process.kill()
    victim.process.wait()
    until(lambda: all(_state(child) == "Z" for child in children))
    # A successor takes the directory over.
    start_again = Sidecar(victim.directory)
    start_again.configure()
    victim.process = start_again.process


def test_the_llguidance_sidecar_never_loads_torch(shared: Sidecar) -> None:
    shared.configure()
    shared.attach()
    shared.bind(shared.compile())
    for pid in (shared.process.pid, *_children(shared.process.pid)):
        mapped = Path(f"/proc/{pid}/maps").read_text()
        assert "llguidance" in mapped
        assert "libtorch" not in mapped


@pytest.mark.slow
def test_xgrammar_beside_llguidance(start: Start) -> None:
    pytest.importorskip("xgrammar", reason="needs xgrammar")
    sidecar = start("--backend", "xgrammar")
    assert sidecar.configure().backends[0] == pb.BACKEND_XGRAMMAR
    _, engine = sidecar.attach()
    for gen, backend in enumerate((pb.BACKEND_XGRAMMAR, pb.BACKEND_LLGUIDANCE), 1):
        grammar = sidecar.compile(backend=backend, whitespace=pb.WHITESPACE_COMPACT)
        assert grammar.backend == backend
        sidecar.bind(grammar, gen=gen)
        assert ask(engine, '{"a":1', "2}", gen=gen) == [RowKind.APPLY] * 3
        row = engine.mask_rows(engine.last_seq)[0, 2, : LAYOUT.words]
        assert tokens_in(row) == set(STOPS)
    status, message = refused(lambda: sidecar.compile('start: "a"', pb.KIND_LARK, backend=pb.BACKEND_XGRAMMAR))
    assert status == grpc.StatusCode.UNIMPLEMENTED
    assert "llguidance" in message


def _children(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def test_probes_ask_for_health_over_tcp(start: Start) -> None:
    process = psutil.Process(start("--health-listen", "127.0.0.1:0").process.pid)
    until(lambda: process.net_connections("tcp"))
    (listener,) = process.net_connections("tcp")
    with grpc.insecure_channel(f"127.0.0.1:{listener.laddr.port}") as channel:
        assert serves(channel)
        # The control plane stays behind the mode of its socket.
        code, _ = refused(lambda: pb_grpc.GrammarStub(channel).GetStats(pb.GetStatsRequest(), timeout=PATIENCE_S))
        assert code is grpc.StatusCode.UNIMPLEMENTED


async def test_a_refused_compilation_is_freed_at_once(tmp_path: Path) -> None:
    """Its source may have megabytes, and the collector of Python finds a cycle of old objects minutes later."""

    def held() -> int:
        return sum(type(each) is grpc.aio.AbortError for each in gc.get_objects())

    servicer = GrammarServicer(GrammarConfig(dir=str(tmp_path)))
    server, _ = await _start_grpc(tmp_path / "s", servicer)
    gc.collect()
    gc.disable()
    try:
        async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
            for _ in range(4):
                with pytest.raises(grpc.aio.AioRpcError, match="FAILED_PRECONDITION"):
                    await pb_grpc.GrammarStub(channel).Compile(pb.CompileRequest(source="a"))
            await eventually(lambda: held() <= 1)  # gRPC's loop has a variable with the newest call
    finally:
        gc.enable()
        await server.stop(0)
        await servicer.close()


async def test_close_waits_for_the_end_of_what_is_being_configured() -> None:
    class Unready:
        """A compiler that never becomes ready, and ends once `may_end` is set."""

        def __init__(self, *_: object) -> None:
            self.asked, self.may_end = asyncio.Event(), asyncio.Event()
            made.append(self)

        async def ready(self) -> None:
            self.asked.set()
            await asyncio.Event().wait()

        async def close(self) -> None:
            await self.may_end.wait()

    made: list[Unready] = []
    servicer = GrammarServicer(GrammarConfig(dir="unused"), Unready)  # type: ignore[arg-type]
    request = pb.ConfigureRequest(tokenizer_json=tokenizer_json(), vocab_size=PADDED, stop_token_ids=STOPS)
    configuring = asyncio.create_task(servicer.Configure(request, None))
    await eventually(lambda: made)
    await made[0].asked.wait()
    configuring.cancel()
    closing = asyncio.create_task(servicer.close())
    assert not (await asyncio.wait({closing}, timeout=0.05))[0]
    made[0].may_end.set()
    await closing
    assert configuring.cancelled()
