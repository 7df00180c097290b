"""A DFlash head over the wire: the grammar process is killed and sequences are preempted while blocks are drafted.

Not responsible for: what the head drafts (see tests/gpu_engine/drafters/test_dflash.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.harness.server import EngineServer, ServerOptions
from tests.e2e.asking import ANSWER_TIMEOUT_S, answer, idle_stats, started_again, steps_after
from tests.e2e.conftest import RunningServer
from tests.e2e.random_requests import COUNT, request
from tests.gpu_engine import dflash, tiny
from tests.rpc_client import Client

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["on", "off"])
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with too few pages for its slots, with masked or unmasked drafts."""
    root: Path = tmp_path_factory.mktemp("models")
    tiny.save(tiny.FAMILIES["llama"](), root / "target", rounds=True)
    dflash.save_repeating(root / "dflash")
    extra = ["--drafter", "dflash", "--draft-model", str(root / "dflash"), "--draft-masks", request.param]
    extra += ["--max-model-len", "256", "--kv-cache-tokens", "320", "--row-timeout-ms", "2000"]
    options = ServerOptions(
        model=str(root / "target"), dtype="float32", num_threads=1, max_batch_size=8, extra=tuple(extra)
    )
    with EngineServer(options) as engine:
        assert engine.pid is not None
        yield RunningServer(engine.address, psutil.Process(engine.pid))


async def test_kills_and_preemption_change_no_token(small: RunningServer) -> None:
    async with Client(small.address) as client:
        expected = [(await answer(client, request(number, 0))).token_ids for number in range(COUNT)]
        await idle_stats(client)
        for drafts in (3, 7):
            before = await client.stats()
            asked = [asyncio.create_task(answer(client, request(number, drafts))) for number in range(COUNT)]
            await steps_after(client, before.steps + 10)
            os.kill(small.grammar_process().pid, signal.SIGKILL)
            found = await asyncio.wait_for(asyncio.gather(*asked), ANSWER_TIMEOUT_S)
            assert [each.token_ids for each in found] == expected
            await started_again(client, before.grammar_starts + 1)
            after = await idle_stats(client)
            assert (after.running, after.waiting, after.pages_used, after.matchers) == (0, 0, 0, 0)
            assert after.accepted_draft_tokens > before.accepted_draft_tokens
