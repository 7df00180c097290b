"""Servers of tiny models with few pages, whose grammar process is killed while sequences are preempted and cancelled.

A row is a server and what its requests have besides a grammar. The reference is each request by itself on the same
server, without drafts. Not responsible for: what adapters, processors and drafters compute (see tests/gpu_engine/).
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil
import pytest

from benchmarks.harness.server import EngineServer, ServerOptions
from lockstep_client import AsyncExecutor
from protos.engine.v1 import engine_pb2 as pb
from tests.e2e.asking import ANSWER_TIMEOUT_S, Answer, idle_stats, left_idle, started_again
from tests.e2e.conftest import RunningServer
from tests.gpu_engine import dflash, hybrids, tiny
from tests.gpu_engine.adapters.files import save_lora, save_prompt
from tests.rpc_client import Client

pytestmark = pytest.mark.slow

COUNT, CANCELLED = 12, 6
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "minLength": 12, "maxLength": 30}, "n": {"type": "integer"}},
        "required": ["name", "n"],
        "additionalProperties": False,
    }
)
STATES = "hidden_states.1"


def target(root: Path) -> Path:
    return tiny.save(tiny.FAMILIES["llama"](), root / "target", rounds=True)


def with_adapters(root: Path) -> tuple[Path, list[str]]:
    folder = target(root)
    files = {
        "a": save_lora(folder, root / "a", seed=1),
        "b": save_lora(folder, root / "b", seed=2, rank=8, targets=("q_proj", "v_proj")),
        "p": save_prompt(root / "p", tokens=20, hidden=64, seed=1),
    }
    return folder, [flag for name, path in files.items() for flag in ("--adapter", f"{name}={path}")]


def add_adapters(request: pb.GenerateRequest, number: int) -> None:
    request.lora, request.prompt_adapter = ("", "a", "b")[number % 3], "p" if number // 3 % 2 else ""


def with_processors(root: Path) -> tuple[Path, list[str]]:
    room = "gpu_engine.processors"
    entries = f"ngrams={room}.ngrams:NoRepeatedNgrams", f"end={room}.long_answers:LengthPenalty"
    clients = f'clients={room}.client_tokens:ForbiddenForClient{{"clients": {{"guest": [101, 102]}}}}'
    return target(root), [flag for entry in (*entries, clients) for flag in ("--logits-processor", entry)]


def add_processors_and_tensors(request: pb.GenerateRequest, number: int) -> None:
    """Add processors of each kind, and tensors of every row: a salt keeps the runs from sharing pages."""
    uses = {"ngrams": '{"size": 8}', "end": '{"start": 8, "factor": 1.2}', "clients": ""}
    for name in [*uses][: number % 4]:
        request.logits_processors.add(name=name, arguments=uses[name])
    request.client_id, request.cache_salt = "guest", f"{request.speculation.num_draft_tokens} {number}"
    request.response.context_logits, request.response.generation_logits = number == 0, True
    request.response.additional_outputs.add(name=STATES, context=True)


def decoupled(root: Path) -> tuple[Path, list[str]]:
    other = tiny.save(tiny.FAMILIES["llama"](), root / "other", rounds=True, seed=1)
    return target(root), ["--drafter", "decoupled", "--draft-model", str(other), "--draft-dir", str(root)]


def with_block(masks: str, root: Path) -> tuple[Path, list[str]]:
    dflash.save_repeating(root / "dflash")
    return target(root), ["--drafter", "dflash", "--draft-model", str(root / "dflash"), "--draft-masks", masks]


def hybrid(root: Path) -> tuple[Path, list[str]]:
    return hybrids.save("qwen3_5", root / "target"), []


def nothing(request: pb.GenerateRequest, number: int) -> None:
    """Leave the request as it is."""


Files = Callable[[Path], tuple[Path, list[str]]]
ROWS: dict[str, tuple[Files, Callable[[pb.GenerateRequest, int], None]]] = {
    "adapters": (with_adapters, add_adapters),
    "processors and tensors": (with_processors, add_processors_and_tensors),
    "decoupled": (decoupled, nothing),
    "block": (lambda root: with_block("on", root), nothing),
    "block, unmasked": (lambda root: with_block("off", root), nothing),
    "hybrid": (hybrid, nothing),
}


@dataclass(slots=True)
class Found(Answer):
    """An answer with the rows of its tensors."""

    rows: dict[str, bytes] = field(default_factory=dict)
    begins: dict[str, int] = field(default_factory=dict)

    def take(self, response: pb.GenerateResponse) -> None:
        """Add a response; asserts that no row is missing or comes twice."""
        Answer.take(self, response)
        for output in response.outputs:
            begin, before = self.begins.setdefault(output.name, output.start), self.rows.get(output.name, b"")
            assert output.start == begin + len(before) * output.shape[0] // len(output.data)
            self.rows[output.name] = before + output.data


def request(row: str, number: int, drafts: int) -> pb.GenerateRequest:
    guided = number % 2 == 0
    made = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=random.Random(number).choices(range(97, 123), k=30)),
        sampling=pb.SamplingParams(max_tokens=90, seed=number, temperature=0.7 * (number % 3), ignore_eos=not guided),
        speculation=pb.Speculation(num_draft_tokens=drafts),
    )
    if guided:
        made.grammar.json_schema = SCHEMA
    ROWS[row][1](made, number)
    return made


async def answer(client: Client, made: pb.GenerateRequest, ten: Callable[[], None] = lambda: None) -> Found:
    """Return the answer; `ten` is called once it has ten tokens."""
    found = Found()
    async for response in client.generate(made, timeout_s=ANSWER_TIMEOUT_S):
        had = len(found.token_ids)
        found.take(response)
        if had < 10 <= len(found.token_ids):
            ten()
    return found


async def check(row: str, server: RunningServer) -> None:
    async with Client(server.address) as client:
        wanted = [await answer(client, request(row, number, 0)) for number in range(COUNT)]
        assert len({tuple(each.token_ids) for each in wanted}) > COUNT - 3
        for turn, drafts in enumerate((3, 7)):
            before, begun, tens = await idle_stats(client), asyncio.Event(), list[int]()

            def ten(tens: list[int] = tens, begun: asyncio.Event = begun) -> None:
                tens.append(1)
                if len(tens) == 3:
                    begun.set()

            asked = [asyncio.create_task(answer(client, request(row, i, drafts), ten)) for i in range(COUNT)]
            cancelled = [asyncio.create_task(answer(client, request(row, COUNT + i, drafts))) for i in range(CANCELLED)]
            await asyncio.wait_for(begun.wait(), ANSWER_TIMEOUT_S)
            server.kill_grammar_process()
            for task in cancelled:
                task.cancel()
            if row == "decoupled":
                names = [str(Path((await client.info()).draft_model).parent / name) for name in ("target", "other")]
                await client.exchange_drafter(names[turn])
                assert (await client.info()).draft_model == names[turn]
            found = await asyncio.wait_for(asyncio.gather(*asked), ANSWER_TIMEOUT_S)
            assert [(each.whole, each.begins) for each in found] == [(each.whole, each.begins) for each in wanted]
            assert [each.rows for each in found] == [each.rows for each in wanted], "with the same bits"
            for task in cancelled:
                with pytest.raises((asyncio.CancelledError, grpc.RpcError)):
                    await task
            await started_again(client, before.grammar_starts + 1)
            after = await left_idle(client)
            assert after.grammar_starts == before.grammar_starts + 1
            assert after.accepted_draft_tokens > before.accepted_draft_tokens
            assert after.cached_tokens > before.cached_tokens or row != "hybrid"
        if row == "decoupled":
            folder = Path((await client.info()).draft_model).parent
            for path, status in ((str(folder / "none"), "NOT_FOUND"), ("/etc", "INVALID_ARGUMENT")):
                with pytest.raises(grpc.aio.AioRpcError, match=f"StatusCode.{status}") as caught:
                    await client.exchange_drafter(path)
                assert str(caught.value.details()).startswith("path: ")
        if row == "processors and tensors":
            plain = request(row, 3, 0)
            del plain.logits_processors[:]
            assert (await answer(client, plain)).token_ids != wanted[3].token_ids, "the processors change the answer"
        assert not any(adapter.in_use for adapter in (await client.adapters()).adapters)
        tensors = {"generation_logits", STATES} if row == "processors and tensors" else set()
        assert all(each.rows.keys() - {"context_logits"} == tensors for each in wanted)
    async with AsyncExecutor(address=server.address) as executor:
        assert sum(each.preempted for each in await executor.get_latest_iteration_stats()) > 0


@pytest.mark.parametrize("row", ROWS)
async def test_kills_preemption_and_cancels_change_no_token_and_leak_nothing(row: str, tmp_path: Path) -> None:
    folder, flags = ROWS[row][0](tmp_path)
    sizes = ("--max-model-len", "256", "--kv-cache-tokens", "384", "--row-timeout-ms", "2000")
    options = ServerOptions(model=str(folder), dtype="float32", num_threads=1, max_batch_size=8, extra=(*sizes, *flags))
    with EngineServer(options) as engine:
        assert engine.pid is not None
        await check(row, RunningServer(engine.address, psutil.Process(engine.pid)))
