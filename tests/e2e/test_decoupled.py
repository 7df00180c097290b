"""A decoupled draft model over the wire: the grammar process is killed, sequences are preempted, and the model is
exchanged, while requests run.

Not responsible for: what the drafter computes (see tests/gpu_engine/drafters/test_decoupled.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from benchmarks.harness.server import EngineServer, ServerOptions
from lockstep_client import AsyncClient
from tests.e2e.asking import ANSWER_TIMEOUT_S, answer, idle_stats, started_again, steps_after
from tests.e2e.conftest import RunningServer
from tests.e2e.random_requests import COUNT, request
from tests.gpu_engine import tiny
from tests.rpc_client import Client

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the target and another draft model."""
    root: Path = tmp_path_factory.mktemp("models")
    tiny.save(tiny.FAMILIES["llama"](), root / "target", rounds=True)
    tiny.save(tiny.FAMILIES["llama"](), root / "other", rounds=True, seed=1)
    return root


@pytest.fixture(scope="module")
def small(models: Path) -> Iterator[RunningServer]:
    """A server with too few pages for its slots."""
    extra = ["--drafter", "decoupled", "--draft-model", str(models / "other"), "--draft-dir", str(models)]
    extra += ["--max-model-len", "256", "--kv-cache-tokens", "320", "--row-timeout-ms", "2000"]
    options = ServerOptions(
        model=str(models / "target"), dtype="float32", num_threads=1, max_batch_size=8, extra=tuple(extra)
    )
    with EngineServer(options) as engine:
        assert engine.pid is not None
        yield RunningServer(engine.address, psutil.Process(engine.pid))


async def test_kills_preemption_and_exchanges_change_no_token(small: RunningServer, models: Path) -> None:
    names = [str(models / "target"), str(models / "other")]
    async with Client(small.address) as client:
        assert (await client.info()).draft_model == names[1]
        expected = [(await answer(client, request(number, 0))).token_ids for number in range(COUNT)]
        await idle_stats(client)
        for turn, drafts in enumerate((3, 7)):
            before = await client.stats()
            asked = [asyncio.create_task(answer(client, request(number, drafts))) for number in range(COUNT)]
            await steps_after(client, before.steps + 10)
            os.kill(small.grammar_process().pid, signal.SIGKILL)
            async with AsyncClient(small.address) as other:
                assert await other.exchange_drafter(names[turn]) == names[turn]
            found = await asyncio.wait_for(asyncio.gather(*asked), ANSWER_TIMEOUT_S)
            assert [each.token_ids for each in found] == expected
            await started_again(client, before.grammar_starts + 1)
            after = await idle_stats(client)
            assert (after.running, after.waiting, after.pages_used, after.matchers) == (0, 0, 0, 0)
            assert after.accepted_draft_tokens > before.accepted_draft_tokens
            assert (await client.info()).draft_model == names[turn]


async def test_a_model_that_does_not_fit_leaves_the_one_before(small: RunningServer, models: Path) -> None:
    async with Client(small.address) as client:
        before = (await client.info()).draft_model
        for path, status in ((str(models / "none"), "NOT_FOUND"), ("/etc", "INVALID_ARGUMENT")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.exchange_drafter(path)
            assert caught.value.code().name == status
            assert str(caught.value.details()).startswith("path: ")
        assert (await client.info()).draft_model == before
