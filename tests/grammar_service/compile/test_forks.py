"""Compile workers forked from a prepared process: they have its vocabulary, and nothing outlives a kill."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer, decoders, models

from grammar_service.compile.forks import Forks, _Prepared
from grammar_service.compile.pool import COMMAND_IDLE, CompilePool
from grammar_service.compile.process import COMMAND, _environment
from grammar_service.config import CompileLimits
from grammar_service.errors import GrammarServiceError
from grammar_service.grammar.value import Grammar, Kind, Whitespace, parse
from grammar_service.grammar.vocabulary import Vocabulary
from tests.grammar_service.compile.pretending import PRETEND
from tests.waiting import alive, eventually

LONG_S = 300.0
ANY = parse(Kind.JSON_OBJECT, "", Whitespace.COMPACT)


@asynccontextmanager
async def forking(
    vocabulary: Vocabulary, backend: str = "llguidance", answer_s: float = LONG_S
) -> AsyncIterator[tuple[Forks, CompilePool]]:
    forks = Forks(backend, vocabulary, answer_s)
    limits = CompileLimits(timeout_s=120, memory_mb=512)
    pool = CompilePool(backend, vocabulary, workers=1, limits=limits, queue=1, queue_s=600, start=forks.start)
    try:
        yield forks, pool
    finally:
        await pool.close()
        await forks.close()


def prepared_pid(forks: Forks) -> int:
    assert forks._preparing is not None
    return forks._preparing.result()._process._process.pid


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("backend", ["llguidance", pytest.param("xgrammar", marks=pytest.mark.slow)])
async def test_workers_have_the_vocabulary_of_the_process_that_forks_them(vocabulary: Vocabulary, backend: str) -> None:
    pytest.importorskip(backend)
    before = descriptors()
    async with forking(vocabulary, backend) as (forks, pool):
        await pool.ready()
        prepared = psutil.Process(prepared_pid(forks))
        assert prepared.num_threads() == 1, "a fork would copy locks that other threads hold"
        workers = prepared.children()
        assert len(workers) == 2
        first = await pool.compile(ANY)
        second = await pool.compile(Grammar(Kind.REGEX, "[a-z]+", Whitespace.COMPACT))
        assert first.data
        assert second.data
        assert {worker.loads_torch for worker in pool._all} == {backend == "xgrammar"}
        assert min(worker.ordinary_s for worker in pool._all) > 0.0
    assert not any(alive(process.pid) for process in (prepared, *workers))
    await eventually(lambda: descriptors() == before)


async def test_a_vocabulary_that_spells_no_json_compiles_other_grammars() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a"))
    words.decoder = decoders.ByteLevel()
    async with forking(Vocabulary.load(words.to_str().encode(), 3, (2,))) as (_, pool):
        assert (await pool.compile(Grammar(Kind.REGEX, "[ab]+", Whitespace.COMPACT))).data


async def test_a_killed_parent_takes_its_workers_with_it_and_is_replaced(vocabulary: Vocabulary) -> None:
    async with forking(vocabulary) as (forks, pool):
        await pool.ready()
        killed = psutil.Process(prepared_pid(forks))
        workers = killed.children()
        killed.kill()
        await eventually(lambda: not any(alive(worker.pid) for worker in workers), LONG_S)
        assert (await pool.compile(ANY)).data
        assert prepared_pid(forks) != killed.pid
        assert not alive(killed.pid)


@pytest.mark.slow
async def test_a_parent_that_answers_no_more_is_replaced(vocabulary: Vocabulary) -> None:
    async with forking(vocabulary, answer_s=2.0) as (forks, pool):
        await pool.ready()
        stopped = psutil.Process(prepared_pid(forks))
        workers = stopped.children()
        stopped.suspend()
        for worker in workers:
            worker.kill()
        await eventually(lambda: all(worker.status() == psutil.STATUS_ZOMBIE for worker in workers), LONG_S)
        assert (await pool.compile(ANY)).data
        assert prepared_pid(forks) != stopped.pid
        psutil.Process(prepared_pid(forks)).suspend()
    assert not any(alive(process.pid) for process in (stopped, *workers))


async def test_a_compilation_under_a_killed_parent_is_done_again(vocabulary: Vocabulary) -> None:
    async with forking(vocabulary) as (forks, pool):
        await pool.ready()
        for worker in psutil.Process(prepared_pid(forks)).children():
            worker.suspend()
        compilation = asyncio.create_task(pool.compile(ANY))
        await eventually(lambda: len(pool._spare) == 1)
        os.kill(prepared_pid(forks), signal.SIGKILL)
        assert (await compilation).data


async def test_a_killed_worker_is_reported_and_replaced(vocabulary: Vocabulary) -> None:
    async with forking(vocabulary) as (_, pool):
        await pool.ready()
        workers = [*pool._all]
        for worker in workers:
            os.kill(worker._process.pid, signal.SIGKILL)
        assert [await worker._process.wait() for worker in workers] == [-signal.SIGKILL] * 2
        assert [worker.has_exited for worker in workers] == [True, True]
        assert (await pool.compile(ANY)).data
        assert pool.stats()["crashed"] == 2


async def test_only_workers_of_idle_priority_leave_the_cores_to_others(vocabulary: Vocabulary) -> None:
    forks = Forks("llguidance", vocabulary)
    try:
        policies = []
        for command in (COMMAND, COMMAND_IDLE):
            pool = CompilePool(
                "llguidance", vocabulary, workers=1, limits=CompileLimits(), queue=1, queue_s=60, command=command,
                start=forks.start,
            )  # fmt: skip
            await pool.ready()
            policies += [{os.sched_getscheduler(worker._process.pid) for worker in pool._all}]
            await pool.close()
        assert policies == [{os.SCHED_OTHER}, {os.SCHED_IDLE}]
        assert os.sched_getscheduler(prepared_pid(forks)) == os.SCHED_OTHER
    finally:
        await forks.close()


async def test_a_tokenizer_that_cannot_be_read_is_the_error_of_each_compilation(vocabulary: Vocabulary) -> None:
    broken = Vocabulary(b"{}", vocabulary.size, vocabulary.stop_ids, "digest", {})
    async with forking(broken) as (_, pool):
        for _ in range(2):
            with pytest.raises(GrammarServiceError, match="tokenizer_json"):
                await pool.compile(ANY)


async def test_a_library_with_threads_is_not_forked(vocabulary: Vocabulary) -> None:
    forks = Forks("llguidance", vocabulary)

    async def threaded() -> Any:
        return SimpleNamespace(num_threads=2, ordinary_s=0.5, has_ended=False)

    forks._preparing = asyncio.create_task(threaded())
    worker = await forks.start(PRETEND)
    assert worker.ordinary_s == 0.5
    assert psutil.Process(worker._process.pid).ppid() == os.getpid()
    await worker.kill()


@pytest.mark.parametrize(("lasts_s", "looks", "counted"), [(0.2, 6000, 1), (60.0, 100, 2)])
def test_a_thread_that_ends_soon_is_not_counted(lasts_s: float, looks: int, counted: int) -> None:
    code = f"""
import threading, time
from grammar_service.compile import worker
worker._LOOKS = {looks}
threading.Thread(target=time.sleep, args=({lasts_s},), daemon=True).start()
print(worker._num_threads())
"""
    assert int(subprocess.check_output([sys.executable, "-c", code], env=_environment())) == counted


async def test_a_fork_that_the_system_refuses_is_an_error_of_the_system() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    async def kill() -> int:
        return 0

    before = descriptors()
    prepared = _Prepared(SimpleNamespace(kill=kill), ours, 1, 0.0)  # type: ignore[arg-type]  # it has what is used
    asked = asyncio.create_task(prepared.fork(idle=False))
    await eventually(lambda: prepared._asked)
    theirs.send(b"refused 11")
    with pytest.raises(BlockingIOError):
        await asked
    assert descriptors() == before
    theirs.close()
    await eventually(lambda: prepared.has_ended)
    with pytest.raises(EOFError):
        await prepared.fork(idle=False)
    await prepared.close()
