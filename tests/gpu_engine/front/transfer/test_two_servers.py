"""Two servers with tiny models in one process: one prefills, one decodes; what happens when they do not fit or part."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.cli.client import Client
from gpu_engine.core.engine import Engine
from gpu_engine.front.port.listening import ServerError
from gpu_engine.front.transfer.servicer import SERVICE
from gpu_engine.model.loader import LoadedModel, load_model
from gpu_engine.server import SERVICE as ENGINE_SERVICE
from gpu_engine.server import Parts, Server, open_server
from protos.engine.v1 import engine_pb2 as pb
from tests.gpu_engine.harness import config
from tests.waiting import eventually

PARTS = Parts(load_model, Engine)
TEXT = "A prompt of a hundred and some tokens, which is long enough for a fetch: " + "one two three " * 6
PAGES = (len(TEXT) - 1) // 16


def engine_config(llama: LoadedModel, role: str, **fields: Any) -> EngineConfig:
    return config(model=llama.name, role=role, num_draft_tokens=7, **fields)


def server_config(tmp_path: Path, role: str, **fields: Any) -> ServerConfig:
    base: dict[str, Any] = {"listen": f"unix:{tmp_path}/{role}", "grammar": "none", "drain_timeout_s": 0.0}
    base["prefill_timeout_s"] = 60.0  # however busy the machine is
    if role == "decode":
        base |= {"prefill_from": (f"unix:{tmp_path}/prefill",), "prefill_tokens": 32}
    return ServerConfig(**base | fields)


@asynccontextmanager
async def serving(
    llama: LoadedModel, tmp_path: Path, role: str, engine: dict[str, Any] | None = None, **fields: Any
) -> AsyncIterator[Server]:
    settings = engine_config(llama, role, **engine or {})
    async with open_server(settings, server_config(tmp_path, role, **fields), parts=PARTS) as server:
        yield server


@dataclass
class Pair:
    prefill: Server
    decode: Server
    client: Client


@asynccontextmanager
async def pair(llama: LoadedModel, tmp_path: Path, **fields: Any) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(serving(llama, tmp_path, "prefill"))
        decode = await stack.enter_async_context(serving(llama, tmp_path, "decode", **fields))
        yield Pair(prefill, decode, await stack.enter_async_context(Client(decode.address)))


def ask(text: str = TEXT, max_tokens: int = 12, **fields: Any) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_tokens=max_tokens, temperature=0.7, seed=5, ignore_eos=True)
    return pb.GenerateRequest(text=text, sampling=sampling, **fields)


async def answer(client: Client, request: pb.GenerateRequest) -> tuple[list[int], int]:
    """Return the tokens, and how many of the prompt were cached."""
    ids, cached = [], 0
    async for response in client.generate(request, timeout_s=120):
        ids += response.token_ids
        cached = max(cached, response.usage.cached_tokens)
    return ids, cached


def metric(server: Server, name: str, **labels: str) -> float:
    value = server.calls.watch.registry.get_sample_value(f"lockstep_transfer_{name}", labels)
    return value or 0.0


async def alone(llama: LoadedModel, tmp_path: Path) -> list[int]:
    async with serving(llama, tmp_path, "both") as server, Client(server.address) as client:
        return (await answer(client, ask()))[0]


async def health_of(address: str, service: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


def idle(*servers: Server) -> bool:
    return all((stats := server.stats()).running == stats.waiting == stats.pages_used == 0 for server in servers)


async def test_a_prompt_is_prefilled_there_and_decoded_here(llama: LoadedModel, tmp_path: Path) -> None:
    expected = await alone(llama, tmp_path)
    async with pair(llama, tmp_path) as two:
        assert await answer(two.client, ask()) == (expected, PAGES * 16)
        assert await answer(two.client, ask()) == (expected, PAGES * 16)  # of the prefix cache: nothing is fetched
        assert metric(two.decode, "received_pages_total") == metric(two.prefill, "sent_pages_total") == PAGES
        bytes_of_a_page = two.decode.engine.pages.form.page_bytes
        assert metric(two.decode, "received_bytes_total") == PAGES * bytes_of_a_page
        assert metric(two.decode, "seconds_count") == 1
        assert (await answer(two.client, ask("short")))[1] == 0
        assert metric(two.decode, "seconds_count") == 1
        sampling = pb.SamplingParams(max_tokens=4, n=3, ignore_eos=True)
        many = pb.GenerateRequest(text="The others. " + TEXT, sampling=sampling)
        async for _ in two.client.generate(many, timeout_s=120):
            pass
        assert metric(two.decode, "seconds_count") == 2, "the sequences of a request share one fetch"
        await eventually(lambda: idle(two.prefill, two.decode))


@pytest.mark.slow
async def test_requests_that_need_the_forward_of_their_prompt_are_prefilled_here(
    llama: LoadedModel, tmp_path: Path
) -> None:
    async with pair(llama, tmp_path) as two:
        for options in (pb.ResponseOptions(prompt_logprobs=1), pb.ResponseOptions(context_logits=True)):
            assert await answer(two.client, ask(max_tokens=2, response=options)) != []
        assert metric(two.decode, "seconds_count") == 0
        beams = ask("Beams. " + TEXT, 3, beam_search=pb.BeamSearch(beam_width=2))
        beams.sampling.ClearField("temperature")
        beams.sampling.ClearField("seed")
        async for _ in two.client.generate(beams, timeout_s=120):
            pass
        assert metric(two.decode, "received_pages_total") == (len("Beams. " + TEXT) - 1) // 16


async def test_the_prefill_engine_refuses_generate_and_says_its_role(llama: LoadedModel, tmp_path: Path) -> None:
    async with serving(llama, tmp_path, "prefill") as server, Client(server.address) as client:
        with pytest.raises(grpc.aio.AioRpcError, match="role=prefill") as refused:
            await answer(client, ask())
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert (await client.info()).role == "prefill"
        serving_status, not_serving = (
            health_pb2.HealthCheckResponse.SERVING,
            health_pb2.HealthCheckResponse.NOT_SERVING,
        )
        assert await health_of(server.address, "") == await health_of(server.address, SERVICE) == serving_status
        assert await health_of(server.address, ENGINE_SERVICE) == not_serving


@pytest.mark.slow
async def test_another_model_is_refused_with_one_line_and_the_answer_comes(
    llama: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = await alone(llama, tmp_path)

    def other(settings: EngineConfig, progress: Any) -> LoadedModel:
        model = load_model(settings, progress)
        next(iter(model.net.parameters())).data.flatten()[0] += 1.0
        return model

    async with AsyncExitStack() as stack:
        settings, on = engine_config(llama, "prefill"), server_config(tmp_path, "prefill")
        await stack.enter_async_context(open_server(settings, on, parts=replace(PARTS, load_model=other)))
        decode = await stack.enter_async_context(serving(llama, tmp_path, "decode"))
        client = await stack.enter_async_context(Client(decode.address))
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                assert (await answer(client, ask()))[0] == expected
        lines = [record.getMessage() for record in caplog.records if "prefilled here" in record.getMessage()]
        assert len(lines) == 1
        assert "format: fingerprint is " in lines[0]
        assert metric(decode, "fallbacks_total", reason="differs") == 2  # the second time without asking


async def test_the_answer_comes_without_the_prefill_engine(llama: LoadedModel, tmp_path: Path) -> None:
    expected = await alone(llama, tmp_path)
    async with serving(llama, tmp_path, "decode") as decode, Client(decode.address) as client:
        assert await answer(client, ask()) == (expected, 0)
        assert metric(decode, "fallbacks_total", reason="gone") == 1
        await eventually(lambda: idle(decode))


@pytest.mark.slow
async def test_a_token_of_the_other_port_is_needed(llama: LoadedModel, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("t" * 32)
    async with serving(llama, tmp_path, "prefill", auth_token_file=str(tokens)):
        async with serving(llama, tmp_path, "decode") as decode, Client(decode.address) as client:
            await answer(client, ask())
            assert metric(decode, "fallbacks_total", reason="refused") == 1
        async with (
            serving(llama, tmp_path, "decode", prefill_token_file=str(tokens)) as decode,
            Client(decode.address) as client,
        ):
            assert (await answer(client, ask()))[1] == PAGES * 16


async def test_a_client_that_leaves_ends_the_fetch_on_both_sides(llama: LoadedModel, tmp_path: Path) -> None:
    async with pair(llama, tmp_path) as two:
        for _ in range(4):
            task = asyncio.create_task(answer(two.client, ask("leave " + TEXT, 100)))
            await asyncio.sleep(0.02)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await eventually(lambda: idle(two.prefill, two.decode))
        assert (await answer(two.client, ask()))[0]


@pytest.mark.parametrize(
    ("engine", "server", "message"),
    [
        ({"role": "both"}, {"prefill_from": ("h:1",)}, "prefill_from: is for role=decode"),
        ({"role": "decode"}, {}, "prefill_from: role=decode needs"),
        ({"role": "prefill"}, {"kserve": True}, "kserve: role=prefill generates nothing"),
        ({"role": "prefill", "max_model_len": 32}, {}, "max_model_len: role=prefill needs 66"),
    ],
)
async def test_settings_that_contradict_the_role_are_named(
    engine: dict[str, Any], server: dict[str, Any], message: str
) -> None:
    with pytest.raises(ServerError, match=message):
        async with open_server(EngineConfig(**engine), ServerConfig(grammar="none", **server), parts=PARTS):
            pass


def test_a_role_needs_the_prefix_cache_and_a_drafter_without_a_cache() -> None:
    with pytest.raises(ValueError, match="role: decode needs the prefix cache"):
        EngineConfig(role="decode", prefix_cache=False)
    with pytest.raises(ValueError, match="role: prefill needs a drafter"):
        EngineConfig(role="prefill", drafter="eagle3")


@pytest.mark.slow
async def test_guided_answers_are_those_of_one_engine_with_drafts_and_a_killed_grammar_process(
    llama: LoadedModel, tmp_path: Path
) -> None:
    """Eight prompts at once, guided and free, in a cache that makes some lose their slots."""
    engine = {"kv_cache_tokens": 512, "drafter": "ngram"}
    texts = [f"{at} {TEXT}" for at in range(8)]
    grammars = [pb.Grammar(regex="[a-f]{20,40}"), pb.Grammar(json_object=True), None, None] * 2

    async def answers(client: Client, drafts: int) -> list[list[int]]:
        requests = [ask(text, 40) for text in texts]
        for request, grammar in zip(requests, grammars, strict=True):
            request.speculation.num_draft_tokens = drafts
            request.cache_salt = f"drafts {drafts}"
            if grammar is not None:
                request.sampling.ignore_eos = False
                request.grammar.CopyFrom(grammar)
        return [ids for ids, _ in await asyncio.gather(*(answer(client, request) for request in requests))]

    def end_grammar_process() -> None:
        (child,) = [each for each in psutil.Process().children() if "grammar_service" in each.cmdline()]
        child.kill()

    async with serving(llama, tmp_path, "both", engine, grammar="spawn") as one, Client(one.address) as client:
        expected = await answers(client, 0)
    async with (
        serving(llama, tmp_path, "prefill"),
        serving(llama, tmp_path, "decode", engine, grammar="spawn") as decode,
        Client(decode.address) as client,
    ):
        for drafts in (0, 3, 7):
            fetched = metric(decode, "seconds_count")
            task = asyncio.create_task(answers(client, drafts))
            if drafts == 7:
                await eventually(lambda: decode.stats().running)
                end_grammar_process()
            assert await task == expected, drafts
            assert metric(decode, "seconds_count") > fetched
        assert metric(decode, "received_pages_total") > 0
        await eventually(lambda: idle(decode))
