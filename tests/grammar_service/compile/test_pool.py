"""Compile processes: killed when slow, replaced after a crash, ended by `close`."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from grammar_service.compile.pool import LARGE_BYTES, SLOW_NICENESS, SLOW_S, SMALL_BYTES, CompilePool, StartWorker
from grammar_service.compile.process import CompileProcess
from grammar_service.compile.queue import NO_TENANT
from grammar_service.config import CompileLimits
from grammar_service.errors import GrammarServiceError, InternalError, InvalidGrammar, LimitExceeded, NotSupported
from grammar_service.grammar.value import Grammar, Kind, Whitespace, parse
from grammar_service.grammar.vocabulary import Vocabulary
from tests.grammar_service.compile.pretending import PRETEND
from tests.waiting import eventually

LONG_S = 60.0
"""Patience with workers of low priority on a busy machine."""


def grammar(text: str) -> Grammar:
    return Grammar(Kind.REGEX, text, Whitespace.COMPACT)


@asynccontextmanager
async def pool(
    vocabulary: Vocabulary,
    *,
    workers: int = 1,
    timeout_s: float = 20.0,
    queue: int = 8,
    queue_s: float = 600.0,
    memory_mb: int = 512,
    start: StartWorker = CompileProcess.start,
    fallback: Sequence[str] = (),
) -> AsyncIterator[CompilePool]:
    made = CompilePool(
        "llguidance",
        vocabulary,
        workers=workers,
        limits=CompileLimits(timeout_s=timeout_s, memory_mb=memory_mb),
        queue=queue,
        queue_s=queue_s,
        command=PRETEND,
        fallback=fallback,
        start=start,
    )
    try:
        yield made
    finally:
        await made.close()


def set_limit(workers: CompilePool, timeout_s: float) -> None:
    """Give the compilations that begin from now on another time limit."""
    workers._limits = replace(workers._limits, timeout_s=timeout_s)


async def pid(workers: CompilePool, text: str = "a") -> int:
    return int((await workers.compile(grammar(text))).data.split()[0])


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_worker_compiles_many_grammars_and_ends_with_the_pool(vocabulary: Vocabulary) -> None:
    async with pool(vocabulary) as workers:
        first = await workers.compile(grammar("one"))
        assert (first.data.partition(b" ")[2], first.compile_ms) == (b"one", 1.5)
        process = int(first.data.split()[0])
        assert await pid(workers, "two") == process
        with pytest.raises(InvalidGrammar, match="it says refuse"):
            await workers.compile(grammar("refuse"))
        assert await pid(workers) == process
        assert alive(process)
    assert not alive(process)


def test_a_worker_lowers_the_priority_of_its_process_and_of_its_session() -> None:
    """A niceness within one session changes nothing where Linux groups tasks by session."""
    group = Path("/proc/self/autogroup")
    told = "import os; print(os.getsid(0) == os.getpid(), os.nice(0))"
    if group.exists():
        told += f"; print(open('{group}').read())"
    code = f"from grammar_service.compile.worker import lower_priority; lower_priority(7); {told}"
    lines = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()
    assert lines[0] == f"True {os.nice(0) + 7}"
    assert not group.exists() or lines[1].endswith("nice 7")


async def test_a_slow_grammar_kills_its_own_worker_alone(vocabulary: Vocabulary) -> None:
    async with pool(vocabulary, workers=2, timeout_s=3.0) as workers:
        await workers.ready()
        victim = asyncio.create_task(workers.compile(grammar("sleep")))
        other = await pid(workers)
        with pytest.raises(LimitExceeded, match=r"compile_timeout_s: .* within 3 s"):
            await victim
        await workers.ready()
        assert workers.stats()["killed"] == 1
        assert alive(other)


async def test_a_starved_worker_is_replaced_by_one_of_the_fallback(vocabulary: Vocabulary) -> None:
    """`sleep` uses no CPU time, as a worker at idle priority does on a machine that is never idle."""
    commands: list[Sequence[str]] = []

    async def start(command: Sequence[str]) -> CompileProcess:
        commands.append(command)
        return await CompileProcess.start(PRETEND)

    async with pool(vocabulary, workers=2, timeout_s=0.3, start=start, fallback=("fallback",)) as workers:
        await workers.ready()
        with pytest.raises(LimitExceeded, match="compile_timeout_s"):
            await workers.compile(grammar("sleep"))
        assert commands[:3] == [PRETEND] * 3
        assert commands[-1] == ("fallback",)
        await workers.ready()
        set_limit(workers, LONG_S)
        assert await pid(workers)


async def test_a_slow_grammar_at_idle_priority_leaves_the_cores_to_others(vocabulary: Vocabulary) -> None:
    """Refused once, its worker gets the smaller share; starved with that, the next one keeps its own."""
    weighed: list[tuple[CompileProcess, int]] = []

    async def start(command: Sequence[str]) -> CompileProcess:
        worker = await CompileProcess.start(PRETEND)

        def weigh(niceness: int) -> bool:
            weighed.append((worker, niceness))
            return len(weighed) > 1

        worker.weigh = weigh  # type: ignore[method-assign]
        # Slow at the first look, and starved at the time limit.
        worker.cpu_s = itertools.chain((0.0, 0.0, SLOW_S), itertools.repeat(0.0)).__next__  # type: ignore[method-assign]
        return worker

    async with pool(vocabulary, timeout_s=2.5, start=start, fallback=("fallback",)) as workers:
        await workers.ready()
        refused = asyncio.create_task(workers.compile(grammar("sleep")))
        await eventually(lambda: len(weighed) == 2)
        set_limit(workers, 0.3)
        with pytest.raises(LimitExceeded, match="compile_timeout_s"):
            await refused
        assert workers.stats()["killed"] >= 3  # by any spare worker at idle priority, and by one of the fallback
        assert weighed == [(weighed[0][0], SLOW_NICENESS)] * 2


async def test_a_slow_grammar_of_low_priority_keeps_its_share(vocabulary: Vocabulary) -> None:
    weighed: list[int] = []
    async with pool(vocabulary, timeout_s=1.2) as workers:
        await workers.ready()
        for worker in workers._all:
            worker.weigh = weighed.append  # type: ignore[method-assign,assignment]
        with pytest.raises(LimitExceeded, match="compile_timeout_s"):
            await workers.compile(grammar("sleep"))
        assert not weighed


@pytest.mark.parametrize("command", [("setsid",), ()])
async def test_only_a_session_of_its_own_is_weighed(command: tuple[str, ...]) -> None:
    """A process that shares the session of another one would change the other one's share."""
    worker = await CompileProcess.start((*command, sys.executable, "-c", "input()"))
    try:
        process = worker._process.pid
        await eventually(lambda: not command or os.getsid(process) == process)
        before = session_share(os.getpid())
        await eventually(lambda: worker.weigh(SLOW_NICENESS))
        assert session_share(os.getpid()) == before
        assert not command or before is None or session_share(process) == f"nice {SLOW_NICENESS}"
    finally:
        await worker.kill()
    assert worker.weigh(SLOW_NICENESS)  # it has ended


