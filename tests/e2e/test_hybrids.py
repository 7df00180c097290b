"""A hybrid served by a real process with few pages, when its grammar process is killed: no token changes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from protos.engine.v1 import engine_pb2 as pb
from tests.e2e.asking import Answer, answer, idle_stats, left_idle, started_again
from tests.e2e.conftest import small_server
from tests.gpu_engine import hybrids
from tests.rpc_client import Client

pytestmark = pytest.mark.slow

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 8, "maxLength": 20},
        "years": {"type": "array", "items": {"type": "integer"}, "minItems": 6, "maxItems": 6},
    },
    "required": ["name", "years"],
    "additionalProperties": False,
}


def requests(drafts: int) -> list[pb.GenerateRequest]:
    """Return four guided requests and two free ones, which begin alike."""
    made = []
    for number in range(6):
        request = pb.GenerateRequest(
            text=f"A tower, its name and its years, as JSON; the number of the tower is {number}: ",
            sampling=pb.SamplingParams(
                max_tokens=70, temperature=0.7 * (number % 2), seed=number, ignore_eos=number > 3
            ),
            speculation=pb.Speculation(num_draft_tokens=drafts),
        )
        if number < 4:
            request.grammar.json_schema = json.dumps(SCHEMA)
        made.append(request)
    return made


async def test_a_kill_and_preemptions_change_no_token_of_a_hybrid(tmp_path: Path) -> None:
    folder = hybrids.save("qwen3_5", tmp_path)
    with small_server(folder, "--kv-cache-tokens", "384") as server:
        async with Client(server.address) as client:
            wanted = [(await answer(client, each)).whole for each in requests(0)]
            before = await idle_stats(client)
            killed: list[int] = []

            def kill(one: Answer) -> None:
                if len(one.token_ids) >= 10 and not killed:
                    killed.append(1)
                    server.kill_grammar_process()

            for times, drafts in enumerate((0, 7), start=1):
                killed.clear()
                found = await asyncio.gather(*(answer(client, each, kill) for each in requests(drafts)))
                assert [each.whole for each in found] == wanted
                await started_again(client, before.grammar_starts + times)
                await left_idle(client)
            after = await idle_stats(client)
    assert after.cached_tokens > before.cached_tokens
    assert after.accepted_draft_tokens > before.accepted_draft_tokens
