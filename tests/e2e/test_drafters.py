"""Drafters with a model of their own, over the wire: the grammar process is killed, sequences are preempted, and the
model is exchanged, while requests run.

Not responsible for: what the drafters compute (see tests/gpu_engine/drafters/).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from lockstep_client import AsyncClient
from tests.e2e.asking import ANSWER_TIMEOUT_S, answer, idle_stats, left_idle, started_again, steps_after
from tests.e2e.conftest import RunningServer, small_server
from tests.e2e.random_requests import COUNT, request
from tests.gpu_engine import dflash, tiny
from tests.rpc_client import Client

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the target, another model of its family, and a DFlash head."""
    root: Path = tmp_path_factory.mktemp("models")
    tiny.save(tiny.FAMILIES["llama"](), root / "target", rounds=True)
    tiny.save(tiny.FAMILIES["llama"](), root / "other", rounds=True, seed=1)
    dflash.save_repeating(root / "dflash")
    return root


@pytest.fixture(scope="module", params=["decoupled", "dflash", "dflash, unmasked"])
def small(request: pytest.FixtureRequest, models: Path) -> Iterator[RunningServer]:
    extra = ["--drafter", "decoupled", "--draft-model", str(models / "other"), "--draft-dir", str(models)]
    if request.param != "decoupled":
        extra = ["--drafter", "dflash", "--draft-model", str(models / "dflash")]
        extra += ["--draft-masks", "off" if "unmasked" in request.param else "on"]
    with small_server(models / "target", "--kv-cache-tokens", "320", *extra) as server:
        yield server


async def test_kills_preemption_and_exchanges_change_no_token(small: RunningServer, models: Path) -> None:
    names = [str(models / "target"), str(models / "other")]
    async with Client(small.address) as client:
        exchanges = (await client.info()).draft_model == names[1]
        expected = [(await answer(client, request(number, 0))).token_ids for number in range(COUNT)]
        await idle_stats(client)
        for turn, drafts in enumerate((3, 7)):
            before = await client.stats()
            asked = [asyncio.create_task(answer(client, request(number, drafts))) for number in range(COUNT)]
            await steps_after(client, before.steps + 10)
            small.kill_grammar_process()
            if exchanges:
                async with AsyncClient(small.address) as other:
                    assert await other.exchange_drafter(names[turn]) == names[turn]
            found = await asyncio.wait_for(asyncio.gather(*asked), ANSWER_TIMEOUT_S)
            assert [each.token_ids for each in found] == expected
            await started_again(client, before.grammar_starts + 1)
            after = await left_idle(client)
            assert after.accepted_draft_tokens > before.accepted_draft_tokens
            if exchanges:
                assert (await client.info()).draft_model == names[turn]
        if exchanges:
            for path, status in ((str(models / "none"), "NOT_FOUND"), ("/etc", "INVALID_ARGUMENT")):
                with pytest.raises(grpc.aio.AioRpcError, match=f"StatusCode.{status}") as caught:
                    await client.exchange_drafter(path)
                assert str(caught.value.details()).startswith("path: ")
            assert (await client.info()).draft_model == names[1]