def session_share(process: int) -> str | None:
    """Return the niceness of a process's session; None where Linux does not group tasks by session."""
    group = Path(f"/proc/{process}/autogroup")
    return group.read_text(encoding="ascii").strip().partition(" ")[2] if group.exists() else None


async def test_a_worker_that_computes_is_not_starved(vocabulary: Vocabulary) -> None:
    async with pool(vocabulary, timeout_s=0.3, fallback=("fallback",)) as workers:
        await workers.ready()
        for worker in workers._all:
            worker.cpu_s = itertools.chain((0.0,), itertools.repeat(0.2)).__next__  # type: ignore[method-assign]
        with pytest.raises(LimitExceeded, match="compile_timeout_s"):
            await workers.compile(grammar("sleep"))
        assert workers.stats()["killed"] == 1


async def test_the_cpu_time_of_a_worker_grows_while_it_computes(vocabulary: Vocabulary) -> None:
    async with pool(vocabulary) as workers:
        await workers.ready()
        before = {worker: worker.cpu_s() for worker in workers._all}
        for number in range(20):
            await workers.compile(grammar(f"text {number}"))
        assert all(cpu_s > 0 for cpu_s in before.values())
        busy = max(before, key=lambda worker: worker.cpu_s() - before[worker])
        assert busy.cpu_s() > before[busy]
        await busy.kill()
        assert busy.cpu_s() == 0.0


