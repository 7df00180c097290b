"""vLLM's service of a real server, without a gateway: our own service's tokens, and the blocks of the prefix cache."""

from __future__ import annotations

import asyncio
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import grpc
import pytest
import tokenizers
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as common

from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc
from tests.e2e.asking import answer, chat, idle_stats
from tests.e2e.conftest import RunningServer
from tests.rpc_client import Client

pytestmark = pytest.mark.model
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]})


async def complete(stub: Any, request: vllm.GenerateRequest) -> tuple[list[int], vllm.GenerateComplete]:
    """Return the tokens of the chunks, and the complete."""
    responses = [response async for response in stub.Generate(request, timeout=60)]
    return [token for r in responses for token in r.chunk.token_ids], responses[-1].complete


@pytest.mark.parametrize(("temperature", "guided"), [(0.0, False), (0.8, True)])
async def test_both_services_give_the_same_tokens(server: RunningServer, temperature: float, guided: bool) -> None:
    prompt, sampling = [100 + i for i in range(20)], {"temperature": temperature, "seed": 5, "max_tokens": 24}
    ours = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling)  # type: ignore[arg-type]
    theirs = vllm.GenerateRequest(tokenized={"input_ids": prompt}, sampling_params=sampling, stream=True)
    if guided:
        ours.grammar.json_schema = theirs.sampling_params.json_schema = SCHEMA
    async with Client(server.address) as client, grpc.aio.insecure_channel(server.address) as channel:
        expected = await answer(client, ours)
        tokens, last = await complete(vllm_engine_pb2_grpc.VllmEngineStub(channel), theirs)
    assert tokens == list(last.output_ids) == expected.token_ids
    assert last.finish_reason == ("stop" if guided else "length")
    assert last.spec_draft_tokens >= last.spec_accepted_tokens
    if guided:
        assert last.spec_accepted_tokens > 0, "the grammar forces tokens of the key"


async def test_the_archive_holds_the_tokenizer_of_the_model(server: RunningServer, tmp_path: Path) -> None:
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        content = b"".join([c.data async for c in stub.GetTokenizer(common.GetTokenizerRequest(), timeout=60)])
        text = "Oslo, \u00e5tte \u6771\u4eac"
        expected = await engine_pb2_grpc.EngineStub(channel).Tokenize(pb.TokenizeRequest(text=text), timeout=60)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        archive.extractall(tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode(text).ids == list(expected.token_ids)
    assert "<|im_start|>" in (tmp_path / "chat_template.jinja").read_text()


async def test_events_tell_which_pages_are_cached(server: RunningServer) -> None:
    blocks: dict[int, list[int]] = {}

    def apply(batch: common.KvEventBatch) -> None:
        for event in batch.events:
            if event.HasField("cleared"):
                blocks.clear()
            for block in event.stored.blocks:
                blocks[block.block_hash] = list(block.token_ids)
            for block_hash in event.removed.block_hashes:
                del blocks[block_hash]

    async with Client(server.address) as client, grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        events = stub.SubscribeKvEvents(common.SubscribeKvEventsRequest(), timeout=60)
        prompt = [7000 + i for i in range(40)]
        await answer(client, pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling={"max_tokens": 4}))  # type: ignore[arg-type]
        cached = (await idle_stats(client)).pages_cached
        async with asyncio.timeout(30):
            while prompt[16:32] not in blocks.values():
                apply(await events.read())
        assert prompt[:16] in blocks.values()
        assert len(blocks) <= cached, "pages with a salt, of other tests, are cached and not told"
        events.cancel()
        # Without a subscriber, requests go on as before.
        assert (await answer(client, chat("Hi", sampling=pb.SamplingParams(max_tokens=4)))).token_ids