async def test_a_start_without_a_second_descriptor_leaves_none_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    spare = os.dup(0)
    os.close(spare)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare + 1, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            await CompileProcess.start(PRETEND)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_cancelled_kill_ends_after_the_process() -> None:
    worker = await CompileProcess.start(PRETEND)
    killing = asyncio.create_task(worker.kill())
    await asyncio.sleep(0)
    killing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await killing
    assert worker._process.returncode == -signal.SIGKILL
    assert worker.artifact_fd == -1


async def test_a_closed_pool_starts_no_worker(vocabulary: Vocabulary) -> None:
    async with pool(vocabulary) as workers:
        assert (await workers.compile(grammar("one"))).data
    started = workers.stats()["started"]
    with pytest.raises(InternalError, match="are being ended"):
        await workers.compile(grammar("two"))
    assert (workers.stats()["started"], workers.stats()["workers"]) == (started, 0)


async def test_a_crash_is_an_error_of_one_request(vocabulary: Vocabulary) -> None:
    async with pool(vocabulary) as workers:
        before = await pid(workers)
        with pytest.raises(InternalError, match="exit -11"):
            await workers.compile(grammar("crash"))
        assert await pid(workers) != before
        await eventually(lambda: not alive(before))
        await workers.ready()
        assert len(workers._all) == 2, "no process is kept that has crashed"


@pytest.mark.parametrize("text", ["forget", "starve"])
async def test_a_worker_out_of_memory_is_a_limit_error(vocabulary: Vocabulary, text: str) -> None:
    async with pool(vocabulary) as workers:
        with pytest.raises(LimitExceeded, match=r"compile_memory_mb: .* 512 MiB"):
            await workers.compile(grammar(text))
        assert (await workers.compile(grammar("next"))).data.endswith(b" next")


async def test_a_worker_that_exits_while_idle_is_no_error_of_the_next_request(vocabulary: Vocabulary) -> None:
    async with pool(vocabulary) as workers:
        before = await pid(workers)
        os.kill(before, signal.SIGKILL)
        await eventually(lambda: workers.stats()["crashed"] or not alive(before))
        assert await pid(workers, "next") != before
        assert workers.stats()["crashed"] == 1


async def test_a_cancelled_call_frees_its_worker(vocabulary: Vocabulary, tmp_path: Path) -> None:
    async with pool(vocabulary) as workers:
        before = await pid(workers)
        call = asyncio.create_task(workers.compile(grammar(f"begin {tmp_path / 'begun'}")))
        await eventually((tmp_path / "begun").exists)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await pid(workers) != before


async def test_the_queue_has_a_bound(vocabulary: Vocabulary) -> None:
    async with pool(vocabulary, queue=2) as workers:
        calls = [asyncio.create_task(workers.compile(grammar("pause"))) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(LimitExceeded, match="compile_queue: 2"):
            await workers.compile(grammar("a"))
        await asyncio.gather(*calls)


async def test_slow_grammars_let_quick_ones_pass_and_end_all_the_same(vocabulary: Vocabulary, tmp_path: Path) -> None:
    """With one place: the first slow one goes on next to it, and the others begin again, one after the other."""
    async with pool(vocabulary) as workers:
        gate = tmp_path / "open"
        slow = [asyncio.create_task(workers.compile(grammar(f"hold{i} {gate}"))) for i in range(3)]
        for number in range(3):
            text = f"quick{number}"
            assert (await workers.compile(grammar(text))).data.endswith(text.encode())
        assert not any(task.done() for task in slow)
        gate.touch()
        assert [artifact.data.split()[1] for artifact in await asyncio.gather(*slow)] == [b"hold0", b"hold1", b"hold2"]
        await eventually(lambda: workers.stats()["workers"] <= 2)
        stats = workers.stats()
        assert (stats["killed"], stats["crashed"], stats["waiting"]) == (0, 0, 0)


@pytest.mark.parametrize("size", [SMALL_BYTES, LARGE_BYTES])
async def test_longer_grammars_delay_no_small_one(vocabulary: Vocabulary, tmp_path: Path, size: int) -> None:
    """The first one has the place of the slow ones, the second one that of its size, and neither computes."""
    async with pool(vocabulary, timeout_s=600.0) as workers:
        begun = tmp_path / "one", tmp_path / "two"
        longer = [asyncio.create_task(workers.compile(grammar(f"{'x' * size} begin {path}"))) for path in begun]
        await eventually(lambda: all(path.exists() for path in begun), LONG_S)
        async with asyncio.timeout(LONG_S):
            assert (await workers.compile(grammar("quick"))).data.endswith(b" quick")
        assert not any(task.done() for task in longer)


async def test_a_small_slow_grammar_does_not_wait_for_large_slow_ones(vocabulary: Vocabulary, tmp_path: Path) -> None:
    async with pool(vocabulary, timeout_s=600.0) as workers:
        shut, gate = tmp_path / "shut", tmp_path / "open"
        filler = "x" * LARGE_BYTES
        large = [asyncio.create_task(workers.compile(grammar(f"{filler} hold{i} {shut}"))) for i in range(2)]
        await eventually(lambda: "free=0" in repr(workers._large.slow), LONG_S)
        assert "free=1" in repr(workers._small.slow)
        small = asyncio.create_task(workers.compile(grammar(f"hold2 {gate}")))
        await eventually(lambda: "free=0" in repr(workers._small.slow), LONG_S)
        gate.touch()
        assert (await small).data.split()[1] == b"hold2"
        assert not any(task.done() for task in large)
        for task in large:  # the second one would get the place of the first one, whose worker ends with the pool
            task.cancel()
        await asyncio.gather(*large, return_exceptions=True)


@pytest.mark.parametrize(("ordinary_s", "yielded"), [(0.0, 1), (SLOW_S, 0)])
async def test_a_grammar_is_slow_if_ordinary_ones_are_quicker(
    vocabulary: Vocabulary, tmp_path: Path, ordinary_s: float, yielded: int
) -> None:
    """The first one has the place of the slow ones, so the second one is killed if it is slow, and begins again."""
    looks = 0

    def cpu_s() -> float:
        nonlocal looks
        looks += 1
        return 1.5 * SLOW_S if looks > 2 else 0.0

    async def start(command: Sequence[str]) -> CompileProcess:
        worker = await CompileProcess.start(command)
        worker.ordinary_s = ordinary_s
        worker.cpu_s = cpu_s  # type: ignore[method-assign]
        return worker

    async with pool(vocabulary, timeout_s=600.0, start=start) as workers:
        assert workers._small.slow.try_acquire(NO_TENANT)
        await workers.ready()
        task = asyncio.create_task(workers.compile(grammar(f"begin {tmp_path / 'begun'}")))
        await eventually(lambda: looks > 8 or workers.stats()["yielded"], LONG_S)
        assert workers.stats()["yielded"] == yielded
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_the_time_until_a_place_is_free_is_no_compile_time(vocabulary: Vocabulary) -> None:
    """Two that never end: the second one begins when the first one was killed at its limit, and has its own time."""
    async with pool(vocabulary, timeout_s=1.0) as workers:
        begun = time.monotonic()
        first, second = (asyncio.create_task(workers.compile(grammar(f"sleep{i}"))) for i in range(2))
        for each in (first, second):
            with pytest.raises(LimitExceeded, match="compile_timeout_s"):
                await each
        assert time.monotonic() - begun > 1.9
        set_limit(workers, LONG_S)
        assert (await workers.compile(grammar("next"))).data.endswith(b" next")


async def test_a_slow_grammar_that_is_promoted_keeps_its_place_before_the_others(
    vocabulary: Vocabulary, tmp_path: Path
) -> None:
    async with pool(vocabulary) as workers:
        gate = tmp_path / "open"
        slow = [asyncio.create_task(workers.compile(grammar(f"hold{i} {gate}"), name=f"hold{i}")) for i in range(3)]
        await eventually(lambda: workers._small.slow.num_waiting == 2, LONG_S)
        workers.promote("hold2")
        assert repr(workers._small.slow) == "<CompileQueue free=0 accepted=1 others=1>"
        gate.touch()
        assert [artifact.data.split()[1] for artifact in await asyncio.gather(*slow)] == [b"hold0", b"hold1", b"hold2"]


async def test_a_grammar_that_is_promoted_while_it_runs_waits_for_as_long_as_it_takes(
    vocabulary: Vocabulary, tmp_path: Path
) -> None:
    async with pool(vocabulary) as workers:
        gates = tmp_path / "one", tmp_path / "two"
        first = asyncio.create_task(workers.compile(grammar(f"hold0 {gates[0]}")))
        await eventually(lambda: "free=0" in repr(workers._small.slow), LONG_S)
        second = asyncio.create_task(workers.compile(grammar(f"hold1 {gates[1]}"), name="second"))
        await eventually(lambda: "free=0" in repr(workers._small.first), LONG_S)
        workers.promote("second")
        await eventually(lambda: workers.stats()["yielded"] == 1, LONG_S)
        assert repr(workers._small.slow) == "<CompileQueue free=0 accepted=1 others=0>"
        for gate in gates:
            gate.touch()
        assert [each.data.split()[1] for each in (await first, await second)] == [b"hold0", b"hold1"]


async def test_a_long_wait_for_a_worker_ends_with_a_limit_of_its_own(vocabulary: Vocabulary) -> None:
    async with pool(vocabulary, queue_s=0.2) as workers:
        sleeper = asyncio.create_task(workers.compile(grammar("sleep")))
        await eventually(lambda: "free=0" in repr(workers._small.first))
        accepted = asyncio.create_task(workers.compile(grammar("accepted"), accepted=True))
        with pytest.raises(LimitExceeded, match=r"^no compile worker .* free within 0.2 s"):
            await workers.compile(grammar("a"))
        sleeper.cancel()
        assert (await accepted).data.endswith(b" accepted")


async def test_a_worker_that_cannot_start_reports_the_reason(vocabulary: Vocabulary) -> None:
    async with pool(vocabulary, memory_mb=666) as workers:
        for _ in range(2):
            with pytest.raises(GrammarServiceError, match="tokenizer_json: cannot be read"):
                await workers.compile(grammar("a"))


async def test_the_real_worker_compiles_and_never_loads_torch(vocabulary: Vocabulary) -> None:
    workers = CompilePool(
        "llguidance", vocabulary, workers=1, limits=CompileLimits(timeout_s=20, memory_mb=512), queue=1, queue_s=600
    )
    try:
        artifact = await workers.compile(parse(Kind.JSON_OBJECT, "", Whitespace.COMPACT))
        assert b"%json" in artifact.data
        assert {process.loads_torch for process in workers._all} == {False}
        with pytest.raises(InvalidGrammar, match="uniqueItems"):
            await workers.compile(parse(Kind.JSON_SCHEMA, '{"uniqueItems":true}', Whitespace.COMPACT))
        parameter = '{"format":{"type":"qwen_xml_parameter","json_schema":{"type":"object"}}}'
        with pytest.raises(NotSupported, match="qwen_xml_parameter"):
            await workers.compile(parse(Kind.STRUCTURAL_TAG, parameter, Whitespace.ANY))
    finally:
        await workers.close()


async def test_workers_that_could_not_be_started_are_started_again(vocabulary: Vocabulary) -> None:
    starts = 0

    async def start(command: Sequence[str]) -> CompileProcess:
        nonlocal starts
        starts += 1
        if starts <= 4:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return await CompileProcess.start(command)

    async with pool(vocabulary, workers=2, start=start) as workers:
        await eventually(lambda: starts == 3)
        with pytest.raises(LimitExceeded, match=r"compile_workers: .*Too many open files"):
            await workers.compile(grammar("a"))
        assert await pid(workers, "b")
